"""Buffers whose addresses stay put, so that a captured graph may hold them."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from qwen35.domain.errors import CaptureError


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA ``device`` is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Scratch:
    """One buffer a name, cut to the shape of each call.

    A request beyond the buffer makes one at least twice as large, outside capture only; the old one is kept,
    since a graph may hold its address, so the sum of all stays under twice the largest of each. Calls that
    share a name belong on one stream.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._retired: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes held, the outgrown buffers among them."""
        return sum(b.numel() for b in (*self._buffers.values(), *self._retired))

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Make sure that ``take`` can serve ``shape``. Raises ``CaptureError`` where that needs memory in capture."""
        self._buffer(name, prod(shape) * dtype.itemsize, device)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A dense tensor of ``shape`` with undefined content, at the same address for the same name.

        Raises ``CaptureError`` where the buffer is too small inside capture.
        """
        size = prod(shape) * dtype.itemsize
        return self._buffer(name, size, device)[:size].view(dtype).view(shape)

    def release(self) -> None:
        """Drop every buffer."""
        self._buffers.clear()
        self._retired.clear()

    def _buffer(self, name: str, size: int, device: torch.device) -> Tensor:
        held = self._buffers.get(name)
        if held is not None and held.numel() >= size and held.device == device:
            return held
        if capturing(device):
            have = 0 if held is None else held.numel()
            raise CaptureError(
                f"scratch {name!r} needs {size} bytes and has {have}: prepare a plan that covers the call, or make the "
                "call once outside capture"
            )
        if held is not None:
            self._retired.append(held)
            size = max(size, 2 * held.numel())
        with torch.inference_mode(False):  # or no call outside that mode could write it
            self._buffers[name] = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        return self._buffers[name]
