"""Copies and scratch that are first asked for inside capture, and the branch that a capture took."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from test_guard import HV, DemandingAdapter, H, K, V, build, decode_call, displaced

import qwen35
from qwen35.domain.alignment import CapturedBranch, Placement, replay_reasons
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import CaptureError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import GdnPlan, ReplayPlan
from qwen35.services.parameter_copies import ParameterCopies

CPU = torch.device("cpu")
MEMORY = object()


@pytest.mark.row("D09")
def test_a_copy_born_in_capture_is_filled_before_an_eager_caller_gets_it(seed: int) -> None:
    """A capture records the filling and does not run it; here the copy is spoilt to stand for that."""
    copies, parameter = ParameterCopies(32), torch.randn(HV)
    copies.reserve(HV * 4, CPU)
    captured = copies.take(parameter, capturing=True)
    captured.fill_(float("nan"))
    eager = copies.take(parameter, capturing=False)
    assert eager.data_ptr() == captured.data_ptr(), "the graph goes on reading this address"
    assert torch.equal(eager, parameter), f"seed {seed}"
    eager.fill_(7.0)
    assert bool((copies.take(parameter, capturing=False) == 7.0).all()), "filled once, then only by a refresh"
    copies.refresh()
    assert torch.equal(captured, parameter)


@pytest.mark.row("D09")
def test_every_capture_records_the_filling_until_an_eager_call_or_a_refresh_has_made_it() -> None:
    copies, parameter = ParameterCopies(32), torch.randn(HV)
    copies.reserve(HV * 4, CPU)
    for _ in range(2):
        copy = copies.take(parameter, capturing=True)
        assert torch.equal(copy, parameter)
        copy.fill_(float("nan"))
    assert copies.refresh() == 1
    kept = copies.take(parameter, capturing=True)
    assert torch.equal(kept, parameter)
    kept.fill_(7.0)
    assert bool((copies.take(parameter, capturing=True) == 7.0).all()), "recorded no more"


@pytest.mark.row("D09")
def test_a_parameter_that_has_no_place_inside_capture_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(CaptureError, match="run it once before"):
        ParameterCopies(32).take(torch.randn(HV), capturing=True)


@pytest.mark.row("D12")
def test_a_branch_holds_at_the_addresses_of_its_capture_only() -> None:
    branches = [
        CapturedBranch(Phase.DECODE, "triton", (), (("states", at(64)),)),
        CapturedBranch(Phase.VERIFY, "reference", ("states requires 32-byte alignment, got 4 bytes off",),
                       (("states", at(68)), ("intermediates", at(128)))),
    ]  # fmt: skip
    assert replay_reasons(branches, Phase.DECODE, {"states": at(64)}) == ()
    assert replay_reasons(branches, Phase.VERIFY, {"states": at(68), "intermediates": at(128)}) == ()
    for phase, now in (
        (Phase.DECODE, {"states": at(68)}), (Phase.VERIFY, {"states": at(64), "intermediates": at(128)}),
        (Phase.VERIFY, {"states": at(68), "intermediates": at(132)}),
    ):  # fmt: skip
        (reason,) = replay_reasons(branches, phase, now)
        assert "tensors moved since; capture again" in reason
    assert replay_reasons(branches, Phase.COMMIT, {"states": at(64)}) == ("no commit was captured",)


@pytest.mark.row("D12")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"shape": (3, 2)}, "states: shape was (4, 2), is (3, 2)"),
        ({"strides": (3, 1)}, "states: strides was (2, 1), is (3, 1)"),
        ({"dtype": "torch.bfloat16"}, "states: dtype was torch.float32, is torch.bfloat16"),
        ({"storage": lambda: "other"}, "states: the captured memory belongs to another storage"),
    ],
)
def test_another_tensor_at_the_address_of_a_capture_is_named_by_what_differs(
    changed: dict[str, Any], said: str
) -> None:
    branch = CapturedBranch(Phase.VERIFY, "triton", (), (("states", at(64)), ("intermediates", at(128))))
    now = {"states": dataclasses.replace(at(64), **changed), "intermediates": at(128)}
    (reason,) = replay_reasons([branch], Phase.VERIFY, now)
    assert reason == f"no verify was captured with states at 0x40, intermediates at 0x80: {said}; capture again"


@pytest.mark.row("D12")
def test_a_pool_that_was_freed_is_not_taken_for_one_that_lies_where_it_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are pretended, since there are none on a CPU; two arrays of one memory stand for its second life."""
    adapter = DemandingAdapter()
    rule = build(adapter).gated_delta_rule()
    call = displaced(decode_call(), set())
    memory = call.states.numpy()
    call, shape = dataclasses.replace(call, states=torch.from_numpy(memory)), tuple(call.states.shape)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    rule.decode(call)
    plan = ReplayPlan(phase=Phase.DECODE, states=call.states)
    assert rule.before_replay(plan)
    assert rule.before_replay(dataclasses.replace(plan, states=call.states[:])), "a view of it is the same pool"
    (reason,) = rule.before_replay(dataclasses.replace(plan, states=call.states[1:].view(-1))).reasons
    assert "tensors moved since" in reason
    fewer = rule.before_replay(dataclasses.replace(plan, states=call.states[:2]))
    assert [r.split(": ")[-1] for r in fewer.reasons] == [f"shape was {shape}, is {(2, *shape[1:])}; capture again"]
    again = torch.from_numpy(memory)
    (reason,) = rule.before_replay(dataclasses.replace(plan, states=again)).reasons
    assert "belongs to another storage" in reason
    del call, plan
    adapter.calls.clear()
    gc.collect()
    (reason,) = rule.before_replay(ReplayPlan(phase=Phase.DECODE, states=again)).reasons
    assert "the captured memory was freed, and this is other memory at its address; capture again" in reason
    rule.decode(dataclasses.replace(displaced(decode_call(), set()), states=again))
    assert rule.before_replay(ReplayPlan(phase=Phase.DECODE, states=again)), "captured again"
    assert len(rule.captured) == 1


def at(address: int) -> Placement:
    """Where a float32 tensor [4, 2] lies whose memory lives."""
    return Placement(address, (4, 2), (2, 1), "torch.float32", lambda: MEMORY)


@pytest.mark.gpu
@pytest.mark.row("D12")
def test_a_captured_decode_keeps_its_branch_and_a_pool_that_moved_is_named(seed: int) -> None:
    rule = qwen35.build(device="cuda", gdn_decode="triton", gdn_extend="triton", gdn_verify="triton").gated_delta_rule()
    rule.prepare(
        GdnPlan(
            geometry=GdnGeometry(key_heads=H, value_heads=HV, key_width=K, value_width=V), state_dtype=torch.float32,
            device=torch.device("cuda"), max_batch=4, max_tokens=16, token_dtype=torch.float32,
        )
    )  # fmt: skip
    call = on_gpu(decode_call())
    rule.decode(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rule.decode(call)
    (branch,) = [b for b in rule.captured if b.phase is Phase.DECODE]
    assert (branch.adapter, dict(branch.addresses)["states"]) == ("triton", call.states.data_ptr())
    assert rule.before_replay(ReplayPlan(phase=Phase.DECODE, states=call.states)), f"seed {seed}"
    moved = call.states.clone()
    (reason,) = rule.before_replay(ReplayPlan(phase=Phase.DECODE, states=moved)).reasons
    assert "capture again" in reason
    rule.close()
    assert rule.before_replay(ReplayPlan(phase=Phase.DECODE, states=call.states)).reasons == ("no decode was captured",)


def on_gpu(call: Any) -> Any:
    """``call`` with every tensor on the GPU."""
    from dataclasses import fields, is_dataclass, replace

    moved = {}
    for field in fields(call):
        value = getattr(call, field.name)
        if isinstance(value, torch.Tensor):
            moved[field.name] = value.cuda()
        elif is_dataclass(value):
            moved[field.name] = on_gpu(value)
    return replace(call, **moved)
