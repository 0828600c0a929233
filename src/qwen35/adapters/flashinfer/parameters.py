"""Float32, aligned copies of A_log and dt_bias at addresses that a graph may hold."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from qwen35.adapters._kernels.scratch import capturing
from qwen35.adapters.flashinfer.mends import ALIGNMENT
from qwen35.domain.errors import CaptureError


class ParameterCopies:
    """One copy for each parameter that is not float32 or not aligned.

    FlashInfer compiles its float32 decode for the dtype of the first dt_bias it meets and keys its cache
    without it, so every dt_bias reaches it as float32. A copy lives as long as its source.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def float32(self, name: str, source: Tensor) -> Tensor:
        """``source`` itself where it serves, or its copy. Raises ``CaptureError`` where a first copy would be made
        inside capture: it would hold nothing until the graph runs. What is returned needs no gradient: FlashInfer
        takes tensors by DLPack, which hands over no others."""
        if source.dtype == torch.float32 and source.data_ptr() % ALIGNMENT == 0:
            return source.detach() if source.requires_grad else source
        held = self._copies.get(id(source))
        if held is not None and held[0]() is source:
            return held[1]
        if capturing(source.device):
            raise CaptureError(
                f"{name} needs a float32 copy, which is not made inside capture: make the call once outside capture"
            )
        copy = torch.empty(source.shape, dtype=torch.float32, device=source.device)
        copy.copy_(source.detach())
        key, copies = id(source), self._copies
        copies[key] = (weakref.ref(source, lambda ref: _forget(copies, key, ref)), copy)
        return copy

    def refresh(self) -> int:
        """Copy every source again, in place; returns how many there are."""
        refreshed = 0
        for ref, copy in list(self._copies.values()):
            source = ref()
            if source is not None:
                copy.copy_(source.detach())
                refreshed += 1
        return refreshed

    def release(self) -> None:
        """Drop every copy."""
        self._copies.clear()


def _forget(copies: dict[int, tuple[weakref.ref[Tensor], Tensor]], key: int, ref: weakref.ref[Tensor]) -> None:
    """Drop the copy of a dead source, unless another tensor has taken over its id."""
    held = copies.get(key)
    if held is not None and held[0] is ref:
        del copies[key]
