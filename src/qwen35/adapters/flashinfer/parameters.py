"""A_log and dt_bias as FlashInfer's kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.adapters._kernels.scratch import capturing
from qwen35.adapters.flashinfer.mends import ALIGNMENT
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
