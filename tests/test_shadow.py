"""A shadow adapter repeats a sample of the served calls, says where it differs, and never disturbs what is served."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import qwen35
from fakes import FakeGatedDeltaRule, decode_call, fake_entry
from pretended_capture import capture
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ConfigurationError, UnavailableError, UnknownNameError
from qwen35.domain.shadow import ShadowSpec, parse_shadow
from qwen35.ports.gated_delta_rule import (
    GatedDeltaRule,
    GdnCall,
    VerifyCall,
)
from qwen35.services.counters import Counters
from qwen35.services.prometheus import prometheus_text
from qwen35.services.shadow import Shadow, ShadowedGatedDeltaRule
from qwen35.services.shadow_copy import largest_error
from qwen35.testing import Case
from qwen35.testing.make import make_parts
from shadow_bed import (
    CASES,
    CPU,
    KIT,
    SIZES,
    TOKENS,
    Wrapped,
    beta_rounded,
    build,
    run,
    spoil_everything,
    transposed,
    undisturbed,
)


@pytest.mark.parametrize("name", CASES)
def test_a_right_shadow_reports_nothing_and_disturbs_nothing(name: str, seed: int) -> None:
    case, shade = CASES[name], Wrapped()
    container = build(shade)
    shadowed = run(container.gated_delta_rule(), case, seed)
    undisturbed(shadowed, run(Wrapped(), case, seed), f"{name}, seed {seed}")
    counters = container.counters()
    assert counters.total("shadow_calls", phase=case.phase, adapter="shade", port="gated_delta_rule") == 1
    for silent in ("shadow_divergences", "shadow_refusals", "shadow_errors"):
        assert counters.total(silent) == 0, f"{counters.snapshot()}; seed {seed}"
    (call,) = shade.calls
    assert call.states.shape[0] == 1 + len({s for s in (*case.slots, *(case.write_slots or ())) if s >= 0})
    assert call.states.data_ptr() != shadowed.made.parts.pool.data_ptr()


@pytest.mark.parametrize("name", TOKENS)
def test_a_rounded_beta_is_reported_and_what_is_served_stands(
    name: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    container = build(Wrapped(before=beta_rounded))
    with caplog.at_level(logging.WARNING, logger="qwen35"):
        shadowed = run(container.gated_delta_rule(), case, seed)
        again = run(container.gated_delta_rule(), case, seed)
    for one in (shadowed, again):
        undisturbed(one, run(Wrapped(), case, seed), f"{name}, seed {seed}")
    whats = {"out"} | ({"intermediates"} if case.phase is Phase.VERIFY else {"states"})
    whats |= {"checkpoints"} if case.every else set()
    counters = container.counters()
    for what in whats:
        told = counters.total("shadow_divergences", phase=case.phase, adapter="shade", what=what)
        assert told == 2, f"{what}: {counters.snapshot()}; seed {seed}"
    assert counters.total("shadow_divergences") == 2 * len(whats)
    assert len(caplog.records) == len(whats), "each is logged once"
    largest = {dict(labels)["phase"]: v for (n, labels), v in counters.gauges().items() if n == "shadow_error_max"}
    assert [phase for phase, error in largest.items() if error > 0] == [case.phase]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.slots])
def test_a_transposed_state_is_reported_whatever_the_call(name: str, seed: int) -> None:
    case = CASES[name]
    container = build(Wrapped(after=transposed))
    shadowed = run(container.gated_delta_rule(), case, seed)
    undisturbed(shadowed, run(Wrapped(), case, seed), f"{name}, seed {seed}")
    assert container.counters().total("shadow_divergences", phase=case.phase, what="states") == 1, f"seed {seed}"
    assert container.counters().total("shadow_divergences") == 1, f"seed {seed}"


@pytest.mark.parametrize("name", CASES)
def test_a_shadow_that_writes_its_inputs_reaches_copies_only(name: str, seed: int) -> None:
    case = CASES[name]
    shadowed = run(build(Wrapped(after=spoil_everything)).gated_delta_rule(), case, seed)
    undisturbed(shadowed, run(Wrapped(), case, seed), f"{name}, seed {seed}")


def test_intermediates_that_the_shadow_does_not_write_are_reported(seed: int) -> None:
    def forget(call: VerifyCall) -> VerifyCall:
        return replace(call, intermediates=call.intermediates.clone())

    container = build(Wrapped(before=forget))
    run(container.gated_delta_rule(), CASES["verify, chain"], seed)
    assert container.counters().total("shadow_divergences", what="intermediates") == 1
    assert "inf" in prometheus_text(container.counters()).lower()


class KernelError(Exception):
    """No kind of error that we know."""


@pytest.mark.parametrize("error", [RuntimeError("kernel"), ConfigurationError("x"), KernelError("y")])
def test_an_error_of_the_shadow_is_counted_logged_once_and_kept(
    error: Exception, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: GdnCall) -> GdnCall:
        raise error

    case, container = CASES["decode, padding, write slots"], build(Wrapped(before=fail))
    with caplog.at_level(logging.WARNING, logger="qwen35"):
        for _ in range(3):
            shadowed = run(container.gated_delta_rule(), case, seed)
            undisturbed(shadowed, run(Wrapped(), case, seed), seed)
    counters, kind = container.counters(), type(error).__name__
    assert counters.total("shadow_errors", phase="decode", adapter="shade", reason=kind) == 3
    assert counters.total("shadow_calls") == 0
    assert [kind in record.getMessage() for record in caplog.records] == [True]


def test_what_the_shadow_does_not_support_is_counted_by_reason(seed: int) -> None:
    shade = Wrapped(reasons=("key width requires 128, got 8", "too small"))
    container = build(shade)
    run(container.gated_delta_rule(), CASES["verify, chain"], seed)
    counters = container.counters()
    assert counters.total("shadow_refusals", phase="verify", reason="key width requires 128, got 8") == 1
    assert counters.total("shadow_refusals", phase="verify", reason="too small") == 1
    assert (shade.calls, counters.total("shadow_errors")) == ([], 0)


def test_an_adapter_that_states_no_bound_is_not_compared(seed: int) -> None:
    container = build(FakeGatedDeltaRule(1.0))
    run(container.gated_delta_rule(), CASES["verify, chain"], seed)
    assert container.counters().total("shadow_refusals", reason="shade states no error bound") == 1


@pytest.mark.parametrize(("rate", "every"), [(1.0, 1), (0.5, 2), (0.34, 3), (0.01, 100)])
def test_every_so_many_eager_calls_of_a_phase_are_repeated(rate: float, every: int) -> None:
    spec = ShadowSpec("any", rate)
    assert spec.every == every
    assert [n for n in range(1, 301) if spec.samples(n)] == list(range(every, 301, every))
    shade = Wrapped()
    rule, counters = (container := build(shade, rate)).gated_delta_rule(), container.counters()
    for number in range(1, 8):
        rule.decode(decode_call())
        if number % 2:
            run(rule, CASES["commit"], number)
    assert counters.total("shadow_calls", phase="decode") == 7 // every
    assert counters.total("shadow_calls", phase="commit") == 4 // every
    assert len(shade.calls) == 7 // every + 4 // every


def test_a_refused_call_is_the_fallbacks_to_count_and_to_repeat() -> None:
    shade = Wrapped()
    container = build(shade, 0.5, FakeGatedDeltaRule(1.0, reasons=("too narrow",)), gdn_fallback="reference")
    rule = container.gated_delta_rule()
    for _ in range(4):
        rule.decode(decode_call())
    assert container.counters().total("fallbacks", adapter="reference") == 4
    assert container.counters().total("shadow_calls") == 2
    assert container.counters().total("shadow_divergences") == 0


def test_a_bad_call_is_refused_by_the_served_adapter_not_by_the_shadow() -> None:
    container = build(Wrapped())
    with pytest.raises(ValueError, match="slots must be distinct"):
        container.gated_delta_rule().decode(decode_call(slots=(1, 1)))
    reason = "the call does not meet the contract"
    assert container.counters().total("shadow_refusals", phase="decode", reason=reason) == 1


@pytest.mark.parametrize("name", ["decode, padding, write slots", "verify, tree, rows", "commit"])
def test_a_call_inside_capture_is_served_counted_and_not_repeated(name: str, seed: int) -> None:
    case, shade, primary = CASES[name], Wrapped(), Wrapped()
    container = build(shade, primary=primary)
    with capture():
        shadowed = run(container.gated_delta_rule(), case, seed)
    undisturbed(shadowed, run(Wrapped(), case, seed), f"{name}, seed {seed}")
    counters = container.counters()
    told = counters.total("shadow_refusals", phase=case.phase, adapter="shade", reason="inside CUDA graph capture")
    assert (told, counters.total("shadow_refusals")) == (1, 1)
    assert (len(primary.calls), shade.calls, counters.total("shadow_calls")) == (1, [], 0)
    run(container.gated_delta_rule(), case, seed)
    assert (len(primary.calls), len(shade.calls)) == (2, 1), "eagerly it is repeated"


@pytest.mark.gpu
def test_a_capture_is_not_repeated_and_its_replay_serves(seed: int) -> None:
    served = qwen35.adapter("gated_delta_rule", "triton")
    shade, counters = qwen35.adapter("gated_delta_rule", "reference64"), Counters()
    rule = ShadowedGatedDeltaRule("triton", served, Shadow(ShadowSpec("reference64", 1.0), shade, counters))
    sizes = replace(SIZES, key_width=128, value_width=128, token_dtype=torch.bfloat16)
    case = Case(phase=Phase.DECODE, sizes=sizes, seed=seed, pool=5, slots=(4, -1, 2), own_out=True)
    call = KIT.call(case.phase, make_parts(KIT, case, torch.device("cuda")).parts)
    rule.decode(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rule.decode(call)
    graph.replay()
    torch.cuda.synchronize()
    assert counters.total("shadow_refusals", reason="inside CUDA graph capture") == 1
    assert counters.total("shadow_calls") == 1
    assert counters.total("shadow_divergences") + counters.total("shadow_errors") == 0, counters.snapshot()


def test_both_are_prepared_refreshed_and_closed_and_a_refused_plan_is_counted() -> None:
    case, shade, primary = CASES["decode, padding, write slots"], Wrapped(), Wrapped()
    plan = KIT.plan(case, CPU, 7)
    rule = build(shade, primary=primary).gated_delta_rule()
    assert isinstance(rule.adapters[Phase.DECODE][1], ShadowedGatedDeltaRule)
    assert isinstance(rule.adapters[Phase.DECODE][1], GatedDeltaRule)
    rule.prepare(plan)
    assert primary.plans == [plan]
    assert shade.plans == [replace(plan, null_slot=0)], "slot 0 of a pool of copies is nobody's"
    assert rule.refresh_parameters() == 1
    rule.close()
    assert (primary.refreshed, shade.refreshed, primary.closed, shade.closed) == (1, 1, 1, 1)
    container = build(Wrapped(reasons=("too small",)))
    container.gated_delta_rule().prepare(plan)
    assert container.counters().total("shadow_refusals", phase="prepare", reason="too small") == 1


def test_a_shadow_of_the_served_adapter_is_an_instance_of_its_own() -> None:
    made: list[Wrapped] = []

    def create(*_: object) -> Wrapped:
        made.append(Wrapped())
        return made[-1]

    entry = replace(fake_entry("mine", FakeGatedDeltaRule(1.0)), create=create)
    rule = qwen35.build(device="cpu", adapters=[entry], gdn_decode="mine", gdn_shadow="mine:1").gated_delta_rule()
    rule.decode(decode_call())
    assert [len(one.calls) for one in made] == [1, 1]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("reference", "must be 'ADAPTER:RATE'"), (":0.5", "must be 'ADAPTER:RATE'"),
        ("reference:", r"in \(0, 1\], got ''"), ("reference:0", r"got '0'"), ("reference:1.5", r"got '1.5'"),
        ("reference:-1", r"got '-1'"), ("reference:nan", r"got 'nan'"), ("reference:often", r"got 'often'"),
    ],
)  # fmt: skip
def test_a_specification_that_cannot_be_honoured_is_refused_at_build(text: str, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        qwen35.build(device="cpu", gdn_shadow=text)


def test_an_unknown_or_unusable_shadow_is_refused_at_build() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'reference'"):
        qwen35.build(device="cpu", gdn_shadow="refrence:0.1")
    entry = fake_entry("mine", FakeGatedDeltaRule(1.0), unusable=("device requires tpu, got cpu",))
    with pytest.raises(UnavailableError, match="device requires tpu"):
        qwen35.build(device="cpu", adapters=[entry], gdn_shadow="mine:0.1")


def test_a_specification_reads_as_written() -> None:
    assert parse_shadow(" flashinfer : 0.01 ") == ShadowSpec("flashinfer", 0.01)
    assert parse_shadow("x:1e-320").every > 10**18


def test_errors_of_results_that_are_equal_zero_or_not_finite() -> None:
    nan, inf = float("nan"), float("inf")
    cases = [
        ([[3.0, 4.0]], [[3.0, 4.0]], 0.0), ([[3.0, 4.5]], [[3.0, 4.0]], 0.1), ([[nan, 1.0]], [[nan, 1.0]], 0.0),
        ([[nan, 1.0]], [[1.0, 1.0]], inf), ([[1.0, 1.0]], [[nan, 1.0]], inf), ([[inf, 4.0]], [[inf, 4.0]], 0.0),
        ([[1.0]], [[0.0]], inf), ([[0.0]], [[0.0]], 0.0), ([[1.0, 0.0], [0.0, 0.5]], [[1.0, 0.0], [0.0, 1.0]], 0.5),
    ]  # fmt: skip
    for got, want, error in cases:
        assert largest_error(torch.tensor(got), torch.tensor(want), 1) == pytest.approx(error), (got, want)
    assert largest_error(torch.ones(2), torch.ones(3), 0) == inf
    assert largest_error(None, torch.ones(3), 0) == inf
    assert largest_error(None, None, 0) == 0.0
