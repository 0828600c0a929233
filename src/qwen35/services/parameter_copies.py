"""Aligned and, where a kernel wants it, converted copies of parameters, at addresses that captured graphs may keep."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qwen35.domain.alignment import padded
from qwen35.domain.errors import CaptureError
from qwen35.services.devices import Mark, Streams, streams_of
from qwen35.services.scratch import empty_aligned

#: Places that are laid out ahead, so that a parameter first seen inside capture has one: two for each of 64 layers.
AHEAD = 128

#: dtype, size and stride of a parameter, and the dtype wanted of its copy.
_Look = tuple[torch.dtype, int, tuple[int, ...], torch.dtype]


class ParameterCopy:
    """The copy of one parameter. It does not keep the parameter alive, unless a graph may read the copy."""

    __slots__ = ("_filled", "_layout", "_mark", "_ordered", "_retained", "_start", "_storage", "aligned", "streams")

    def __init__(self, source: Tensor, aligned: Tensor, streams: Streams | None) -> None:
        self.aligned = aligned
        self.streams = streams
        storage = source.untyped_storage()
        self._storage, self._start = weakref.ref(storage), storage.data_ptr()
        self._layout = (source.dtype, source.storage_offset(), source.shape, source.stride())
        self._retained: Tensor | None = None
        self._filled = False
        self._mark: Mark | None = None
        self._ordered: set[int] = set()

    @property
    def gone(self) -> bool:
        """Whether the parameter's memory was freed or moved, and no graph may read the copy."""
        if self._retained is not None:
            return False
        storage = self._storage()
        return storage is None or storage.data_ptr() != self._start

    @property
    def retained(self) -> bool:
        """Whether a captured graph may read the copy, so that it lives until everything is closed."""
        return self._retained is not None

    def of(self, source: Tensor) -> bool:
        """Whether this is the copy of ``source``, and not of one that lay at its address before."""
        return self._storage() is source.untyped_storage()

    def use(self, source: Tensor) -> Tensor | None:
        """What work on the current stream may read for ``source``; None where this is not its copy or not filled."""
        if not self._filled or self._storage() is not source.untyped_storage():
            return None
        streams = self.streams
        if streams is not None:
            stream = streams.current()
            if stream and self._retained is None and streams.capturing():
                self.retain(source)
            if stream not in self._ordered:
                self._order(streams, stream)
        return self.aligned

    def retain(self, source: Tensor) -> None:
        """Keep the copy and the memory of ``source`` from now on: a graph may read both."""
        self._retained = source.detach()

    def fill(self, source: Tensor, capturing: bool) -> None:
        """Copy ``source``: at once, or where ``capturing`` as a part of the graph, by each replay."""
        self.aligned.copy_(source.detach())
        if capturing:
            self.retain(source)
        else:
            self.filled(None if self.streams is None else self.streams.mark())

    def refresh(self) -> bool:
        """Copy the parameter anew; False where it is gone. ``filled`` is to follow."""
        source = self._retained
        if source is None:
            storage = self._storage()
            if storage is None:
                return False
            dtype, offset, shape, stride = self._layout
            source = torch.empty(0, dtype=dtype, device=self.aligned.device).set_(storage, offset, shape, stride)
        self.aligned.copy_(source)
        return True

    def filled(self, mark: Mark | None) -> None:
        """The copy holds the parameter's values behind ``mark``, of the current stream."""
        self._filled, self._mark = True, mark
        self._ordered = set() if self.streams is None else {self.streams.current()}

    def _order(self, streams: Streams, stream: int) -> None:
        """Let the current stream wait for the filling, once. Inside capture it cannot: see ``ParameterCopies``."""
        if stream and streams.capturing():
            return
        streams.wait(self._mark)
        streams.uses(self.aligned)
        self._ordered.add(stream)


class ParameterCopies:
    """One copy for each parameter and dtype wanted, found by address, dtype, size and stride.

    A copy belongs to the memory of its parameter: another one that comes to lie at the same address gets its own, and
    copies of parameters that were freed are dropped at the next refresh or new parameter. So there are never more than
    the parameters that live, those freed since, and those in graphs: a copy that was handed out inside capture stays
    until ``close()`` with the memory it was made from, since nothing tells when the graph is gone.

    Work on any stream reads a copy behind its filling or latest refresh: a stream other than the filling's waits for
    an event, once each. A graph cannot wait for what it did not capture, and its replays run no host code: they are
    to be issued behind the filling and refreshes. ``torch.cuda.graph`` sees to the filling, as it waits for the device
    before it captures. A refresh, like the reload that it follows, is to be issued behind earlier uses.

    Version counters are not consulted: engines reload with ``param.data.copy_``, which does not move them.
    """

    def __init__(self, alignment: int, streams: Callable[[torch.device], Streams | None] = streams_of) -> None:
        self._alignment, self._streams_of = alignment, streams
        self._looks: dict[_Look, dict[int, ParameterCopy]] = {}
        self._outlived: list[ParameterCopy] = []
        self._free: list[Tensor] = []
        self._laid_out = False
        self._streams: dict[torch.device, Streams | None] = {}

    def __len__(self) -> int:
        return sum(1 for _ in self._all())

    @property
    def bytes(self) -> int:
        """Bytes held by copies and by places laid out ahead."""
        held = [copy.aligned for copy in self._all()]
        return sum(t.numel() * t.element_size() for t in (*held, *self._free))

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Lay out places of ``nbytes`` each, once. Not inside capture."""
        if self._laid_out:
            return
        row = padded(nbytes, self._alignment)
        arena = empty_aligned((AHEAD, row), torch.uint8, device, self._alignment)
        self._free, self._laid_out = list(arena.unbind(0)), True

    def like(self, source: Tensor, dtype: torch.dtype) -> dict[int, ParameterCopy]:
        """Copies in ``dtype`` of parameters that look like ``source``, by address: one dictionary, kept up to date."""
        return self._looks.setdefault((source.dtype, source.numel(), source.stride(), dtype), {})

    def held(self, source: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The filled copy of ``source`` in ``dtype``, where there is one, for use on the current stream."""
        copy = self.like(source, dtype).get(source.data_ptr())
        return None if copy is None else copy.use(source)

    def take(self, source: Tensor, capturing: bool, dtype: torch.dtype | None = None) -> Tensor:
        """The copy of ``source`` [HV] in ``dtype`` (None: its own) for the current stream; it asks for no gradient.

        One that was first asked for inside capture is filled by the graph's replays, and filled at once before an
        eager caller gets it.
        """
        wanted = dtype or source.dtype
        look, address = self.like(source, wanted), source.data_ptr()
        copy = look.get(address)
        if copy is None or not copy.of(source):
            place = self._place(source, wanted, capturing)
            if copy is not None and copy.retained:
                self._outlived.append(copy)  # other storage over the same memory
            if not capturing:
                self._drop_gone()
            copy = look[address] = ParameterCopy(source, place, self._streams_on(source.device))
        aligned = copy.use(source)
        if aligned is None:
            copy.fill(source, capturing)
        elif capturing:
            copy.retain(source)
        return copy.aligned

    def refresh(self) -> int:
        """Bring every copy up to date, in place; returns how many there are. Raises ``CaptureError`` inside capture."""
        streams = [s for s in self._streams.values() if s is not None]
        if any(s.capturing() for s in streams):
            raise CaptureError("a refresh inside capture would be a part of the graph: refresh parameters outside it")
        self._drop_gone()
        fresh = [copy for copy in self._all() if copy.refresh()]
        marks = {s: s.mark() for s in streams}
        for copy in fresh:
            copy.filled(None if copy.streams is None else marks[copy.streams])
        return len(fresh)

    def close(self) -> None:
        """Free everything."""
        for look in self._looks.values():
            look.clear()
        self._outlived, self._free, self._laid_out = [], [], False

    def _all(self) -> Iterator[ParameterCopy]:
        """Every copy; another thread may ask for their bytes."""
        for look in list(self._looks.values()):
            yield from list(look.values())
        yield from list(self._outlived)

    def _drop_gone(self) -> None:
        for look in self._looks.values():
            for address in [address for address, copy in look.items() if copy.gone]:
                del look[address]

    def _streams_on(self, device: torch.device) -> Streams | None:
        if device not in self._streams:
            self._streams[device] = self._streams_of(device)
        return self._streams[device]

    def _place(self, source: Tensor, dtype: torch.dtype, capturing: bool) -> Tensor:
        """Memory of its own outside capture, so that it can be freed by itself; inside, a place laid out ahead."""
        if not capturing:
            return empty_aligned(source.shape, dtype, source.device, self._alignment)
        nbytes = source.numel() * dtype.itemsize
        if not self._free or self._free[-1].numel() < nbytes or self._free[-1].device != source.device:
            raise CaptureError("a parameter first seen inside capture has no place for its copy: run it once before")
        with torch.inference_mode(False):  # so that a refresh outside that mode can write it
            return self._free.pop()[:nbytes].view(dtype).view(source.shape)
