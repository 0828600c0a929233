"""Root-mean-square norms, computed in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


def _normalised(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """``x * rsqrt(mean(x**2) + eps) * (1 + weight)`` over the last dimension; weight [width] float32, as stored."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (_normalised(x, self.eps) * (1.0 + self.weight)).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """``x * rsqrt(mean(x**2) + eps) * weight * silu(gate)``; the weight is plain, without the one added."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (_normalised(x, self.eps) * self.weight * silu(gate.float())).to(x.dtype)


def add_and_norm(update: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """``residual + update`` and its norm: returns (normed, new residual), both [T, hidden]. Mutates nothing."""
    residual = residual + update
    return norm.forward(residual), residual
