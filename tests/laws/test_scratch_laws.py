"""The laws about scratch, of adapters by themselves and behind the service that the container makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import qwen35
from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.domain.capabilities import Clause, Phase, Support
from qwen35.ports.adapter import AdapterEntry, HoldsScratch
from qwen35.ports.gated_delta_rule import DecodeCall, GdnCall, GdnPlan
from qwen35.testing import KITS, LAWS, Bench, LawReport, LawStatus, Profile, limits_for, run_law
from qwen35.testing.capture_laws import BOUNDED
from qwen35.testing.refusal_laws import WIDENS

PORT = "gated_delta_rule"
PLANNED = 1000


class Mute(ReferenceGatedDeltaRule):
    """Says nothing of scratch."""

    def __init__(self) -> None:
        super().__init__(torch.float32, "cpu")


class Holding(Mute):
    """Says that its plan holds ``PLANNED`` bytes, which is so."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch_bytes = self.scratch_bound = 0

    def prepare(self, plan: GdnPlan) -> None:
        super().prepare(plan)
        self.scratch_bytes = self.scratch_bound = PLANNED


class Swelling(Holding):
    """Holds more with every decode."""

    def decode(self, call: DecodeCall) -> Tensor:
        self.scratch_bytes += 1
        return super().decode(call)


class Greedy(Holding):
    """Plans for more than it says."""

    def prepare(self, plan: GdnPlan) -> None:
        super().prepare(plan)
        self.scratch_bytes = 2 * PLANNED


class Shrinking(Holding):
    """Gives back what a later plan does not ask for, and takes it again for the call that needs it."""

    def prepare(self, plan: GdnPlan) -> None:
        super().prepare(plan)
        self.scratch_bytes = self.scratch_bound = PLANNED * plan.max_batch * plan.max_tokens * max(1, plan.max_draft)


class Regrowing(Holding):
    """Makes its scratch anew, and larger, for the first call after a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = 0

    def prepare(self, plan: GdnPlan) -> None:
        super().prepare(plan)
        self.plans += 1
        self.scratch_bound = 2**40
        self.scratch_bytes = max(PLANNED, self.scratch_bytes)

    def decode(self, call: DecodeCall) -> Tensor:
        self.scratch_bytes = PLANNED * self.plans
        return super().decode(call)


class Forgetful(Mute):
    """Refuses what the latest plan does not hold, whatever was planned before."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 2**30

    def prepare(self, plan: GdnPlan) -> None:
        super().prepare(plan)
        self.rows = plan.max_batch

    def supports(self, call: GdnCall) -> Support:
        many = call.slots.shape[0] > self.rows
        return Support.of("more rows than were planned") if many else super().supports(call)


class Mixing(Mute):
    """After a second plan of one geometry outputs are a tenth too large."""

    def __init__(self) -> None:
        super().__init__()
        self.before: GdnPlan | None = None
        self.wrong = False

    def prepare(self, plan: GdnPlan) -> None:
        super().prepare(plan)
        self.wrong = self.before is not None and self.before.geometry == plan.geometry
        self.before = plan

    def decode(self, call: DecodeCall) -> Tensor:
        return super().decode(call).mul_(1.1 if self.wrong else 1.0)


#: What each adapter that forgets a plan is told by the law.
UNPLANNED: dict[type[Mute], str] = {
    Shrinking: "a smaller plan turned ", Regrowing: "a planned call turned ",
    Forgetful: "after a smaller plan a planned call is refused: more rows than",
    Mixing: "out: relative error 0.1 exceeds ",
}  # fmt: skip
KINDS: dict[str, type[Mute]] = {kind.__name__.lower(): kind for kind in (Mute, Holding, Swelling, Greedy, *UNPLANNED)}


def entry(name: str) -> AdapterEntry:
    return AdapterEntry(port=PORT, name=name, summary="", probe=lambda _: Support.of(), create=lambda *_: KINDS[name]())


def service(decode: str, extend: str | None = None, fallback: str | None = None) -> Any:
    entries = [entry(name) for name in {decode, extend or decode, fallback or decode}]
    return qwen35.build(
        adapters=entries, device="cpu", gdn_decode=decode, gdn_extend=extend or decode, gdn_verify=extend or decode,
        gdn_fallback=fallback, conv="reference",
    ).gated_delta_rule()  # fmt: skip


def judged(subject: Any, phase: Phase = Phase.DECODE, name: str = BOUNDED, examples: int = 3) -> LawReport:
    clause = Clause.REFUSAL if name == WIDENS else Clause.CAPTURE
    (law,) = (law for law in LAWS[PORT][clause] if law.name == f"{phase}: {name}")
    bench = Bench(subject, KITS[PORT], "cpu", limits_for(subject.capabilities, Profile.CPU))
    return run_law(replace(law, most_examples=None), bench, examples=examples)


@pytest.mark.parametrize("name", ["swelling", "greedy"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "behind the service"])
def test_an_adapter_that_holds_more_than_its_bound_breaks_the_law(name: str, wrapped: bool) -> None:
    report = judged(service(name) if wrapped else KINDS[name]())
    assert report.status is LawStatus.FAILED, str(report)
    held, after = (PLANNED + 1, "decode") if name == "swelling" else (2 * PLANNED, "prepare")
    assert report.reason.startswith(
        f"after {after} {held} bytes of scratch are held, and the bound is {PLANNED}; Case("
    )


@pytest.mark.parametrize("kind", UNPLANNED, ids=lambda kind: kind.__name__.lower())
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "behind the service"])
def test_an_adapter_that_forgets_a_plan_breaks_the_law(kind: type[Mute], wrapped: bool) -> None:
    report = judged(service(kind.__name__.lower()) if wrapped else kind(), name=WIDENS, examples=20)
    assert report.status is LawStatus.FAILED, str(report)
    assert report.reason.startswith(UNPLANNED[kind]), str(report)


@pytest.mark.parametrize("phase", Phase)
def test_plans_of_an_adapter_that_keeps_them_hold_whether_it_says_what_it_holds_or_not(phase: Phase) -> None:
    for subject in (Holding(), Mute(), service("holding")):
        report = judged(subject, phase, WIDENS)
        assert report.status is LawStatus.PASSED, str(report)


@pytest.mark.parametrize("phase", Phase)
def test_a_service_is_asked_where_all_its_adapters_say_what_they_hold(phase: Phase) -> None:
    ready = service("holding")
    assert isinstance(ready, HoldsScratch)
    assert judged(ready, phase).status is LawStatus.PASSED
    assert judged(Holding(), phase).status is LawStatus.PASSED


@pytest.mark.parametrize(
    "silent", [{"decode": "mute"}, {"decode": "holding", "extend": "mute"}, {"decode": "holding", "fallback": "mute"}]
)
def test_a_service_says_nothing_where_one_of_its_adapters_does_not(silent: dict[str, str]) -> None:
    ready = service(**silent)
    assert not isinstance(ready, HoldsScratch)
    report = judged(ready)
    assert report.status is LawStatus.SKIPPED
    assert report.reason == "the adapter does not say how much scratch it holds"


def test_a_service_holds_what_its_adapters_hold_together() -> None:
    ready = service("swelling", extend="greedy", fallback="holding")
    assert isinstance(ready, HoldsScratch)
    decode, extend = (ready.adapters[phase][1] for phase in (Phase.DECODE, Phase.EXTEND))
    decode.scratch_bytes, decode.scratch_bound = 1, 10
    extend.scratch_bytes, extend.scratch_bound = 200, 3000
    assert (ready.scratch_bytes, ready.scratch_bound) == (201, 3010), "verify and extend share one adapter"
