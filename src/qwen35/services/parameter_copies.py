"""Aligned and, where a kernel wants it, converted copies of parameters, at addresses that captured graphs may keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35.domain.errors import CaptureError
from qwen35.services.scratch import empty_aligned

#: Copies that are laid out ahead, so that a parameter first seen inside capture has a place: two for each of 64 layers.
AHEAD = 128

_Key = tuple[int, torch.dtype, int, tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class _Copy:
    source: Tensor
    aligned: Tensor
    filled: bool


def _key(source: Tensor, wanted: torch.dtype) -> _Key:
    return source.data_ptr(), source.dtype, source.numel(), source.stride(), wanted


class ParameterCopies:
    """One copy for each parameter and dtype wanted, found by address, dtype, size and stride.

    The source is retained, so its address cannot be reused by another parameter while the copy lives. Version
    counters are not consulted: engines reload with ``param.data.copy_``, which does not move them.
    """

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._copies: dict[_Key, _Copy] = {}
        self._free: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def bytes(self) -> int:
        """Bytes held by copies and by places laid out ahead."""
        held = [c.aligned for c in list(self._copies.values())]  # another thread may read this
        return sum(t.numel() * t.element_size() for t in (*held, *self._free))

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Lay out places of ``nbytes`` each, once. Not inside capture."""
        if self._free or self._copies:
            return
        row = -(-nbytes // self._alignment) * self._alignment
        arena = empty_aligned((AHEAD, row), torch.uint8, device, self._alignment)
        self._free = list(arena.unbind(0))

    def held(self, source: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The filled copy of ``source`` in ``dtype``, where there is one: a look-up, whatever the stream is doing."""
        copy = self._copies.get(_key(source, dtype))
        return copy.aligned if copy is not None and copy.filled else None

    def take(self, source: Tensor, capturing: bool, dtype: torch.dtype | None = None) -> Tensor:
        """The copy of ``source`` [HV], in ``dtype`` (None: its own); it asks for no gradient.

        One that was first asked for inside capture is filled by the graph's replays, and filled at once before an
        eager caller gets it.
        """
        wanted = dtype or source.dtype
        key = _key(source, wanted)
        copy = self._copies.get(key)
        if copy is None:
            place = self._place(source, wanted, capturing)
            copy = self._copies[key] = _Copy(source.detach(), place, filled=False)
        if not copy.filled:
            copy.aligned.copy_(copy.source)
            copy.filled = not capturing
        return copy.aligned

    def refresh(self) -> int:
        """Bring every copy up to date, in place; returns how many there are."""
        for copy in self._copies.values():
            copy.aligned.copy_(copy.source)
            copy.filled = True
        return len(self._copies)

    def close(self) -> None:
        """Free everything."""
        self._copies, self._free = {}, []

    def _place(self, source: Tensor, dtype: torch.dtype, capturing: bool) -> Tensor:
        nbytes = source.numel() * dtype.itemsize
        if self._free and self._free[-1].numel() >= nbytes:
            with torch.inference_mode(False):  # so that a refresh outside that mode can write it
                return self._free.pop()[:nbytes].view(dtype).view(source.shape)
        if capturing:
            raise CaptureError("a parameter first seen inside capture has no place for its copy: run it once before")
        return empty_aligned(source.shape, dtype, source.device, self._alignment)
