"""Bad input of every kind: an error of our tree that names the argument, and nothing written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import qwen35
from qwen35.domain.capabilities import GateKind, Phase
from qwen35.domain.errors import ValueRangeError
from qwen35.ports.gated_delta_rule import CheckpointPlan, ExtendCall
from qwen35.testing import KITS, Bench, Case, ConvSizes, GdnSizes, Profile, limits_for
from qwen35.testing.refusal_laws import refuse_spoilt
from qwen35.testing.spoil import Spoil, spoils_of

SIZES: dict[str, Any] = {
    "gated_delta_rule": GdnSizes(key_heads=2, value_heads=4, key_width=8, value_width=16, gates=GateKind.RAW),
    "short_convolution": ConvSizes(channels=24, width=4, bias=True),
}
MORE: dict[Phase, dict[str, Any]] = {
    Phase.DECODE: {}, Phase.EXTEND: {"lengths": (2, 3)}, Phase.VERIFY: {"draft": 2, "nodes": 2, "capacity": 2},
    Phase.COMMIT: {"draft": 2, "nodes": 2, "capacity": 2, "last": (1, 0)},
}  # fmt: skip


def bench_of(port: str) -> Bench:
    adapter = qwen35.adapter(port, "reference", device="cpu")
    return Bench(adapter, KITS[port], "cpu", limits_for(adapter.capabilities, Profile.CPU))


def good_case(port: str, phase: Phase, seed: int) -> Case[Any]:
    own = phase is not Phase.COMMIT
    return Case(phase=phase, sizes=SIZES[port], seed=seed, pool=4, slots=(2, 0), own_out=own, **MORE[phase])


def _spoilt() -> list[Any]:
    return [
        pytest.param(port, phase, spoil, id=f"{port}-{phase}-{spoil.name}")
        for port in KITS
        for phase in Phase
        for spoil in spoils_of(port, phase)
    ]


@pytest.mark.parametrize(("port", "phase", "spoil"), _spoilt())
def test_bad_input_is_refused_by_name_and_writes_nothing(port: str, phase: Phase, spoil: Spoil, seed: int) -> None:
    bench = bench_of(port)
    refusal = refuse_spoilt(bench, good_case(port, phase, seed), spoil)
    assert isinstance(refusal, spoil.error), f"{type(refusal).__name__}: {refusal}"
    named = bench.kit.pool_name if spoil.argument == "pool" else spoil.argument
    assert named in str(refusal), f"the message must name {named}: {refusal}"


@pytest.mark.parametrize("port", KITS)
@pytest.mark.parametrize("phase", list(Phase))
def test_the_call_that_is_spoilt_is_good_as_it_is(port: str, phase: Phase, seed: int) -> None:
    trial = bench_of(port).trial(good_case(port, phase, seed))
    want = trial.truth()
    trial.matches(trial.run(), want)


@pytest.mark.row("D15")
@pytest.mark.parametrize("port", KITS)
def test_duplicate_padding_is_legal_and_a_duplicate_slot_is_not(port: str, seed: int) -> None:
    bench = bench_of(port)
    padded = replace(good_case(port, Phase.DECODE, seed), slots=(-1, -1))
    bench.trial(padded).run()
    (twice,) = (s for s in spoils_of(port, Phase.DECODE) if s.name == "a slot twice")
    assert "more than once" in str(refuse_spoilt(bench, good_case(port, Phase.DECODE, seed), twice))


@pytest.mark.row("D24")
@pytest.mark.parametrize("port", KITS)
def test_a_batch_larger_than_the_intermediates_is_refused_without_rows(port: str, seed: int) -> None:
    (fewer,) = (s for s in spoils_of(port, Phase.VERIFY) if s.name == "intermediates of too few rows")
    refusal = refuse_spoilt(bench_of(port), good_case(port, Phase.VERIFY, seed), fewer)
    assert "R >= B = 2" in str(refusal)


@pytest.mark.row("D21")
@pytest.mark.parametrize(("every", "starts", "count"), [(0, [0, 0, 1], 1), (2, [0, 1, 3], 2), (2, [0, 1, 2], 3)])
def test_a_checkpoint_plan_that_does_not_fit_the_lengths_is_refused(
    every: int, starts: list[int], count: int, seed: int
) -> None:
    bench = bench_of("gated_delta_rule")
    trial = bench.trial(good_case("gated_delta_rule", Phase.EXTEND, seed))
    call = trial.call
    assert isinstance(call, ExtendCall)
    before = call.states.clone()
    plan = CheckpointPlan(every=every, starts=torch.tensor(starts), count=count)
    with pytest.raises(ValueRangeError, match="checkpoints"):
        bench.adapter.extend(replace(call, checkpoints=plan))
    assert torch.equal(before, call.states)


def test_every_kind_of_bad_input_is_in_the_table() -> None:
    arguments = {spoil.argument for spoil in spoils_of("gated_delta_rule", Phase.EXTEND)}
    assert arguments >= {"pool", "slots", "q", "k", "v", "gates.a", "gates.A_log", "cu_seqlens", "seq_lens_host", "out"}
