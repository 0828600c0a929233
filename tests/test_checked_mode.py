"""Checked mode of the services, on a GPU too: values that the host does not know are refused by name before anything
is launched, and a call inside capture is captured without waiting for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import qwen35
from fakes import FakeGatedDeltaRule
from good_cases import good_case
from qwen35.container import Container
from qwen35.domain.capabilities import Phase, Support
from qwen35.domain.errors import DtypeError, ValueRangeError
from qwen35.ports.adapter import AdapterEntry
from qwen35.ports.conv_calls import ConvDecodeCall, ConvExtendCall, ConvVerifyCall
from qwen35.services.counters import mode
from qwen35.testing import KITS, Bench, Profile, limits_for
from qwen35.testing.bench import Refused
from qwen35.testing.capture_laws import replays, warm_up
from qwen35.testing.kit import serve
from qwen35.testing.refusal_laws import refuse_spoilt
from qwen35.testing.spoil import Spoil, spoils_of
from qwen35.testing.tensors import same_bits

PHASES = [pytest.param(port, phase, id=f"{port}-{phase}") for port in KITS for phase in Phase]
#: Who serves, and where. Plain torch refuses bad values itself, a trusting adapter none.
SERVERS = [("trusting", "cpu"), ("reference", "cpu"), pytest.param(("triton", "cuda"), marks=pytest.mark.gpu)]


class TrustingConvolution(FakeGatedDeltaRule):
    """The fake as the other port."""

    def decode(self, call: ConvDecodeCall) -> Tensor:  # type: ignore[override]
        return self._any(call)

    def extend(self, call: ConvExtendCall) -> Tensor:  # type: ignore[override]
        return self._any(call)

    def verify(self, call: ConvVerifyCall) -> Tensor:  # type: ignore[override]
        return self._any(call)

    def _any(self, call: Any) -> Tensor:
        self._serve(call)
        return torch.full_like(call.x, self.mark)


def trusting() -> list[AdapterEntry]:
    """An adapter of either port that serves whatever it is given."""
    kinds = {"gated_delta_rule": FakeGatedDeltaRule, "short_convolution": TrustingConvolution}
    return [
        AdapterEntry(port=port, name="trusting", summary="fake", probe=lambda _: Support.of(),
                     create=lambda *_, kind=kind: kind(1.0), rank=0)
        for port, kind in kinds.items()
    ]  # fmt: skip


def built(name: str, device: str, checked: bool = True) -> Container:
    return qwen35.build(
        device=device, adapters=trusting(), gdn_decode=name, gdn_extend=name, gdn_verify=name, conv=name,
        checked=checked,
    )  # fmt: skip


@pytest.fixture
def container(request: pytest.FixtureRequest) -> Iterator[Container]:
    made = built(*request.param)
    yield made
    qwen35.close(made)


def bench_of(container: Container, port: str) -> Bench:
    """The service that the container offers for ``port``, in the place of an adapter."""
    service = container.gated_delta_rule() if port == "gated_delta_rule" else container.short_convolution()
    device = container.platform().device
    profile = Profile.CPU if device == "cpu" else Profile.GPU
    return Bench(service, KITS[port], device, limits_for(service.capabilities, profile))


def tensors_of(call: Any) -> dict[str, Tensor]:
    """Every tensor of a call that has bytes, gates and plans included."""
    found: dict[str, Tensor] = {}
    for field in fields(call):
        value = getattr(call, field.name)
        if isinstance(value, Tensor) and not value.is_meta:
            found[field.name] = value
        elif is_dataclass(value):
            found |= {f"{field.name}.{name}": tensor for name, tensor in tensors_of(value).items()}
    return found


def watched(spoil: Spoil, before: dict[str, tuple[Tensor, Tensor]]) -> Spoil:
    """``spoil``, with every tensor of the bad call and its bytes kept in ``before``: it may have memory of its own."""

    def change(call: Any) -> Any:
        bad = spoil.change(call)
        before.update({name: (tensor, tensor.clone()) for name, tensor in tensors_of(bad).items()})
        return bad

    return replace(spoil, change=change)


@pytest.mark.parametrize("container", SERVERS, indirect=True, ids="-".join)
@pytest.mark.parametrize(("port", "phase"), PHASES)
def test_every_bad_value_is_refused_by_name_and_writes_nothing(
    container: Container, port: str, phase: Phase, seed: int
) -> None:
    bench, case = bench_of(container, port), good_case(port, phase, seed)
    spoils = spoils_of(port, phase, values=True)
    assert any(spoil.values for spoil in spoils)
    for like in dict.fromkeys(spoil.like for spoil in spoils):
        with suppress(Refused):  # an adapter may lack checkpoints so close together
            bench.run(like(bench.trial(case).call))
        served = container.counters().total("calls")
        for spoil in (spoil for spoil in spoils if spoil.like is like):
            before: dict[str, tuple[Tensor, Tensor]] = {}
            refusal = refuse_spoilt(bench, case, watched(spoil, before))
            what = f"{spoil.name}: {type(refusal).__name__}: {refusal}; seed {seed}"
            assert isinstance(refusal, spoil.error), what
            assert (bench.kit.pool_name if spoil.argument == "pool" else spoil.argument) in str(refusal), what
            assert before, what
            for name, (tensor, kept) in before.items():
                assert same_bits(tensor, kept), f"{name} was written; {what}"
        assert container.counters().total("calls") == served


@pytest.mark.parametrize(("port", "phase"), PHASES)
def test_without_checked_mode_a_trusting_adapter_is_given_bad_values(port: str, phase: Phase, seed: int) -> None:
    container = built("trusting", "cpu", checked=False)
    bench, case = bench_of(container, port), good_case(port, phase, seed)
    for spoil in (spoil for spoil in spoils_of(port, phase) if spoil.values):
        with pytest.raises(AssertionError, match="accepted"):
            refuse_spoilt(bench, case, spoil)


ON_A_GPU = [pytest.param(("triton", "cuda"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("container", ON_A_GPU, indirect=True, ids="-".join)
@pytest.mark.parametrize(("port", "phase"), PHASES)
def test_a_checked_call_is_captured_and_its_replays_see_new_values(
    container: Container, port: str, phase: Phase, seed: int
) -> None:
    replays(bench_of(container, port), good_case(port, phase, seed))
    captured = {"port": port, "phase": str(phase), "adapter": "triton", "mode": mode(True)}
    assert container.counters().total("calls", **captured) == 1, f"seed {seed}"


@pytest.mark.parametrize("container", ON_A_GPU, indirect=True, ids="-".join)
@pytest.mark.parametrize(("port", "phase"), PHASES)
def test_inside_capture_only_what_the_host_knows_is_refused(
    container: Container, port: str, phase: Phase, seed: int
) -> None:
    bench, case = bench_of(container, port), good_case(port, phase, seed)
    trial = bench.trial(case)
    bench.prepare(case)
    side = warm_up(bench, trial)
    call, slots = trial.call, trial.parts.slots
    floating, good = replace(call, slots=slots.float()), slots.clone()
    slots.fill_(case.pool)
    with pytest.raises(ValueRangeError, match=r"slots\[0\]"):
        serve(bench.adapter, call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        with pytest.raises(DtypeError, match="slots"):
            serve(bench.adapter, floating)
        captured = serve(bench.adapter, call)  # its slots are what they are at the replay
    slots.copy_(good)
    want = trial.truth()
    graph.replay()
    torch.cuda.synchronize()
    trial.only_written_slots_changed()
    trial.inputs_unchanged()
    trial.matches(captured, want)
