"""The service: choice by all ranks, preparation, checked calls, and the norm that meets a handoff."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from finalize_fakes import FakeFusion, Meeting, signature

from qwen35.adapters.reference.finalize_fusion import ReferenceFinalizeFusion
from qwen35.domain.errors import (
    AgreementError,
    ClosedError,
    ConfigurationError,
    ContractError,
    CreationError,
    DtypeError,
    HandoffError,
    NotPreparedError,
    ShapeError,
    SignatureError,
    UnavailableError,
    UnknownNameError,
    ValueRangeError,
)
from qwen35.domain.finalize_capabilities import DeviceFacts
from qwen35.domain.finalize_policy import Decision
from qwen35.domain.platform import Platform
from qwen35.services.counters import Counters
from qwen35.services.finalize_agreement import Agreements, Alone
from qwen35.services.finalize_choice import choose_fusion
from qwen35.services.finalize_fusion import FinalizeService, gemma_gamma
from qwen35.services.finalize_registry import WorkspaceRegistry
from qwen35.services.registry import AdapterRegistry
from qwen35.testing.finalize_cases import FinalizeCase

CPU = Platform(device="cpu", device_name="CPU")
FACTS = DeviceFacts(device="cpu", host="here")


def adapters(*fakes: FakeFusion) -> AdapterRegistry:
    return AdapterRegistry(CPU, extra=[f.entry(rank=100 - i) for i, f in enumerate(fakes)])


def service(*fakes: FakeFusion, requested: str = "auto", **options: Any) -> FinalizeService:
    return FinalizeService(
        adapters(*fakes), requested, options.pop("workspaces", None) or WorkspaceRegistry(), Counters(),
        facts=lambda _: FACTS, **options,
    )  # fmt: skip


def case(m: int = 3, **changes: Any) -> FinalizeCase:
    return FinalizeCase(**({"seed": 5, "m": m, "top_k": 2, "hidden": 16, "tp_size": 1, "dtype": "float32"} | changes))


# --- choice ----------------------------------------------------------------------------------------------------


@pytest.mark.row("A25")
@pytest.mark.case("C40")
def test_one_rank_without_multicast_is_enough_for_nobody_to_use_it() -> None:
    meeting = Meeting(4)

    def choose(rank: int) -> Any:
        multicast = FakeFusion("multicast", ("multicast requires NVLink multicast",) if rank == 2 else ())
        found = adapters(multicast, FakeFusion("symmetric", one_host=True), FakeFusion("plain"))
        return choose_fusion(found, "auto", signature(tp_size=4, rank=rank), FACTS, meeting.side(rank))

    out = meeting.run(choose)
    assert {c.name for c in out} == {"symmetric"}, out
    assert all(c.rejected == {"multicast": ("rank 2: multicast requires NVLink multicast",)} for c in out)


@pytest.mark.row("A25")
def test_ranks_on_two_hosts_or_without_access_share_no_memory() -> None:
    for facts, why in (
        ([DeviceFacts(device="cpu", host="a"), DeviceFacts(device="cpu", host="b")], "one host"),
        ([DeviceFacts(device="cuda:0", host="a", uuid="u0", closed_peers=("u1",)),
          DeviceFacts(device="cuda:1", host="a", uuid="u1")], "rank 0 has not to rank 1"),
    ):  # fmt: skip
        meeting = Meeting(2)

        def choose(rank: int, facts: Any = facts, meeting: Meeting = meeting) -> Any:
            found = adapters(FakeFusion("symmetric", one_host=True), FakeFusion("plain"))
            return choose_fusion(found, "auto", signature(tp_size=2, rank=rank), facts[rank], meeting.side(rank))

        out = meeting.run(choose)
        assert {c.name for c in out} == {"plain"}, out
        assert all(why in " ".join(c.rejected["symmetric"]) for c in out), out


def test_a_named_adapter_that_a_rank_cannot_use_is_an_error_on_all() -> None:
    meeting = Meeting(2)

    def choose(rank: int) -> Any:
        found = adapters(FakeFusion("fast", ("no fabric",) if rank else ()), FakeFusion("plain"))
        return choose_fusion(found, "fast", signature(tp_size=2, rank=rank), FACTS, meeting.side(rank))

    out = meeting.run(choose)
    assert all(isinstance(e, UnavailableError) and "rank 1: no fabric" in str(e) for e in out), out


def choices_with(fails: Any, requested: str = "fast") -> list[Any]:
    """What two ranks choose where ``fails()`` is what asking the better adapter brings on the second."""
    meeting = Meeting(2)

    def choose(rank: int) -> Any:
        fast = FakeFusion("fast")
        if rank:
            fails(fast)
        found = adapters(fast, FakeFusion("plain"))
        each = FinalizeService(
            found, requested, WorkspaceRegistry(), Counters(), facts=lambda _: FACTS,
            agreements=Agreements(lambda _: meeting.side(rank)),
        )  # fmt: skip
        each.prepare(signature(tp_size=2, rank=rank))
        return each.choice

    return meeting.run(choose)


def test_an_adapter_that_cannot_be_made_on_one_rank_is_used_by_nobody() -> None:
    def unmade(fake: FakeFusion) -> None:
        def create(*_: Any) -> Any:
            raise RuntimeError("no such driver")

        entry = replace(FakeFusion("fast").entry(), create=create)
        fake.entry = lambda rank=100: entry  # type: ignore[method-assign]

    named = choices_with(unmade)
    assert all(isinstance(e, CreationError) and "no such driver" in str(e) for e in named), named
    automatic = choices_with(unmade, "auto")
    assert {choice.name for choice in automatic} == {"plain"}, automatic
    assert all("rank 1: " in choice.rejected["fast"][0] for choice in automatic)


def test_an_adapter_that_fails_when_asked_on_one_rank_is_an_error_on_all() -> None:
    def broken(fake: FakeFusion) -> None:
        def supports(_: Any) -> Any:
            raise KeyError("sm_90")

        fake.supports = supports  # type: ignore[method-assign]

    out = choices_with(broken, "auto")
    assert all(isinstance(e, CreationError) and "rank 1: KeyError: 'sm_90'" in str(e) for e in out), out


def test_on_the_cpu_the_installed_adapters_leave_the_reference() -> None:
    chosen = choose_fusion(AdapterRegistry(CPU), "auto", signature(), FACTS, Alone())
    assert chosen.name == "reference"
    assert set(chosen.rejected) == {"flashinfer_multicast", "triton", "flashinfer_ipc"}
    assert all("device requires cuda" in " ".join(why) for why in chosen.rejected.values())


def test_an_unknown_adapter_fails_when_the_service_is_made() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'reference'"):
        service(requested="referense")


# --- prepare ---------------------------------------------------------------------------------------------------


@pytest.mark.row("B08")
def test_before_prepare_nothing_is_supported_and_calls_say_why() -> None:
    unprepared, c = service(FakeFusion()), case()
    assert not unprepared.is_prepared
    assert unprepared.max_m == 0
    assert not any(unprepared.supports(m) for m in (-1, 0, 1, 10**9))
    with pytest.raises(NotPreparedError, match=r"m is not supported.*prepare"):
        unprepared.finalize(c.handoff(0), c.residual(), c.gamma())
    with pytest.raises(ValueError, match="prepare"):
        unprepared.all_reduce(c.local(0), c.residual(), c.gamma())


@pytest.mark.row("B09")
@pytest.mark.row("A16")
@pytest.mark.row("C08")
def test_a_second_prepare_does_nothing_and_a_larger_one_is_refused_naming_both() -> None:
    fake = FakeFusion()
    ready = service(fake)
    ready.prepare(signature(max_m=64))
    ready.prepare(signature(max_m=64))
    ready.prepare(signature(max_m=8))
    assert fake.attempts == 1
    assert ready.max_m == 64
    with pytest.raises(SignatureError, match="max_m: has 64, asked 65"):
        ready.prepare(signature(max_m=65))
    assert ready.supports(64)


@pytest.mark.row("B17")
def test_multiplexed_streams_are_refused_and_no_fusion_is_a_silent_matter() -> None:
    fake = FakeFusion()
    with pytest.raises(ConfigurationError, match="multiplexed"):
        service(fake).prepare(signature(), multiplexed_streams=True)
    off = service(fake, requested="off")
    off.prepare(signature(), multiplexed_streams=True)
    assert not off.is_prepared
    assert not off.enabled
    assert fake.attempts == 0


@pytest.mark.row("C07")
def test_two_services_share_the_workspace_of_their_process() -> None:
    workspaces, fakes = WorkspaceRegistry(), (FakeFusion(), FakeFusion())
    services = [service(fake, workspaces=workspaces) for fake in fakes]
    for each in services:
        each.prepare(signature())
    assert services[0].workspace is services[1].workspace
    assert [f.attempts for f in fakes] == [1, 0]


@pytest.mark.row("A21")
def test_threads_that_prepare_together_agree_over_one_exchange_and_make_one_workspace() -> None:
    meeting, fakes, made = Meeting(2), (FakeFusion(), FakeFusion()), []

    def on(rank: int) -> list[Any]:
        def agreement(_: Any) -> Any:
            made.append(rank)
            time.sleep(0.02)
            return meeting.side(rank)

        each = service(fakes[rank], agreements=Agreements(agreement))
        threads = [
            threading.Thread(target=each.prepare, args=(signature(tp_size=2, rank=rank),)) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return [thread.is_alive() for thread in threads]

    out = meeting.run(on)
    assert not any(any(alive) for alive in out), out
    assert sorted(made) == [0, 1], "each rank made its side of the exchange once"
    assert [fake.attempts for fake in fakes] == [1, 1]


@pytest.mark.row("A15")
def test_after_close_a_call_says_that_nothing_is_prepared() -> None:
    fake = FakeFusion()
    ready, c = service(fake), case()
    ready.prepare(signature())
    ready.close()
    ready.close()
    assert fake.made[0].destroyed
    with pytest.raises(NotPreparedError):
        ready.all_reduce(c.local(0), c.residual(), c.gamma())


@pytest.mark.row("A15")
def test_a_workspace_ends_with_the_last_service_that_holds_it() -> None:
    fake, workspaces, c = FakeFusion(), WorkspaceRegistry(), case()
    first, second = (service(fake, workspaces=workspaces) for _ in range(2))
    for ready in (first, second, second):
        ready.prepare(signature())
    first.close()
    first.close()
    assert not fake.made[0].destroyed
    second.all_reduce(c.local(0), c.residual(), c.gamma())
    second.close()
    assert fake.made[0].destroyed
    assert len(fake.made) == 1


@pytest.mark.row("A15")
def test_who_held_a_workspace_that_is_gone_does_not_end_the_next() -> None:
    fake, workspaces = FakeFusion(), WorkspaceRegistry()
    old, new = (service(fake, workspaces=workspaces) for _ in range(2))
    old.prepare(signature())
    workspaces.release()
    new.prepare(signature())
    old.close()
    assert [made.destroyed for made in fake.made] == [True, False]


# --- calls -----------------------------------------------------------------------------------------------------


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
    with pytest.raises(ShapeError, match="post_residual_addition"):
        ready.finalize(handoff, residual, gamma, post_residual_addition=added[:1])


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


def checked_pair(task: Any) -> tuple[list[Any], list[FakeFusion]]:
    meeting = Meeting(2)
    fakes = [FakeFusion(), FakeFusion()]

    def on(rank: int) -> Any:
        each = service(fakes[rank], checked=True, agreements=Agreements(lambda _: meeting.side(rank)))
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


def destroyed(each: FinalizeService, c: FinalizeCase) -> None:
    each.workspace.destroy()
    each.finalize(c.handoff(1), c.residual(), c.gamma())


@pytest.mark.row("B11")
@pytest.mark.row("B14")
@pytest.mark.parametrize(
    ("fault", "error", "named"),
    [
        (without_gamma, HandoffError, "Gemma"), (without_residual, HandoffError, "residual"),
        (ineligible, HandoffError, "ineligible path: mode"), (short_addition, ShapeError, "post_residual_addition"),
        (other_gamma, DtypeError, "gamma must be float32"), (past_the_workspace, ValueRangeError, "m must be in 1..32"),
        (destroyed, ClosedError, "destroyed"), (no_handoff, HandoffError, "requires a FinalizeHandoff, got Tensor"),
        (no_tensor, ContractError, "local must be a tensor, got NoneType"),
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
    assert all(fake.made[0].calls == [] for fake in fakes)


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
