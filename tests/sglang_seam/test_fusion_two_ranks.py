"""SGLang's own norm on two real ranks, its sum fused by an adapter of ours, against arithmetic that is nobody's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from finalize_pool import Pool
from fusion_machine import EPS
from fusion_tasks import fused_norms
from torch import Tensor

from qwen35.domain.precision import UNIT_ROUNDOFF

HIDDEN = 48


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    pool = Pool(2, timeout_s=300)
    yield pool
    pool.close()


def truth(shares: list[Tensor], residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    total = residual.double() + sum(share.double() for share in shares)
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * gamma.double(), total


def near(got: Tensor, expected: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    bound = roundings * UNIT_ROUNDOFF[str(dtype).removeprefix("torch.")] + 64 * UNIT_ROUNDOFF["float32"]
    assert got.dtype == dtype
    error = (got.double() - expected).norm() / expected.norm()
    assert error <= bound, f"relative error {error:.3g} over {bound:.3g}"


@pytest.mark.row("B13")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_ranks_fuse_their_shares_and_hold_identical_bits(two_ranks: Pool, dtype: torch.dtype) -> None:
    weight = (torch.randn(HIDDEN) * 0.2).to(dtype)
    calls = [
        ([torch.randn(m, HIDDEN).to(dtype) for _ in range(2)], torch.randn(m, HIDDEN).to(dtype)) for m in (1, 5, 33)
    ]
    ranks = two_ranks.run(fused_norms, weight, calls)
    gamma = weight + 1.0  # as SGLang keeps it: rounded to the weights' dtype
    for one in ranks:
        assert one["prepared"], one
        assert one["gate"] == [True, True, True]
        assert one["served"] == len(calls), one["counters"]
    for index, (shares, residual) in enumerate(calls):
        norm, total = truth(shares, residual, gamma)
        for one in ranks:
            near(one["results"][index][0], norm, dtype)
            near(one["results"][index][1], total, dtype)
        for first, second in zip(ranks[0]["results"][index], ranks[1]["results"][index], strict=True):
            assert torch.equal(first, second), "ranks differ"
    norm, total = truth(*calls[-1], gamma)
    for one in ranks:  # not fused: the sum or the residual is rounded before the norm
        near(one["declined"][0], norm, dtype, roundings=3)
        near(one["declined"][1], total, dtype, roundings=2)
