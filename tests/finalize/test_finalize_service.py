"""The service: choice by all ranks, and preparation."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from finalize_fakes import FakeFusion, Meeting, signature
from finalize_services import CPU, FACTS, adapters, case, service

from qwen35.domain.capabilities import Support
from qwen35.domain.errors import (
    ConfigurationError,
    CreationError,
    NotPreparedError,
    SignatureError,
    UnavailableError,
    UnknownNameError,
)
from qwen35.domain.finalize_capabilities import DeviceFacts
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.services.counters import Counters
from qwen35.services.finalize_agreement import Agreements, Alone
from qwen35.services.finalize_choice import choose_fusion
from qwen35.services.finalize_fusion import FinalizeService
from qwen35.services.finalize_registry import WorkspaceRegistry
from qwen35.services.registry import AdapterRegistry


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


def test_why_no_rank_has_a_workspace_is_told_once_and_alike_on_all() -> None:
    def unfit(fake: FakeFusion) -> None:
        fake.supports = lambda _: Support.of("no fabric")  # type: ignore[method-assign]

    out = choices_with(unfit)
    assert all(isinstance(e, CreationError) for e in out), out
    assert {str(e) for e in out} == {"fusion workspace could not be created: fast: rank 1: no fabric"}


def test_a_device_that_one_rank_cannot_look_at_is_an_error_on_all() -> None:
    meeting, fakes = Meeting(2), (FakeFusion(), FakeFusion())

    def prepare(rank: int) -> None:
        def look(_: str) -> DeviceFacts:
            if rank:
                raise RuntimeError("the device has fallen off the bus")
            return FACTS

        each = FinalizeService(
            adapters(fakes[rank]), "auto", WorkspaceRegistry(), Counters(), facts=look,
            agreements=Agreements(lambda _: meeting.side(rank)),
        )  # fmt: skip
        each.prepare(signature(tp_size=2, rank=rank))

    out = meeting.run(prepare)
    assert all(isinstance(e, CreationError) for e in out), out
    assert {str(e).split(": ", 1)[1] for e in out} == {"rank 1: RuntimeError: the device has fallen off the bus"}
    assert [fake.attempts for fake in fakes] == [0, 0]


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


@pytest.mark.row("B09")
def test_an_adapter_that_serves_fewer_tokens_is_asked_and_prepared_for_those() -> None:
    class Limited(FakeFusion):
        def supports(self, asked: WorkspaceSignature) -> Support:
            return Support.of() if asked.max_m <= 8 else Support.of(f"max_m requires at most 8, got {asked.max_m}")

    limited = Limited("limited", most_tokens=8)
    ready = service(limited, FakeFusion("plain"))
    for max_m in (100, 100, 9, 8, 1):
        ready.prepare(signature(max_m=max_m))
    assert [made.signature.max_m for made in limited.made] == [8]
    assert (ready.max_m, ready.standing_max_m) == (8, 8)
    assert ready.supports(8)
    assert not ready.supports(9)
    with pytest.raises(SignatureError, match="max_m: has 8, asked 101"):
        ready.prepare(signature(max_m=101))


@pytest.mark.row("C07")
def test_what_lives_in_the_process_is_told_to_a_service_that_has_prepared_nothing() -> None:
    workspaces = WorkspaceRegistry()
    first, second = (service(FakeFusion(), workspaces=workspaces) for _ in range(2))
    assert second.standing_max_m is None
    first.prepare(signature(max_m=24))
    assert (second.standing_max_m, second.max_m) == (24, 0)
    first.close()
    assert second.standing_max_m is None


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
        threads = [threading.Thread(target=each.prepare, args=(signature(tp_size=2, rank=rank),)) for _ in range(16)]
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
@pytest.mark.row("A21")
def test_a_workspace_that_is_being_prepared_outlives_the_other_service_that_closes_meanwhile() -> None:
    fake, closing = FakeFusion(), []

    class Interleaved(WorkspaceRegistry):
        """Lets another thread close what it is told to, as soon as a workspace has been found."""

        def obtain(self, *args: Any, **named: Any) -> Any:
            found = super().obtain(*args, **named)
            for other in closing:
                thread = threading.Thread(target=other.close)
                thread.start()
                thread.join()
            return found

    workspaces, c = Interleaved(), case()
    first, second = (service(fake, workspaces=workspaces) for _ in range(2))
    first.prepare(signature())
    closing.append(first)
    second.prepare(signature())
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
