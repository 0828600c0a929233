"""What is not the call or plan that a method takes is an error of ours, whoever would have served it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import qwen35
from fakes import FakeGatedDeltaRule, decode_call, fake_entry
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ConfigurationError, ContractError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import CommitCall, GdnPlan
from qwen35.ports.short_convolution import ConvPlan
from qwen35.testing import KITS, Case, ConvSizes, GdnSizes
from qwen35.testing.make import make_parts
from qwen35.testing.tensors import same_bits

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "gated_delta_rule": GdnSizes(key_heads=1, value_heads=2, key_width=8, value_width=4),
    "short_convolution": ConvSizes(channels=6, width=4),
}
MORE: dict[Phase, dict[str, Any]] = {
    Phase.DECODE: {}, Phase.EXTEND: {"lengths": (1, 2)}, Phase.VERIFY: {"draft": 2, "nodes": 2, "capacity": 2},
    Phase.COMMIT: {"draft": 2, "nodes": 2, "capacity": 2, "last": (1, 0)},
}  # fmt: skip


def call_of(port: str, phase: Phase, seed: int) -> Any:
    case = Case(phase=phase, sizes=SIZES[port], seed=seed, pool=3, slots=(2, 0), **MORE[phase])
    return KITS[port].call(phase, make_parts(KITS[port], case, CPU).parts)


def service(port: str, **settings: Any) -> Any:
    container = qwen35.build(device="cpu", **settings)
    return container.gated_delta_rule() if port == "gated_delta_rule" else container.short_convolution()


def plan(**changes: Any) -> GdnPlan:
    geometry = GdnGeometry(key_heads=1, value_heads=2, key_width=8, value_width=4)
    made = GdnPlan(geometry=geometry, state_dtype=torch.float32, device=CPU, max_batch=1, max_tokens=1)
    return replace(made, **changes)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("port", KITS)
def test_another_kind_of_call_is_a_contract_error_that_names_both(
    port: str, phase: Phase, checked: bool, seed: int
) -> None:
    refuses_others(service(port, checked=checked), port, phase, seed)


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("port", KITS)
def test_so_it_is_for_an_adapter_by_itself(port: str, phase: Phase, name: str, seed: int) -> None:
    refuses_others(qwen35.adapter(port, name, device="cpu"), port, phase, seed)


def refuses_others(server: Any, port: str, phase: Phase, seed: int) -> None:
    """Everything but the call that ``server`` takes for ``phase`` is refused, and nothing is written."""
    good = type(call_of(port, phase, seed)).__name__
    others = [call_of(other, p, seed) for other in KITS for p in Phase if (other, p) != (port, phase)]
    for wrong in (None, "a call", 3, *others):
        before = [t.clone() for t in tensors(wrong)]
        with pytest.raises(ContractError) as caught:
            getattr(server, phase)(wrong)
        assert good in str(caught.value)
        assert type(wrong).__name__ in str(caught.value)
        assert all(map(same_bits, before, tensors(wrong))), f"something was written; seed {seed}"


def tensors(call: Any) -> list[torch.Tensor]:
    names = ("states", "windows", "intermediates")
    return [getattr(call, name) for name in names if name in getattr(call, "__slots__", ())]


class Careless(FakeGatedDeltaRule):
    """As kernels are that look at nothing: what is not there is an AttributeError."""

    def decode(self, call: Any) -> torch.Tensor:
        return torch.full_like(call.v, self.mark)


@pytest.mark.parametrize("fallback", [None, "reference"])
def test_an_adapter_that_checks_nothing_is_served_the_same(fallback: str | None, seed: int) -> None:
    entry = fake_entry("careless", Careless(1.0))
    rule = qwen35.build(device="cpu", adapters=[entry], gdn_decode="careless", gdn_fallback=fallback).gated_delta_rule()
    commit = call_of("gated_delta_rule", Phase.COMMIT, seed)
    assert isinstance(commit, CommitCall)
    with pytest.raises(ContractError, match="decode requires a DecodeCall, got CommitCall"):
        rule.decode(commit)
    assert float(rule.decode(decode_call()).max()) == 1.0


def test_an_adapters_own_mistake_on_a_good_call_stays_visible() -> None:
    class Buggy(FakeGatedDeltaRule):
        def decode(self, call: Any) -> torch.Tensor:
            out: torch.Tensor = call.q.no_such_method()
            return out

    rule = qwen35.build(device="cpu", adapters=[fake_entry("buggy", Buggy(1.0))], gdn_decode="buggy")
    with pytest.raises(AttributeError, match="no_such_method"):
        rule.gated_delta_rule().decode(decode_call())


@pytest.mark.parametrize("port", KITS)
def test_supports_names_the_calls_that_there_are(port: str) -> None:
    for server in (service(port), qwen35.adapter(port, "reference", device="cpu")):
        with pytest.raises(ContractError, match=r"call must be one of DecodeCall, .*got NoneType"):
            server.supports(None)


def test_a_plan_of_another_kind_or_without_a_geometry_is_refused() -> None:
    conv = ConvPlan(channels=4, width=4, window_dtype=torch.float32, device=CPU, max_batch=1, max_tokens=1)
    wrong: list[tuple[str, Any, str]] = [
        ("gated_delta_rule", None, "requires a GdnPlan, got NoneType"),
        ("gated_delta_rule", conv, "requires a GdnPlan, got ConvPlan"),
        ("gated_delta_rule", plan(geometry=None), "GdnPlan.geometry must be a GdnGeometry, got None"),
        ("gated_delta_rule", plan(device=None), "GdnPlan.device must be a torch.device, got None"),
        ("gated_delta_rule", plan(state_dtype="float32"), "GdnPlan.state_dtype must be a torch.dtype"),
        ("short_convolution", plan(), "requires a ConvPlan, got GdnPlan"),
        ("short_convolution", None, "requires a ConvPlan, got NoneType"),
    ]
    for port, given, match in wrong:
        for server in (service(port), qwen35.adapter(port, "reference", device="cpu")):
            with pytest.raises(ConfigurationError, match=match):
                server.prepare(given)
    service("gated_delta_rule").prepare(plan())
