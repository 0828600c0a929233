"""Checked mode: the service's calls in which one rank finds a fault that the others cannot see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from finalize_fakes import FakeFusion, Meeting, signature
from finalize_services import case, service
from torch import Tensor

from qwen35.domain.errors import (
    AgreementError,
    ClosedError,
    ContractError,
    DeviceError,
    DtypeError,
    HandoffError,
    LayoutError,
    NotPreparedError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from qwen35.domain.finalize_policy import Decision
from qwen35.ports.finalize_fusion import NormAndResidual
from qwen35.services.finalize_agreement import Agreements
from qwen35.services.finalize_fusion import FinalizeService
from qwen35.testing.finalize_cases import FinalizeCase


def checked_pair(task: Any, checked: bool = True) -> tuple[list[Any], list[FakeFusion]]:
    meeting = Meeting(2)
    fakes = [FakeFusion(), FakeFusion()]

    def on(rank: int) -> Any:
        each = service(fakes[rank], checked=checked, agreements=Agreements(lambda _: meeting.side(rank)))
        each.prepare(signature(tp_size=2, rank=rank))
        return task(rank, each)

    return meeting.run(on), fakes


@pytest.mark.row("A11")
@pytest.mark.row("B11")
@pytest.mark.parametrize("bad", [-2, 9])
def test_checked_mode_turns_one_ranks_bad_index_into_an_error_on_all(bad: int) -> None:
    c = case(dropped=0.0, zeroed=0.0)

    def call(rank: int, each: FinalizeService) -> None:
        handoff = c.handoff(rank)
        if rank == 1:
            handoff.permuted_indices[0, 1] = bad  # type: ignore[index]
        each.finalize(handoff, c.residual(), c.gamma())

    out, fakes = checked_pair(call)
    assert isinstance(out[0], AgreementError)
    assert f"rank 1: permuted_indices[1] must be -1 or a row of routed_output in -1..8, got {bad}" in str(out[0])
    assert isinstance(out[1], ValueRangeError)
    assert all(fake.made[0].calls == [] for fake in fakes)


def without_gamma(each: FinalizeService, c: FinalizeCase) -> None:
    each.consume(c.handoff(1), c.residual(), None, Decision(True))


def without_residual(each: FinalizeService, c: FinalizeCase) -> None:
    each.consume(c.handoff(1), None, c.gamma(), Decision(True))


def ineligible(each: FinalizeService, c: FinalizeCase) -> None:
    each.consume(c.handoff(1), c.residual(), c.gamma(), Decision(False, ("mode",)))


def short_addition(each: FinalizeService, c: FinalizeCase) -> None:
    each.finalize(c.handoff(1), c.residual(), c.gamma(), post_residual_addition=c.residual()[:1])


def other_gamma(each: FinalizeService, c: FinalizeCase) -> None:
    each.finalize(c.handoff(1), c.residual(), c.gamma().bfloat16())


def past_the_workspace(each: FinalizeService, c: FinalizeCase) -> None:
    each.finalize(replace(c.handoff(1), m=33), c.residual(), c.gamma())


def no_handoff(each: FinalizeService, c: FinalizeCase) -> None:
    each.finalize(c.residual(), c.residual(), c.gamma())  # type: ignore[arg-type]


def no_tensor(each: FinalizeService, c: FinalizeCase) -> None:
    each.all_reduce(None, c.residual(), c.gamma())  # type: ignore[arg-type]


def adding(change: Any) -> Any:
    """A residual that brings an addition which ``change`` made of one that would do."""

    def call(each: FinalizeService, c: FinalizeCase) -> None:
        each.finalize(c.handoff(1), c.residual(), c.gamma(), post_residual_addition=change(c.residual()))

    return call


def with_handoff(**changes: Any) -> Any:
    """A handoff with fields of other types."""

    def call(each: FinalizeService, c: FinalizeCase) -> None:
        each.finalize(replace(c.handoff(1), **changes), c.residual(), c.gamma())

    return call


def into(out: Any) -> Any:
    """Buffers for results that are none."""

    def call(each: FinalizeService, c: FinalizeCase) -> None:
        each.finalize(c.handoff(1), c.residual(), c.gamma(), out=out)

    return call


def consuming(handoff: Any) -> Any:
    """No handoff, and no residual either."""

    def call(each: FinalizeService, c: FinalizeCase) -> None:
        each.consume(handoff, None, c.gamma(), Decision(True))

    return call


def undecided(each: FinalizeService, c: FinalizeCase) -> None:
    each.consume(c.handoff(1), c.residual(), c.gamma(), None)  # type: ignore[arg-type]


class OddOut(NormAndResidual):
    """What no check foresees: looked at, it fails in its own way."""

    def __init__(self) -> None:
        """Holds nothing."""

    def __getattribute__(self, name: str) -> Any:
        if name == "norm":
            raise OSError("the buffer is on fire")
        return super().__getattribute__(name)


def destroyed(each: FinalizeService, c: FinalizeCase) -> None:
    each.workspace.destroy()
    each.finalize(c.handoff(1), c.residual(), c.gamma())


def closed(each: FinalizeService, c: FinalizeCase) -> None:
    each.close()
    each.finalize(c.handoff(1), c.residual(), c.gamma())


@pytest.mark.row("B11")
@pytest.mark.row("B14")
@pytest.mark.parametrize(
    ("fault", "error", "named"),
    [
        (without_gamma, HandoffError, "Gemma"), (without_residual, HandoffError, "residual"),
        (ineligible, HandoffError, "ineligible path: mode"), (short_addition, ShapeError, "post_residual_addition"),
        (other_gamma, DtypeError, "gamma must be float32"), (past_the_workspace, ValueRangeError, "m must be in 1..32"),
        (destroyed, ClosedError, "destroyed"), (closed, NotPreparedError, "call prepare first"),
        (no_handoff, HandoffError, "requires a FinalizeHandoff, got Tensor"),
        (no_tensor, ContractError, "local must be a tensor, got NoneType"),
        (adding(Tensor.double), DtypeError, "post_residual_addition must be float32, got float64"),
        (adding(Tensor.bfloat16), DtypeError, "post_residual_addition must be float32, got bfloat16"),
        (adding(lambda t: t.to("meta")), DeviceError, "post_residual_addition must be on the workspace"),
        (adding(lambda t: t.t().contiguous().t()), LayoutError, "post_residual_addition must be contiguous"),
        (adding(lambda _: 1.0), ContractError, "post_residual_addition must be a tensor, got float"),
        (with_handoff(routed_output=None), DtypeError, "routed_output must be a torch.Tensor, got NoneType"),
        (with_handoff(expert_weights=None), DtypeError, "expert_weights must be a torch.Tensor, got NoneType"),
        (with_handoff(expert_weights=[1.0]), DtypeError, "expert_weights must be a torch.Tensor, got list"),
        (with_handoff(permuted_indices=3), DtypeError, "permuted_indices must be a torch.Tensor, got int"),
        (with_handoff(gated_shared_output=1.0), DtypeError, "gated_shared_output must be a torch.Tensor, got float"),
        (with_handoff(m=None), ContractError, "m must be an int, got NoneType"),
        (with_handoff(m="3"), ContractError, "m must be an int, got str"),
        (with_handoff(m=3.0), ContractError, "m must be an int, got float"),
        (with_handoff(m=True), ContractError, "m must be an int, got bool"),
        (with_handoff(m=[3]), ContractError, "m must be an int, got list"),
        (into((torch.zeros(3, 16),) * 2), ContractError, "out must be a NormAndResidual or None, got tuple"),
        (into(3), ContractError, "out must be a NormAndResidual or None, got int"),
        (into(OddOut()), OSError, "the buffer is on fire"),
        (consuming(None), HandoffError, "requires a FinalizeHandoff, got NoneType"),
        (consuming(torch.zeros(3, 16)), HandoffError, "requires a FinalizeHandoff, got Tensor"),
        (undecided, HandoffError, "requires a Decision, got NoneType"),
    ],
)  # fmt: skip
def test_checked_mode_leaves_no_rank_waiting_for_one_that_cannot_call(
    fault: Any, error: type[Exception], named: str
) -> None:
    c = case(dropped=0.0, zeroed=0.0)

    def call(rank: int, each: FinalizeService) -> None:
        if rank == 1:
            fault(each, c)
        else:
            each.consume(c.handoff(rank), c.residual(), c.gamma(), Decision(True))

    out, fakes = checked_pair(call)
    assert isinstance(out[0], AgreementError), out
    assert isinstance(out[1], error), out
    assert all(named in str(each) for each in out), out
    assert "rank 1: " in str(out[0])
    assert out[1].__cause__.reasons == out[0].reasons, "who refuses alone is told that it is alone"
    assert all(fake.made[0].calls == [] for fake in fakes)


def test_checked_mode_leaves_to_each_rank_what_all_of_them_refuse() -> None:
    """Of contract errors a caller makes the same, whichever they are; not of others, nor in different calls."""
    c = case()

    def call(rank: int, each: FinalizeService) -> None:
        broken = c.residual()[:, :-1] if rank else c.residual().bfloat16()
        each.all_reduce(c.residual(), broken, c.gamma())

    out, fakes = checked_pair(call)
    assert [type(e) for e in out] == [DtypeError, ShapeError], out
    assert [e.__cause__ for e in out] == [None, None]

    def different(rank: int, each: FinalizeService) -> None:
        if rank == 0:
            each.workspace.destroy()
        each.all_reduce(c.residual(), c.residual().bfloat16(), c.gamma())

    def longer(rank: int, each: FinalizeService) -> None:
        local = c.residual()[: rank + 1]
        each.all_reduce(local, local.bfloat16(), c.gamma())

    for task in (different, longer):
        out, _ = checked_pair(task)
        assert all(isinstance(e.__cause__, AgreementError) for e in out), out
    assert all(fake.made[0].calls == [] for fake in fakes)


@pytest.mark.parametrize("checked", [True, False])
def test_what_a_caller_has_against_a_call_is_heard_by_every_rank_in_checked_mode(checked: bool) -> None:
    c = case()

    def call(rank: int, each: FinalizeService) -> None:
        each.all_reduce(c.residual(), c.residual(), c.gamma(), against=("eps requires 1e-06, got 1e-05",) * rank)

    out, fakes = checked_pair(call, checked)
    named = "fake all-reduce: rank 1: eps requires 1e-06, got 1e-05" if checked else "fused all-reduce: eps requires"
    assert isinstance(out[1], UnsupportedError)
    assert str(out[1]).startswith(named)
    assert str(out[0]) == (str(out[1]) if checked else "None")
    assert [len(fake.made[0].calls) for fake in fakes] == ([0, 0] if checked else [1, 0])


def test_checked_mode_sees_ranks_that_bring_different_calls() -> None:
    def call(rank: int, each: FinalizeService) -> None:
        c = case(m=3 + rank)
        each.finalize(c.handoff(rank), c.residual(), c.gamma())

    out, fakes = checked_pair(call)
    assert all(isinstance(e, AgreementError) and "rank 1 calls finalize with m = 4" in str(e) for e in out), out
    assert all(fake.made[0].calls == [] for fake in fakes)


@pytest.mark.row("B17")
@pytest.mark.parametrize("other", [0, 1])
def test_checked_mode_on_some_ranks_only_is_an_error_on_all(other: int) -> None:
    """One would wait for a word before it launches, of the others in their launch."""
    meeting, fakes = Meeting(2), [FakeFusion(), FakeFusion()]

    def on(rank: int) -> None:
        each = service(fakes[rank], checked=rank == other, agreements=Agreements(lambda _: meeting.side(rank)))
        each.prepare(signature(tp_size=2, rank=rank))

    out = meeting.run(on)
    assert all(isinstance(e, AgreementError) for e in out), out
    assert all(f"checked: rank 0 asks {other == 0}, rank 1 asks {other == 1}" in str(e) for e in out), out
    assert [fake.made for fake in fakes] == [[], []]
