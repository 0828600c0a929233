"""Who serves what the chosen adapter refuses, what is counted of it, and which branch is said to have served."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import qwen35
from fakes import FakeGatedDeltaRule, decode_call, fake_entry
from flashinfer_bed import Bed
from pretended_capture import capture
from qwen35.container import Container
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import CaptureError, UnsupportedError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.adapter import SaysBranches
from qwen35.ports.gated_delta_rule import DecodeCall, GdnPlan
from qwen35.services.alignment_guard import AlignmentGuard
from qwen35.services.assembly import guarded
from qwen35.services.counters import Counters
from qwen35.services.gated_delta_rule import GatedDeltaRuleService
from qwen35.services.routing import Decision

PLAN = GdnPlan(
    geometry=GdnGeometry(key_heads=1, value_heads=2, key_width=4, value_width=3), state_dtype=torch.float32,
    device=torch.device("cpu"), max_batch=2, max_tokens=4, token_dtype=torch.float32,
)  # fmt: skip


def build(one: FakeGatedDeltaRule, two: FakeGatedDeltaRule, **settings: str) -> Container:
    """``one`` for every phase, ``two`` as the fallback, unless told otherwise."""
    chosen = dict.fromkeys(("gdn_decode", "gdn_extend", "gdn_verify"), "one") | {"gdn_fallback": "two"}
    entries = [fake_entry("one", one), fake_entry("two", two)]
    return qwen35.build(device="cpu", adapters=entries, **(chosen | settings))  # type: ignore[arg-type]


def decided(rule: GatedDeltaRuleService) -> Decision:
    """The decision of the latest decode."""
    return next(d for d in rule.decisions if d.phase is Phase.DECODE)


def test_what_the_fallback_refuses_too_is_a_refusal_with_the_reasons_of_both(caplog: pytest.LogCaptureFixture) -> None:
    one, two = (FakeGatedDeltaRule(0.0, reasons=(reason,)) for reason in ("too narrow", "too wide"))
    container = build(one, two)
    rule, counters = container.gated_delta_rule(), container.counters()
    with caplog.at_level(logging.WARNING, logger="qwen35"), pytest.raises(UnsupportedError) as refused:
        rule.decode(decode_call())
    assert refused.value.reasons == ("too narrow", "too wide") == rule.supports(decode_call()).reasons
    assert str(refused.value) == "DecodeCall for one and for two: too narrow; too wide"
    assert caplog.records == [], "nobody serves"
    assert counters.total("fallbacks") == counters.total("calls") == 0
    assert counters.total("refusals") == counters.total("refusals", adapter="one", phase="decode", mode="eager") == 1
    assert decided(rule) == Decision("gated_delta_rule", Phase.DECODE, "one")


def test_what_the_fallback_may_not_do_inside_capture_is_neither_a_fallback_nor_a_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unready(FakeGatedDeltaRule):
        def decode(self, call: DecodeCall) -> Tensor:
            if not self.calls:
                self.calls.append(call)
                raise CaptureError("prepare it before")
            return super().decode(call)

    container = build(FakeGatedDeltaRule(1.0, reasons=("too narrow",)), Unready(2.0))
    rule, counters = container.gated_delta_rule(), container.counters()
    with caplog.at_level(logging.WARNING, logger="qwen35"):
        with pytest.raises(CaptureError, match="prepare it before"):
            rule.decode(decode_call())
        assert dict(counters.snapshot()) == {}
        assert caplog.records == []
        rule.decode(decode_call())
    assert counters.total("fallbacks", adapter="two", reason="too narrow") == counters.total("calls") == 1
    assert [r.getMessage() for r in caplog.records] == [
        "gated_delta_rule decode: two serves instead of one: too narrow"
    ]


@pytest.mark.parametrize("refuses", ["one", "two"])
def test_a_plan_that_only_the_chosen_adapter_or_only_the_fallback_refuses_is_counted_and_served(refuses: str) -> None:
    fakes = {name: FakeGatedDeltaRule(1.0, reasons=("too small",) * (name == refuses)) for name in ("one", "two")}
    container = build(fakes["one"], fakes["two"])
    container.gated_delta_rule().prepare(PLAN)
    (served,) = fakes.keys() - {refuses}
    assert fakes[served].plans == [PLAN]
    counters = container.counters()
    assert counters.total("plans_refused", adapter=refuses, reason="too small") == counters.total("plans_refused") == 1


def test_adapters_are_prepared_for_what_they_serve_and_the_fallback_for_all() -> None:
    """Scratch for prefill is of no use to an adapter that decodes, and its widths are no reason against it."""
    fakes = {name: FakeGatedDeltaRule(1.0) for name in ("decodes", "extends", "verifies", "falls_back")}
    plan = dataclasses.replace(PLAN, max_draft=3)
    qwen35.build(
        device="cpu", adapters=[fake_entry(name, fake) for name, fake in fakes.items()], gdn_decode="decodes",
        gdn_extend="extends", gdn_verify="verifies", gdn_fallback="falls_back",
    ).gated_delta_rule().prepare(plan)  # fmt: skip
    assert {name: [(p.max_batch, p.max_tokens, p.max_draft) for p in fake.plans] for name, fake in fakes.items()} == {
        "decodes": [(2, 0, 0)], "extends": [(2, 4, 0)], "verifies": [(2, 0, 3)], "falls_back": [(2, 4, 3)],
    }  # fmt: skip


def test_a_plan_that_a_chosen_adapter_and_the_fallback_refuse_is_an_error_with_the_reasons_of_both() -> None:
    one, two = (FakeGatedDeltaRule(0.0, reasons=(reason,)) for reason in ("too small", "too large"))
    container = build(one, two)
    with pytest.raises(UnsupportedError) as refused:
        container.gated_delta_rule().prepare(PLAN)
    assert str(refused.value) == "plan for one and for two: too small; too large"
    assert refused.value.reasons == ("too small", "too large")
    assert container.counters().total("plans_refused") == 0, "whoever catches it counts it"


def test_a_plan_that_a_chosen_adapter_refuses_which_is_the_fallback_too_is_an_error() -> None:
    one, two = FakeGatedDeltaRule(1.0), FakeGatedDeltaRule(2.0, reasons=("too large",))
    with pytest.raises(UnsupportedError) as refused:
        build(one, two, gdn_extend="two").gated_delta_rule().prepare(PLAN)
    assert str(refused.value) == "plan for two: too large"


def test_without_a_fallback_every_adapter_is_prepared_before_the_refusals_of_some_are_one_error() -> None:
    names = {"gdn_decode": "small", "gdn_extend": "fits", "gdn_verify": "large"}
    fakes = {"small": ("too small",), "fits": (), "large": ("too large", "too wide")}
    adapters = {name: FakeGatedDeltaRule(0.0, reasons=reasons) for name, reasons in fakes.items()}
    container = qwen35.build(device="cpu", adapters=[fake_entry(*item) for item in adapters.items()], **names)
    with pytest.raises(UnsupportedError) as refused:
        container.gated_delta_rule().prepare(PLAN)
    assert str(refused.value) == "plan for small and for large: too small; too large; too wide"
    assert adapters["fits"].plans == [PLAN], "its phase serves all the same"


class Branching(FakeGatedDeltaRule):
    """Says which way decode went, by its batch, and counts how often it was asked."""

    asked = 0

    @property
    def branches(self) -> Mapping[Phase, str]:
        self.asked += 1
        calls = [call for call in self.calls if isinstance(call, DecodeCall)]
        return {Phase.DECODE: f"batch of {len(calls[-1].slots)}"} if calls else {}


def demanding(adapter: FakeGatedDeltaRule) -> FakeGatedDeltaRule:
    """``adapter`` behind the alignment guard, with a demand that the pool of ``decode_call`` meets."""
    adapter.capabilities = dataclasses.replace(adapter.capabilities, byte_alignment=16)
    return adapter


@pytest.mark.parametrize("shadow", [None, "reference:1"])
@pytest.mark.parametrize("dress", [lambda adapter: adapter, demanding], ids=["bare", "guarded"])
def test_a_decision_names_the_branch_of_the_latest_call(dress, shadow: str | None) -> None:  # type: ignore[no-untyped-def]
    one = dress(Branching(1.0))
    settings = {} if shadow is None else {"gdn_shadow": shadow}
    rule = build(one, FakeGatedDeltaRule(2.0), **settings).gated_delta_rule()
    assert decided(rule).branch is None, "nothing served yet"
    for batch in (1, 2):
        rule.decode(decode_call(slots=tuple(range(batch))))
        assert decided(rule) == Decision("gated_delta_rule", Phase.DECODE, "one", (), f"batch of {batch}")
    assert {d.branch for d in rule.decisions if d.phase is not Phase.DECODE} == {None}


def test_a_decision_names_the_branch_of_the_adapter_that_served() -> None:
    one, two = Branching(1.0, reasons=("too narrow",)), Branching(2.0)
    rule = build(one, two).gated_delta_rule()
    two.calls.append(decode_call(slots=(0,)))
    assert decided(rule).branch is None, "what the fallback did elsewhere is not the chosen adapter's branch"
    rule.decode(decode_call())
    assert decided(rule) == Decision("gated_delta_rule", Phase.DECODE, "two", ("too narrow",), "batch of 2")


def test_branches_are_read_when_decisions_are_asked_for_and_not_by_calls() -> None:
    one = demanding(Branching(1.0))
    rule = build(one, FakeGatedDeltaRule(2.0)).gated_delta_rule()
    one.asked = 0
    for _ in range(3):
        rule.decode(decode_call())
    assert one.asked == 0


def test_an_adapter_that_does_not_say_has_no_branch() -> None:
    rule = build(demanding(FakeGatedDeltaRule(1.0)), FakeGatedDeltaRule(2.0)).gated_delta_rule()
    rule.decode(decode_call())
    assert decided(rule).branch is None
    assert not isinstance(FakeGatedDeltaRule(1.0), SaysBranches)


@pytest.mark.parametrize(("split", "branch"), [("on", "sequence split"), ("off", "one pass")])
def test_flashinfers_prefill_is_named_in_the_decision(split: str, branch: str) -> None:
    bed, counters = Bed(split=split), Counters()
    adapter = guarded("flashinfer", bed.adapter, counters)
    phases = (Phase.DECODE, Phase.EXTEND, Phase.VERIFY)
    rule = GatedDeltaRuleService(dict.fromkeys(phases, ("flashinfer", adapter)), counters)
    assert isinstance(adapter, AlignmentGuard)
    assert {d.branch for d in rule.decisions} == {None}
    rule.extend(bed.extend([3], [1]))
    rule.decode(bed.decode([3, 1]))
    said = {d.phase: d.branch for d in rule.decisions}
    assert said[Phase.EXTEND] == branch
    assert (said[Phase.DECODE] or "").startswith("pool by index")
    assert said[Phase.VERIFY] is said[Phase.COMMIT] is None


@pytest.mark.row("D12")
def test_a_capture_keeps_the_branch_that_it_took() -> None:
    rule = build(Branching(1.0), FakeGatedDeltaRule(2.0)).gated_delta_rule()
    with capture():
        rule.decode(decode_call())
    rule.decode(decode_call(slots=(1,)))
    assert [(b.adapter, b.branch) for b in rule.captured] == [("one", "batch of 2")]
