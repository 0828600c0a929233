"""Inputs of the fused finalize that every rank can rebuild from a seed, and their float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from qwen35.domain.finalize import FinalizeHandoff
from qwen35.ports.finalize_checks import handoff_tensors, torch_dtype

NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalizeCase:
    """One problem over ``tp_size`` ranks.

    ``padding`` rows of the routed output belong to no token and are NaN. ``dropped`` is the share of indices
    that are -1, each with a NaN weight; ``zeroed`` the share of live choices of weight zero, which point at
    NaN rows. ``scattered`` puts rows in random order, as experts do.
    """

    seed: int
    m: int
    top_k: int
    hidden: int
    tp_size: int
    padding: int = 3
    dropped: float = 0.2
    zeroed: float = 0.1
    shared: bool = True
    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    device: str = "cpu"

    def handoff(self, rank: int) -> FinalizeHandoff:
        """What ``rank`` brings."""
        g = self._generator(1 + rank)
        rows = self.m * self.top_k
        live = torch.rand(self.m, self.top_k, generator=g) >= self.dropped
        zero = live & (torch.rand(self.m, self.top_k, generator=g) < self.zeroed)
        order = torch.randperm(rows + self.padding, generator=g)[:rows].view(self.m, self.top_k)
        routed = torch.full((rows + self.padding, self.hidden), NAN)
        used = order[live & ~zero]
        routed[used] = torch.randn(used.numel(), self.hidden, generator=g)
        weights = torch.rand(self.m, self.top_k, generator=g) + 0.05
        weights = torch.where(live, weights.masked_fill(zero, 0.0), NAN)
        indices = torch.where(live, order, -1).to(torch.int32)
        shared = torch.randn(self.m, self.hidden, generator=g) if self.shared else None
        return FinalizeHandoff(
            routed_output=self._placed(routed), expert_weights=weights.to(self.device, torch_dtype(self.weight_dtype)),
            permuted_indices=indices.to(self.device), m=self.m,
            gated_shared_output=None if shared is None else self._placed(shared),
        )  # fmt: skip

    def local(self, rank: int) -> Tensor:
        """What ``rank`` brings to the all-reduce, [m, D]."""
        return self._placed(torch.randn(self.m, self.hidden, generator=self._generator(101 + rank)))

    def residual(self) -> Tensor:
        """Alike on every rank, [m, D]."""
        return self._placed(torch.randn(self.m, self.hidden, generator=self._generator(201)))

    def gamma(self) -> Tensor:
        """Alike on every rank, [D]."""
        return self._placed(1.0 + 0.1 * torch.randn(self.hidden, generator=self._generator(202)))

    def finalize_oracle(self, eps: float, weight_bias: float) -> tuple[Tensor, Tensor]:
        """Norm and residual in float64, by select, choice after choice: a few [m, D] doubles at a time."""
        x = torch.zeros(self.m, self.hidden, dtype=torch.float64, device=self.device)
        for rank in range(self.tp_size):
            routed, weights, indices, shared = handoff_tensors(self.handoff(rank))
            live = (indices >= 0) & (weights != 0)
            rows = indices.clamp_min(0).long()
            for j in range(self.top_k):
                term = routed[rows[:, j]].double().mul_(weights[:, j, None].double())
                x += term.masked_fill_(~live[:, j, None], 0.0)
            if shared is not None:
                x += shared.double()
        return self._norm(x, eps, weight_bias)

    def all_reduce_oracle(self, eps: float, weight_bias: float) -> tuple[Tensor, Tensor]:
        """Norm and residual in float64."""
        x = torch.stack([self.local(rank).double() for rank in range(self.tp_size)]).sum(0)
        return self._norm(x, eps, weight_bias)

    def _norm(self, x: Tensor, eps: float, weight_bias: float) -> tuple[Tensor, Tensor]:
        total = self.residual().double() + x
        scale = (total.pow(2).mean(-1, keepdim=True) + eps) ** -0.5
        return total * scale * (self.gamma().double() + weight_bias), total

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1009 + stream)

    def _placed(self, value: Tensor) -> Tensor:
        return value.to(self.device, torch_dtype(self.dtype))


def finalize_cases(
    *, tp_size: int, hidden: int, max_m: int, top_k: int, dtype: str = "bfloat16"
) -> st.SearchStrategy[FinalizeCase]:
    """Cases for one workspace: any m, padding, shares of dropped and zero-weight choices up to all of them."""
    share = st.sampled_from([0.0, 0.2, 1.0])
    return st.builds(
        FinalizeCase, seed=st.integers(0, 2**31 - 1), m=st.integers(1, max_m), top_k=st.just(top_k),
        hidden=st.just(hidden), tp_size=st.just(tp_size), padding=st.integers(0, 40), dropped=share, zeroed=share,
        dtype=st.just(dtype), weight_dtype=st.sampled_from(["bfloat16", "float32"]),
    )  # fmt: skip
