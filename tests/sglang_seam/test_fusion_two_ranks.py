"""SGLang's own norm on two real ranks, its sum fused by an adapter of ours, against arithmetic that is nobody's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from finalize_pool import Pool
from fusion_machine import EPS
from fusion_tasks import fused_norms, refused_call, warm_up_told
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


@pytest.mark.row("B17")
@pytest.mark.parametrize("silent", ["off", "auto"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_told_of_no_fusion_refuses_with_the_others_at_once(
    two_ranks: Pool, silent: str, rank: int
) -> None:
    told = [{"finalize": "reference"}, {"finalize": "reference"}]
    told[rank] = {"finalize": silent}
    out = two_ranks.run(warm_up_told, told)
    for name, text, seconds in out:
        assert name == "ConfigurationError", text
        assert f"rank {rank}: SGLang's own fusion (QWEN35_FINALIZE is unset, auto or off)" in text
        assert f"rank {1 - rank}: finalize = 'reference'" in text
        assert seconds < 20, "no time-out was waited for"
    assert out[0][1] == out[1][1]


def test_ranks_that_check_differently_would_wait_for_each_other_and_are_refused(two_ranks: Pool) -> None:
    out = two_ranks.run(warm_up_told, [{"finalize": "reference", "checked": True}, {"finalize": "reference"}])
    assert {name for name, _, _ in out} == {"ConfigurationError"}, out
    assert "rank 0: finalize = 'reference', checked; rank 1: finalize = 'reference'. Set" in out[0][1]


def test_ranks_that_are_told_alike_go_on(two_ranks: Pool) -> None:
    assert [name for name, _, _ in two_ranks.run(warm_up_told, [{"finalize": "reference"}] * 2)] == ["fused"] * 2
    quiet = [{"finalize": "off", "checked": True}, {"finalize": "auto"}]
    assert [name for name, _, _ in two_ranks.run(warm_up_told, quiet)] == ["left to SGLang"] * 2


@pytest.mark.row("B11")
@pytest.mark.parametrize("alone", [0, 1])
def test_what_one_rank_refuses_in_checked_mode_is_raised_on_all(two_ranks: Pool, alone: int) -> None:
    out = two_ranks.run(refused_call, [alone], [], True)
    assert out[alone]["error"] == "LayoutError"
    assert out[alone]["cause"] == "AgreementError"
    assert out[1 - alone]["error"] == "AgreementError"
    for one in out:
        assert one["engine"] == 0, "no rank is alone in SGLang's own sum"
        assert torch.equal(one["sum"], torch.full((4, 8), 3.0))


@pytest.mark.row("B11")
@pytest.mark.parametrize("checked", [True, False])
def test_what_all_ranks_refuse_goes_to_sglangs_own_function_on_all(two_ranks: Pool, checked: bool) -> None:
    for one in two_ranks.run(refused_call, [0, 1], [], checked):
        assert (one["error"], one["engine"], one["served"]) == (None, 1, 1)


@pytest.mark.row("B11")
def test_what_a_step_has_against_it_on_one_rank_is_against_it_on_all_in_checked_mode(two_ranks: Pool) -> None:
    for one in two_ranks.run(refused_call, [], [1], True):
        assert (one["error"], one["engine"], one["served"]) == (None, 1, 1)
