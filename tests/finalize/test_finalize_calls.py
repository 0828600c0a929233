"""The service: checked calls, and the norm that meets a handoff."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from finalize_fakes import FakeFusion, Meeting, signature
from finalize_services import FACTS, adapters, case, service
from torch import Tensor

from qwen35.adapters.reference.finalize_fusion import ReferenceFinalizeFusion
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
from qwen35.services.counters import Counters
from qwen35.services.finalize_agreement import Agreements
from qwen35.services.finalize_fusion import FinalizeService, gemma_gamma
from qwen35.services.finalize_registry import WorkspaceRegistry
from qwen35.testing.finalize_cases import FinalizeCase


@pytest.mark.row("B14")
@pytest.mark.row("C10")
def test_a_handoff_has_one_way_on() -> None:
    fake = FakeFusion()
    ready, c = service(fake), case()
    ready.prepare(signature())
    handoff, residual, gamma = c.handoff(0), c.residual(), c.gamma()
    with pytest.raises(HandoffError, match="ineligible path: mode; width"):
        ready.consume(handoff, residual, gamma, Decision(False, ("mode", "width")))
    with pytest.raises(HandoffError, match="residual"):
        ready.consume(handoff, None, gamma, Decision(True))
    with pytest.raises(HandoffError, match="Gemma"):
        ready.consume(handoff, residual, None, Decision(True))
    assert fake.made[0].calls == []
    ready.consume(handoff, residual, gamma, Decision(True))
    added = torch.randn_like(residual)
    ready.consume(handoff, residual, gamma, Decision(True), post_residual_addition=added)
    (_, plain), (_, with_addition) = fake.made[0].calls
    assert torch.equal(plain, residual)
    assert torch.equal(with_addition, residual + added)
    for addition, error in ((added[:1], ShapeError), (added.double(), DtypeError), (1.0, ContractError)):
        with pytest.raises(error, match="post_residual_addition"):
            ready.finalize(handoff, residual, gamma, post_residual_addition=addition)
    with pytest.raises(DtypeError, match="residual must be float32"):
        ready.finalize(handoff, residual.double(), gamma, post_residual_addition=added)
    assert len(fake.made[0].calls) == 2


@pytest.mark.row("B10")
@pytest.mark.case("C45")
@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_the_one_of_a_gemma_norm_is_added_once(weight: float) -> None:
    """Checkpoint weight 0 gives the normalised value, -1 gives zero, with the one in gamma or in the bias."""
    c = case(dropped=0.0, zeroed=0.0)
    stored = torch.full((16,), weight)
    results = []
    for bias, gamma in ((0.0, gemma_gamma(stored, torch.float32)), (1.0, stored)):
        workspace = ReferenceFinalizeFusion(torch.float32).prepare(signature(weight_bias=bias))
        results.append(workspace.finalize(c.handoff(0), c.residual(), gamma))
    total = results[0].residual.double()
    expected = total * (total.pow(2).mean(-1, keepdim=True) + 1e-6) ** -0.5 * (weight + 1.0)
    for got in results:
        torch.testing.assert_close(got.norm.double(), expected, rtol=1e-5, atol=1e-6)


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


@pytest.mark.row("B11")
def test_the_first_of_several_faults_is_the_one_that_is_named() -> None:
    """m, routed, weights, indices, their dtypes, shared, residual, gamma: breaking all, then mending one by one."""
    c = case()
    good, residual, gamma = c.handoff(0), c.residual(), c.gamma()
    workspace = FakeFusion().prepare(signature())
    broken = replace(
        good, m=33, routed_output=torch.zeros(4, 15), expert_weights=torch.zeros(3, 1).half(),
        permuted_indices=torch.zeros(3, 3), gated_shared_output=torch.zeros(2, 16),
    )  # fmt: skip
    mends: list[tuple[str, dict[str, Any]]] = [
        ("m must be in", {"m": 3}), ("routed_output", {"routed_output": good.routed_output}),
        ("expert_weights must be \\[m", {"expert_weights": torch.zeros(3, 2).half()}),
        ("permuted_indices must be \\[m", {"permuted_indices": torch.zeros(3, 2)}),
        ("expert_weights must be bfloat16", {"expert_weights": good.expert_weights}),
        ("permuted_indices must be int32", {"permuted_indices": good.permuted_indices}),
        ("gated_shared_output must be \\[m", {"gated_shared_output": torch.zeros(3, 16).bfloat16()}),
        ("gated_shared_output must be float32", {"gated_shared_output": good.gated_shared_output}),
    ]  # fmt: skip
    for named, mend in mends:
        with pytest.raises(ValueError, match=named):
            workspace.finalize(broken, residual[:1], gamma[:1])
        broken = replace(broken, **mend)
    with pytest.raises(ShapeError, match="residual"):
        workspace.finalize(broken, residual[:1], gamma[:1])
    with pytest.raises(ShapeError, match="gamma"):
        workspace.finalize(broken, residual, gamma[:1])
    workspace.finalize(broken, residual, gamma)


@pytest.mark.row("A24")
@pytest.mark.parametrize("name", ["residual", "gamma", "out.norm", "out.residual"])
def test_what_the_norm_reads_and_writes_starts_on_whole_accesses(name: str) -> None:
    c = case()
    named = {"residual": c.residual(), "gamma": c.gamma(), "out.norm": c.residual(), "out.residual": c.residual()}
    named[name] = named[name].new_zeros(named[name].numel() + 1)[1:].view(named[name].shape)
    out = NormAndResidual(norm=named["out.norm"], residual=named["out.residual"])
    workspace = FakeFusion().prepare(signature())
    for call in (
        lambda: workspace.finalize(c.handoff(0), named["residual"], named["gamma"], out),
        lambda: workspace.all_reduce(c.local(0), named["residual"], named["gamma"], out),
    ):
        with pytest.raises(LayoutError, match=f"^{name} must start at a multiple of 16 bytes, got 4 past one"):
            call()
    assert workspace.calls == []


def test_results_go_to_two_buffers_that_share_nothing_with_each_other_or_an_input() -> None:
    c, workspace = case(), FakeFusion().prepare(signature())
    handoff, residual, gamma, local = c.handoff(0), c.residual(), c.gamma(), c.local(0)
    shared = handoff.gated_shared_output
    assert isinstance(shared, Tensor)
    both = torch.zeros(5, 16)
    overlapping = (
        (NormAndResidual(norm=both[:3], residual=both[2:]), "out.norm must not overlap out.residual"),
        (NormAndResidual(norm=residual, residual=both[2:]), "out.norm must not overlap residual"),
        (NormAndResidual(norm=both[:3], residual=shared), "out.residual must not overlap gated_shared_output"),
    )
    for out, said in overlapping:
        with pytest.raises(LayoutError, match=said):
            workspace.finalize(handoff, residual, gamma, out)
    with pytest.raises(LayoutError, match=r"out\.norm must not overlap local"):
        workspace.all_reduce(local, residual, gamma, NormAndResidual(norm=local, residual=both[2:]))
    assert workspace.calls == []


@pytest.mark.row("B12")
def test_the_all_reduce_needs_a_residual_of_as_many_tokens() -> None:
    c = case()
    with pytest.raises(ShapeError, match="residual must be"):
        FakeFusion().prepare(signature()).all_reduce(c.local(0), c.residual()[:2], c.gamma())


def test_calls_are_counted_by_pattern_and_adapter() -> None:
    counters, c = Counters(), case()
    ready = FinalizeService(adapters(FakeFusion()), "auto", WorkspaceRegistry(), counters, facts=lambda _: FACTS)
    ready.prepare(signature())
    ready.finalize(c.handoff(0), c.residual(), c.gamma())
    ready.all_reduce(c.local(0), c.residual(), c.gamma())
    assert counters.total("calls", port="finalize_fusion", adapter="fake") == 2
    assert counters.total("calls", phase="finalize", mode="eager") == 1


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
