"""Bad input of every kind: an error of our tree that names the argument, and nothing written."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import qwen35
from good_cases import good_case
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ConfigurationError, ContractError, LayoutError, ValueRangeError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.conv_calls import (
    ConvCommitCall,
    ConvDecodeCall,
    ConvExtendCall,
    ConvPlan,
    ConvVerifyCall,
)
from qwen35.ports.gated_delta_rule import (
    CheckpointPlan,
    CommitCall,
    DecodeCall,
    ExtendCall,
    GdnPlan,
    LogGates,
    RawGates,
    VerifyCall,
)
from qwen35.ports.support import PHASE_OF
from qwen35.testing import KITS, Bench, Profile, limits_for
from qwen35.testing.refusal_laws import refuse_spoilt
from qwen35.testing.spoil import Spoil, spoils_of


def bench_of(port: str) -> Bench:
    adapter = qwen35.adapter(port, "reference", device="cpu")
    return Bench(adapter, KITS[port], "cpu", limits_for(adapter.capabilities, Profile.CPU))


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


@pytest.mark.row("D22")
@pytest.mark.parametrize("name", ["a", "b", "A_log", "dt_bias"])
def test_a_missing_gate_of_verify_is_a_contract_error_that_names_it(name: str, seed: int) -> None:
    bench = bench_of("gated_delta_rule")
    call = bench.trial(good_case("gated_delta_rule", Phase.VERIFY, seed)).call
    with pytest.raises(ContractError, match=f"gates.{name} must be a tensor, got NoneType"):
        bench.adapter.verify(replace(call, gates=replace(call.gates, **{name: None})))


@pytest.mark.parametrize("port", KITS)
def test_a_row_may_write_what_it_reads_and_not_what_another_reads(port: str, seed: int) -> None:
    bench = bench_of(port)
    good = replace(good_case(port, Phase.DECODE, seed), slots=(2, 0, -1), write_slots=(2, 3, 0))
    trial = bench.trial(good)
    want = trial.truth()
    trial.matches(trial.run(), want)
    call = bench.trial(replace(good, write_slots=(0, 3, 1))).call
    with pytest.raises(ValueRangeError, match=r"write_slots\[0\] = 0 is read by row 1"):
        bench.adapter.decode(call)
    # Two rows read slot 2: neither may write it.
    call = bench.trial(replace(good, slots=(2, 2, -1), write_slots=(2, 3, 0))).call
    with pytest.raises(ValueRangeError, match=r"write_slots\[0\] = 2 is read by row 1"):
        bench.adapter.decode(call)


@pytest.mark.parametrize("port", KITS)
def test_out_may_be_columns_next_to_an_input_and_not_over_them(port: str, seed: int) -> None:
    bench = bench_of(port)
    trial = bench.trial(good_case(port, Phase.DECODE, seed))
    want = trial.truth()
    name = "v" if port == "gated_delta_rule" else "x"
    tokens = trial.parts.tokens[name]
    width = tokens[0].numel()
    wide = torch.full((tokens.shape[0], 2 * width), float("nan"))
    beside, over = (wide[:, a : a + width].view(tokens.shape) for a in (width, width - 1))
    inside = wide[:, :width].view(tokens.shape)
    inside.copy_(tokens)
    parts = replace(trial.parts, tokens={**trial.parts.tokens, name: inside})
    with pytest.raises(LayoutError, match=f"out, .*share memory with {name}"):
        bench.run(bench.call(Phase.DECODE, replace(parts, out=over)))
    served = bench.run(bench.call(Phase.DECODE, replace(parts, out=beside)))
    trial.matches(served, want)


def _plan(port: str, **changes: Any) -> Any:
    common: dict[str, Any] = {"device": torch.device("cpu"), "max_batch": 2, "max_tokens": 4}
    if port == "short_convolution":
        return ConvPlan(**({"channels": 8, "width": 4, "window_dtype": torch.float32} | common | changes))
    geometry = GdnGeometry(key_heads=1, value_heads=2, key_width=8, value_width=8)
    return GdnPlan(**({"geometry": geometry, "state_dtype": torch.float32} | common | changes))


@pytest.mark.parametrize(("port", "name", "value"), [
    *((port, name, value) for port in KITS for name, value in (
        ("max_batch", -1), ("max_tokens", -1), ("max_draft", -1), ("max_batch", 2.0), ("device", "cpu"),
        ("token_dtype", "bfloat16"))),
    ("gated_delta_rule", "null_slot", -1), ("gated_delta_rule", "state_dtype", None),
    ("gated_delta_rule", "may_pad", 1), ("gated_delta_rule", "may_pad", None),
    ("short_convolution", "channels", 0), ("short_convolution", "width", 1),
])  # fmt: skip
def test_a_plan_that_is_none_is_refused_by_field(port: str, name: str, value: Any) -> None:
    adapter = bench_of(port).adapter
    adapter.prepare(_plan(port))
    with pytest.raises(ConfigurationError, match=rf"Plan\.{name} must be .*, got {value!r}"):
        adapter.prepare(_plan(port, **{name: value}))


def _arguments(call: type) -> set[str]:
    """Every argument that a call has, gates and checkpoint plans by their own fields."""
    names = {field.name for field in fields(call)}
    for name, kinds in (("gates", (RawGates, LogGates)), ("checkpoints", (CheckpointPlan,))):
        if name in names:
            names |= {f"{name}.{field.name}" for kind in kinds for field in fields(kind)}
    return names - {"checkpoints"}


@pytest.mark.parametrize("call", [
    DecodeCall, ExtendCall, VerifyCall, CommitCall, ConvDecodeCall, ConvExtendCall, ConvVerifyCall, ConvCommitCall,
])  # fmt: skip
def test_every_argument_of_every_call_is_in_the_table(call: type) -> None:
    port = "short_convolution" if call.__name__.startswith("Conv") else "gated_delta_rule"
    spoilt = {spoil.argument for spoil in spoils_of(port, PHASE_OF[call])}
    if "pool" in spoilt:
        spoilt.add(KITS[port].pool_name)
    assert _arguments(call) - spoilt == set()
