"""Memory at addresses that stay: aligned, bounded, one buffer for each device, stream and name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from math import prod

import torch
from torch import Tensor

from qwen35.domain.alignment import padded
from qwen35.domain.errors import CaptureError, UnsupportedError
from qwen35.services.devices import capturing, current_stream

#: Streams of one device that may use one scratch: torch hands out 32 of one priority in turn, and there is the default.
MAX_STREAMS = 33
#: Bytes. What a CUDA allocation starts at by itself; enough for the widest loads.
ALIGNMENT = 256

_Place = tuple[torch.device, str]
_Key = tuple[torch.device, int, str]


def empty_aligned(
    shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device, alignment: int
) -> Tensor:
    """An uninitialised contiguous tensor whose ``data_ptr()`` is a multiple of ``alignment`` bytes.

    Allocates less than ``alignment`` bytes more than needed. ``alignment`` must be a multiple of the dtype's size.
    It may be written in and outside inference mode, wherever it is made.
    """
    nbytes = prod(shape) * dtype.itemsize
    with torch.inference_mode(False):
        raw = torch.empty(nbytes + alignment - 1, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % alignment
        return raw[start : start + nbytes].view(dtype).view(shape)


class Scratch:
    """One buffer for each (device, stream, name), as large as was planned for the name and cut to each call.

    A stream's buffer is made by its first eager ``take``. Inside capture nothing is made: a stream that has none gets
    one of ``spare`` that lie ready for each name, whatever the eager streams have taken. Where a plan or an eager call
    needs more than was planned, every stream gets a larger buffer, at least twice as large, when it next asks; one
    that a capture took is kept, since the graph's replays still write it. Work of one stream shares a name's
    buffer, and so do the graphs that were captured on it: they are replayed one after another.
    """

    def __init__(
        self, alignment: int = ALIGNMENT, spare: int = 1, *,
        stream_of: Callable[[torch.device], int] = current_stream,
        inside: Callable[[torch.device], bool] = capturing,
    ) -> None:  # fmt: skip
        self._alignment, self._spare, self._stream_of, self._inside = alignment, spare, stream_of, inside
        self._lock = threading.Lock()
        self._capacity: dict[_Place, int] = {}
        self._buffers: dict[_Key, Tensor] = {}
        self._ready: dict[_Place, list[Tensor]] = {}
        self._captured: dict[int, Tensor] = {}
        self._streams: set[tuple[torch.device, int]] = set()

    @property
    def bytes(self) -> int:
        """Bytes held now, what lies ready and what only a graph may still use among them."""
        with self._lock:
            return _total((*self._in_use(), *self._captured.values()))

    @property
    def bound(self) -> int:
        """Bytes that are never exceeded under the current plan, apart from buffers that captures before it left."""
        with self._lock:
            current = {t.data_ptr() for t in self._in_use()}
            left = _total(t for t in list(self._captured.values()) if t.data_ptr() not in current)
            each = sum(padded(size, self._alignment) for size in self._capacity.values())
            return (MAX_STREAMS + self._spare) * each + left

    def reserve(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """Plan for ``sizes`` bytes, by name. Raises ``CaptureError`` where that needs memory inside capture."""
        with self._lock:
            for name, size in sizes.items():
                place = (device, name)
                if size > self._capacity.get(place, -1):
                    if self._inside(device):
                        raise CaptureError(f"scratch for {name} is planned before capture")
                    self._grow(place, size)

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device,
        most: tuple[int, ...] | None = None,
    ) -> Tensor:  # fmt: skip
        """A dense aligned tensor of ``shape`` with undefined content, at the same address for this stream and name.

        ``most``: the largest shape to come, where a buffer has to be made. Raises ``CaptureError`` where one would have
        to be made inside capture, and ``UnsupportedError`` for more than ``MAX_STREAMS`` streams of the device.
        """
        size = prod(shape) * dtype.itemsize
        key = (device, self._stream_of(device), name)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._make(key, size, size if most is None else prod(most) * dtype.itemsize)
        if self._inside(device):
            self._captured[buffer.data_ptr()] = buffer
        return buffer[:size].view(dtype).view(shape)

    def close(self) -> None:
        """Free everything; what uses it must have ended, and what was captured with it is not to be replayed."""
        with self._lock:
            self._buffers, self._ready, self._captured, self._capacity = {}, {}, {}, {}
            self._streams = set()

    def _in_use(self) -> tuple[Tensor, ...]:
        return (*self._buffers.values(), *(t for ready in self._ready.values() for t in ready))

    def _make(self, key: _Key, size: int, most: int) -> Tensor:
        device, stream, name = key
        place = (device, name)
        with self._lock:
            inside, planned = self._inside(device), self._capacity.get(place, -1)
            if inside and size > planned:
                raise CaptureError(
                    f"scratch for {name} needs {size} bytes and {max(planned, 0)} are planned: prepare a plan that "
                    "covers the call, or make the call once, before capture"
                )
            self._admit(device, stream)
            if inside:
                if not self._ready[place]:
                    raise CaptureError(
                        f"scratch for {name} must exist before capture: make such a call on this stream first"
                    )
                buffer = self._ready[place].pop()
            else:
                if max(size, most) > planned:
                    self._grow(place, max(size, most))
                buffer = self._new(place)
                self._lay_ready(place)
            self._buffers[key] = buffer
            return buffer

    def _admit(self, device: torch.device, stream: int) -> None:
        if (device, stream) in self._streams:
            return
        if sum(1 for other, _ in self._streams if other == device) == MAX_STREAMS:
            raise UnsupportedError("scratch", [f"scratch requires at most {MAX_STREAMS} streams, got one more"])
        self._streams.add((device, stream))

    def _grow(self, place: _Place, size: int) -> None:
        """Raise the capacity; what streams have of this name, and what lay ready, is too small from now on."""
        self._capacity[place] = max(size, 2 * self._capacity.get(place, 0))
        self._buffers = {k: t for k, t in self._buffers.items() if (k[0], k[2]) != place}
        self._ready[place] = []
        self._lay_ready(place)

    def _lay_ready(self, place: _Place) -> None:
        # torch.cuda.graph waits for the device, so whatever used this memory before has ended when a capture takes it.
        self._ready[place] += [self._new(place) for _ in range(self._spare - len(self._ready[place]))]

    def _new(self, place: _Place) -> Tensor:
        nbytes = padded(self._capacity[place], self._alignment)
        return empty_aligned((nbytes,), torch.uint8, place[0], self._alignment)


def _total(tensors: Iterable[Tensor]) -> int:
    """Bytes, each buffer counted once."""
    return sum({t.data_ptr(): t.numel() for t in tensors}.values())
