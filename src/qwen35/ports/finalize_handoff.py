"""From a producer's tensors to a handoff: what the domain cannot say without a framework."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.domain.errors import LayoutError, ShapeError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.ports import _checks as check
from qwen35.ports.finalize_checks import WEIGHT_DTYPES


def handoff_from_flashinfer(
    *, gemm2_out: Tensor, expert_weights: Tensor, permuted_indices: Tensor, gated_shared: Tensor | None,
    m: int, hidden: int, top_k: int,
) -> FinalizeHandoff:  # fmt: skip
    """The handoff over FlashInfer's deferred output (``do_finalize=False``), without a copy.

    ``gemm2_out`` [R, hidden] and ``gated_shared`` [m, hidden] bfloat16, ``permuted_indices`` [n, top_k] int32,
    ``expert_weights`` as ``bfloat16_weights`` takes them. Raises a ``ContractError``.
    """
    check.dtype("gemm2_out", gemm2_out, (torch.bfloat16,))
    check.dtype("permuted_indices", permuted_indices, (torch.int32,))
    return FinalizeHandoff.from_flashinfer(
        gemm2_out=gemm2_out, expert_weights=bfloat16_weights(expert_weights, top_k),
        permuted_indices=permuted_indices, gated_shared=gated_shared, m=m, hidden=hidden, top_k=top_k,
    )  # fmt: skip


def bfloat16_weights(buffer: Tensor, top_k: int) -> Tensor:
    """Expert weights [n, top_k] bfloat16 of a deferred MoE output, without a copy.

    Some producers size the buffer for the router's float32 and write bfloat16 into it: then its leading half
    is the truth, reinterpreted and never converted. Raises ``DtypeError`` for any other dtype, ``LayoutError``
    where the buffer is not contiguous, ``ShapeError`` where it is not rows of ``top_k``.
    """
    check.dtype("expert_weights", buffer, WEIGHT_DTYPES)
    if not buffer.is_contiguous():
        raise LayoutError(f"expert_weights must be contiguous, got strides {buffer.stride()}")
    if top_k < 1 or buffer.numel() % top_k:
        raise ShapeError(f"expert_weights must hold whole rows of top_k = {top_k}, got {buffer.numel()} elements")
    if buffer.dtype == torch.bfloat16:
        return buffer.view(-1, top_k)
    rows = buffer.numel() // top_k
    return buffer.view(-1).view(torch.bfloat16)[: rows * top_k].view(rows, top_k)
