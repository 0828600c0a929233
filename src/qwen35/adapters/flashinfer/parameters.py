"""A_log and dt_bias as FlashInfer's kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.adapters.flashinfer.mends import ALIGNMENT
from qwen35.services.devices import capturing
from qwen35.services.parameter_copies import ParameterCopies


def float32(copies: ParameterCopies, source: Tensor) -> Tensor:
    """``source`` itself where it is aligned float32, or its copy.

    FlashInfer compiles its float32 decode for the dtype of the first dt_bias it meets and keys its cache without it,
    so every dt_bias reaches it as float32; and it takes tensors by DLPack, which hands over none that ask for
    gradients.
    """
    if source.dtype == torch.float32 and source.data_ptr() % ALIGNMENT == 0:
        return source.detach() if source.requires_grad else source
    held = copies.held(source, torch.float32)
    return held if held is not None else copies.take(source, capturing(source.device), torch.float32)


class Float32:
    """``float32`` for parameters that all look like one: an address tells them apart."""

    __slots__ = ("_copies", "_held", "_plain")

    def __init__(self, copies: ParameterCopies, like: Tensor) -> None:
        self._copies, self._plain = copies, like.dtype == torch.float32
        self._held = copies.like(like, torch.float32)

    def __call__(self, source: Tensor) -> Tensor:
        """``source`` [HV] or its copy."""
        address = source.data_ptr()
        if self._plain and not address % ALIGNMENT:
            return source.detach() if source.requires_grad else source
        copy = self._held.get(address)
        held = None if copy is None else copy.use(source)
        return float32(self._copies, source) if held is None else held
