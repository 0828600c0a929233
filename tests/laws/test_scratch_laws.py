"""The laws about scratch, of adapters by themselves and behind the service that the container makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qwen35
from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.domain.capabilities import Clause, Phase, Support
from qwen35.ports.adapter import AdapterEntry, HoldsScratch
from qwen35.ports.gated_delta_rule import DecodeCall, GdnPlan
from qwen35.testing import KITS, LAWS, Bench, LawReport, LawStatus, Profile, limits_for, run_law
from qwen35.testing.capture_laws import BOUNDED

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


KINDS: dict[str, type[Mute]] = {kind.__name__.lower(): kind for kind in (Mute, Holding, Swelling, Greedy)}


def entry(name: str) -> AdapterEntry:
    return AdapterEntry(port=PORT, name=name, summary="", probe=lambda _: Support.of(), create=lambda *_: KINDS[name]())


def service(decode: str, extend: str | None = None, fallback: str | None = None) -> Any:
    entries = [entry(name) for name in {decode, extend or decode, fallback or decode}]
    return qwen35.build(
        adapters=entries, device="cpu", gdn_decode=decode, gdn_extend=extend or decode, gdn_verify=extend or decode,
        gdn_fallback=fallback, conv="reference",
    ).gated_delta_rule()  # fmt: skip


def judged(subject: Any, phase: Phase = Phase.DECODE) -> LawReport:
    (law,) = (law for law in LAWS[PORT][Clause.CAPTURE] if law.name == f"{phase}: {BOUNDED}")
    return run_law(law, Bench(subject, KITS[PORT], "cpu", limits_for(subject.capabilities, Profile.CPU)), examples=3)


@pytest.mark.parametrize("name", ["swelling", "greedy"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "behind the service"])
def test_an_adapter_that_holds_more_than_its_bound_breaks_the_law(name: str, wrapped: bool) -> None:
    report = judged(service(name) if wrapped else KINDS[name]())
    assert report.status is LawStatus.FAILED, str(report)
    held, after = (PLANNED + 1, "decode") if name == "swelling" else (2 * PLANNED, "prepare")
    assert report.reason.startswith(
        f"after {after} {held} bytes of scratch are held, and the bound is {PLANNED}; Case("
    )


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
