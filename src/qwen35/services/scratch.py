"""Memory at addresses that stay: aligned, bounded, freed by ``close()`` only."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from qwen35.domain.alignment import padded
from qwen35.domain.errors import CaptureError, UnsupportedError

#: Streams that may use one guard at the same time; a bound needs a number, and engines use two or three.
MAX_STREAMS = 8


def empty_aligned(
    shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device, alignment: int
) -> Tensor:
    """An uninitialised contiguous tensor whose ``data_ptr()`` is a multiple of ``alignment`` bytes.

    Allocates less than ``alignment`` bytes more than needed. ``alignment`` must be a multiple of the dtype's size.
    It may be written in and outside inference mode, wherever it is made.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    with torch.inference_mode(False):
        raw = torch.empty(nbytes + alignment - 1, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % alignment
        return raw[start : start + nbytes].view(dtype).view(shape)


def current_stream(device: torch.device) -> int:
    """A number for the stream that work on ``device`` goes to now; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class AlignedScratch:
    """One buffer for each (stream, argument, small or large), sized by the plan and sliced.

    ``small`` holds the phases that may be captured (decode and verify), ``large`` extends too. The small buffers of
    ``spare`` streams are made by ``plan`` in advance, so that a stream first seen inside capture finds its own.
    Buffers are replaced only by a larger plan; a replaced one is kept, since a graph may hold its address.
    """

    def __init__(
        self, alignment: int, spare: int = 2, stream_of: Callable[[torch.device], int] = current_stream
    ) -> None:
        self._alignment, self._spare, self._stream_of = alignment, spare, stream_of
        self._capacity: dict[tuple[str, bool], int] = {}
        self._buffers: dict[tuple[int, str, bool], Tensor] = {}
        self._streams: dict[int, None] = {}
        self._ready: list[dict[str, Tensor]] = []
        self._kept: list[Tensor] = []
        self._device = torch.device("cpu")

    @property
    def bytes(self) -> int:
        """Bytes held now."""
        spare = [t for ready in self._ready for t in ready.values()]
        return sum(t.numel() for t in (*self._buffers.values(), *spare, *self._kept))

    @property
    def bound(self) -> int:
        """Bytes that are never exceeded under the current plan, apart from buffers that an earlier plan left."""
        each = sum(padded(size, self._alignment) for size in self._capacity.values())
        return (MAX_STREAMS + self._spare) * each + sum(t.numel() for t in self._kept)

    def holds(self, name: str, like: Tensor, large: bool) -> bool:
        """Whether the plan has room for a tensor like this."""
        return like.numel() * like.element_size() <= self._capacity.get((name, large), 0)

    def plan(self, small: dict[str, int], large: dict[str, int], device: torch.device) -> None:
        """Set the capacity of each argument, in bytes. Not inside capture.

        Streams that have buffers of an argument that grows get larger ones at once, so that a capture finds them.
        """
        capacity = {(n, False): s for n, s in small.items()} | {(n, True): s for n, s in large.items()}
        if device == self._device and all(self._capacity.get(k, -1) >= s for k, s in capacity.items()):
            return
        grown = {k for k, size in capacity.items() if device != self._device or size > self._capacity.get(k, -1)}
        before, self._device = self._device, device
        self._capacity |= {k: max(size, self._capacity.get(k, 0)) for k, size in capacity.items()}
        for key in [k for k in self._buffers if k[1:] in grown]:
            self._kept.append(self._buffers.pop(key))
            if device == before:  # another device's streams are others
                self._buffers[key] = self._new(key[1], key[2])
        names = [name for name, large in self._capacity if not large]
        self._ready = [{name: self._new(name, False) for name in names} for _ in range(self._spare)]

    def take(self, name: str, like: Tensor, large: bool, capturing: bool) -> Tensor:
        """A contiguous aligned tensor of ``like``'s shape and dtype, always at the same address for this stream.

        Raises ``UnsupportedError`` for more bytes than planned or more than ``MAX_STREAMS`` streams, and
        ``CaptureError`` where the buffer would have to be made inside capture.
        """
        nbytes = like.numel() * like.element_size()
        if not self.holds(name, like, large):
            planned = self._capacity.get((name, large), 0)
            raise UnsupportedError("alignment scratch", [f"{name} requires at most {planned} bytes, got {nbytes}"])
        key = (self._stream_of(self._device), name, large)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._admit(key, capturing)
        return buffer[:nbytes].view(like.dtype).view(like.shape)

    def close(self) -> None:
        """Free everything."""
        self._buffers, self._ready, self._kept, self._capacity, self._streams = {}, [], [], {}, {}

    def _admit(self, key: tuple[int, str, bool], capturing: bool) -> Tensor:
        stream, name, large = key
        if stream not in self._streams:
            if len(self._streams) == MAX_STREAMS:
                raise UnsupportedError("alignment scratch", [f"requires at most {MAX_STREAMS} streams, got one more"])
            if self._ready:
                for other, made in self._ready.pop().items():
                    self._buffers[stream, other, False] = made
            self._streams[stream] = None
        if key not in self._buffers:
            if capturing:
                raise CaptureError(f"scratch for {name} must exist before capture: run one call on this stream first")
            self._buffers[key] = self._new(name, large)
        return self._buffers[key]

    def _new(self, name: str, large: bool) -> Tensor:
        nbytes = padded(self._capacity[name, large], self._alignment)
        return empty_aligned((nbytes,), torch.uint8, self._device, self._alignment)
