"""The fused finalize in plain torch over torch.distributed: the oracle, and what works everywhere."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from qwen35.domain.capabilities import Support
from qwen35.domain.errors import CaptureError, ClosedError, UnsupportedError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import FusionCapabilities, FusionClause
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import (
    check_all_reduce,
    check_finalize,
    handoff_tensors,
    signature_support,
    token_support,
)
from qwen35.ports.finalize_fusion import NormAndResidual
from qwen35.services.devices import capturing

NAME = "reference"

#: Rows that travel in one collective; bounds the gathered scratch.
CHUNK = 1024


def local_sum(handoff: FinalizeHandoff, dtype: torch.dtype) -> Tensor:
    """One rank's share ``sum_j w_j * routed[idx_j] + shared`` [m, D], in ``dtype``.

    Dropped (-1) and zero-weight terms are left out by selection, so NaN there never shows.
    """
    routed, weights, indices, shared = handoff_tensors(handoff)
    total = torch.zeros(handoff.m, routed.shape[1], dtype=dtype, device=weights.device)
    for j in range(indices.shape[1]):
        live = (indices[:, j] >= 0) & (weights[:, j] != 0)
        rows = live.nonzero()[:, 0]
        total[rows] += weights[rows, j, None].to(dtype) * routed[indices[rows, j].long()].to(dtype)
    if shared is not None:
        total += shared.to(dtype)
    return total


def residual_norm(x: Tensor, residual: Tensor, gamma: Tensor, eps: float, weight_bias: float) -> tuple[Tensor, Tensor]:
    """Norm and new residual, both in x's dtype."""
    total = residual.to(x.dtype) + x
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return total * scale * (gamma.to(x.dtype) + weight_bias), total


class ReferenceFinalizeFusion:
    """``compute_dtype`` is what everything between inputs and outputs is kept in, on the wire too."""

    def __init__(self, compute_dtype: torch.dtype, device_type: str = "cpu") -> None:
        self._dtype = compute_dtype
        deviations = {}
        if device_type == "cuda":
            deviations[FusionClause.CAPTURE] = "plain torch reads indices on the host and allocates scratch"
        self.capabilities = FusionCapabilities(deviations=deviations)

    def supports(self, signature: WorkspaceSignature) -> Support:
        return signature_support(self.capabilities, signature)

    def prepare(self, signature: WorkspaceSignature) -> ReferenceWorkspace:
        support = self.supports(signature)
        if not support:
            raise UnsupportedError(f"{NAME} workspace", support.reasons)
        return ReferenceWorkspace(signature, self._dtype)

    def close(self) -> None:
        """Holds nothing."""


class ReferenceWorkspace:
    """Gathers every rank's share and sums in rank order, so every rank ends with identical bits."""

    adapter = NAME

    def __init__(self, signature: WorkspaceSignature, dtype: torch.dtype) -> None:
        self.signature, self._destroyed = signature, False
        rows = min(signature.max_m, CHUNK)
        shape = signature.tp_size, rows, signature.hidden
        with torch.inference_mode(False):  # or no call outside that mode could write it
            self._gathered = torch.empty(shape, dtype=dtype, device=signature.device)
        self.addresses = (self._gathered.data_ptr(),)

    def supports(self, m: int) -> Support:
        return token_support(self.signature, m, self._destroyed)

    def finalize(
        self, handoff: FinalizeHandoff, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        self._check_usable()
        check_finalize(self.signature, handoff, residual, gamma, out, values=residual.device.type == "cpu")
        return self._finish(local_sum(handoff, self._gathered.dtype), residual, gamma, out)

    def all_reduce(
        self, local: Tensor, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        self._check_usable()
        check_all_reduce(self.signature, local, residual, gamma, out)
        return self._finish(local.to(self._gathered.dtype), residual, gamma, out)

    def destroy(self) -> None:
        self._destroyed = True
        self._gathered = self._gathered.new_empty(0)

    def _check_usable(self) -> None:
        if self._destroyed:
            raise ClosedError("the fusion workspace is destroyed; prepare a new one")
        if self.signature.device_type == "cuda" and capturing():
            raise CaptureError("the reference finalize cannot be captured; name another adapter")

    def _finish(self, local: Tensor, residual: Tensor, gamma: Tensor, out: NormAndResidual | None) -> NormAndResidual:
        signature = self.signature
        if out is None:
            out = NormAndResidual(norm=torch.empty_like(residual), residual=torch.empty_like(residual))
        for start in range(0, local.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            x = self._sum_over_ranks(local[part])
            norm, total = residual_norm(x, residual[part], gamma, signature.eps, signature.weight_bias)
            out.norm[part] = norm
            out.residual[part] = total
        return out

    def _sum_over_ranks(self, local: Tensor) -> Tensor:
        shares = [share[: local.shape[0]] for share in self._gathered]
        if len(shares) == 1:
            return local
        dist.all_gather(shares, local.contiguous(), group=self.signature.group)
        total: Tensor = shares[0].clone()
        for share in shares[1:]:
            total += share
        return total
