"""Calls through SGLang's own backend and dispatcher equal calls of the contract that know nothing of SGLang."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from seam_machine import CHANNELS, HV, K, Machine, V, close, installed_seam, split, start
from torch import Tensor

from fakes import FakeGatedDeltaRule, fake_entry
from pretended_capture import capture
from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.container import build
from qwen35.domain.capabilities import Clause
from qwen35.ports.gated_delta_rule import (
    CheckpointPlan,
    DecodeCall,
    ExtendCall,
    LogGates,
    RawGates,
)

ALL = {"gdn_decode": "reference", "gdn_extend": "reference", "gdn_verify": "reference"}
PORT = {"port": "gated_delta_rule"}
oracle = ReferenceGatedDeltaRule(torch.float64)


def raw(machine: Machine, a: Tensor, b: Tensor) -> RawGates:
    return RawGates(a=a.clone(), b=b.clone(), A_log=machine.A_log, dt_bias=machine.dt_bias)


def slots_of(*slots: int) -> Tensor:
    return torch.tensor(slots, dtype=torch.int32)


def test_packed_decode_with_padding_equals_a_decode_call() -> None:
    one = start(**ALL)
    machine = Machine(strided=True)
    states = machine.states.clone()
    packed, a, b = machine.tokens(3)
    machine.metadata([5, -1, 2], [0, 1, 2, 3])
    out = machine.backend.forward_decode(machine.layer, machine.batch("DECODE", [1, 1, 1]), packed, a, b)
    q, k, v = split(packed)
    call = DecodeCall(q=q, k=k, v=v, gates=raw(machine, a, b), states=states, slots=slots_of(5, -1, 2))
    expected = oracle.decode(call)
    assert out.shape == (1, 3, HV, V)
    close(out[0], expected)
    close(machine.states, states)
    assert torch.equal(machine.states[1], states[1]), "a slot that nobody named is bitwise unchanged"
    assert not out[0, 1].any(), "a padding row is zero"
    assert one.container.counters().total("calls", adapter="reference", phase="decode", **PORT) == 1


def test_decode_of_a_backend_without_packed_decode_equals_a_decode_call() -> None:
    start(**ALL)
    machine = Machine()
    machine.dispatcher.supports_packed_decode = False
    states = machine.states.clone()
    packed, a, b = machine.tokens(2)
    machine.metadata([3, 6], [0, 1, 2])
    out = machine.backend.forward_decode(machine.layer, machine.batch("DECODE", [1, 1]), packed, a, b)
    q, k, v = split(packed)
    call = DecodeCall(q=q, k=k, v=v, gates=raw(machine, a, b), states=states, slots=slots_of(3, 6))
    close(out[0], oracle.decode(call))
    close(machine.states, states)


def extend_two(machine: Machine) -> tuple[Tensor, ExtendCall]:
    """What the backend returns for two sequences, and the call that it stands for, over copies of the states."""
    states = machine.states.clone()
    packed, a, b = machine.tokens(7)
    machine.metadata([4, 1], [0, 5, 7])
    out = machine.backend.forward_extend(machine.layer, machine.batch("EXTEND", [5, 2]), packed, a, b)
    q, k, v = split(packed)
    return out, ExtendCall(q=q, k=k, v=v, gates=raw(machine, a, b), states=states, slots=slots_of(4, 1),
                           cu_seqlens=slots_of(0, 5, 7))  # fmt: skip


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "page-major"])
def test_extend_uses_the_raw_gates_of_the_batch(strided: bool) -> None:
    start(**ALL)
    machine = Machine(strided=strided, dtype=torch.bfloat16)
    out, call = extend_two(machine)
    expected = oracle.extend(call).out
    close(out[0], expected, 2.0**-8)
    # SGLang's gating kernel rounds beta to bfloat16: seven tokens of that move the state by far more than this bound.
    close(machine.states, call.states, 1e-6)


def test_rows_past_the_last_sequence_are_left_out_and_zero() -> None:
    start(**ALL)
    machine = Machine()
    states = machine.states.clone()
    packed, a, b = machine.tokens(9)
    machine.metadata([4, 1], [0, 5, 7])
    out = machine.backend.forward_extend(machine.layer, machine.batch("EXTEND", [5, 2]), packed, a, b)
    q, k, v = (x[:7] for x in split(packed))
    call = ExtendCall(q=q, k=k, v=v, gates=raw(machine, a[:7], b[:7]), states=states, slots=slots_of(4, 1),
                      cu_seqlens=slots_of(0, 5, 7))  # fmt: skip
    close(out[0, :7], oracle.extend(call).out)
    assert out.shape[1] == 9
    assert not out[0, 7:].any()
    close(machine.states, states)


def dispatch_extend(machine: Machine, lengths: list[int], slots: list[int], **more: Any) -> tuple[Any, ExtendCall]:
    """A dispatcher's extend with log gates, and the same call of the contract on a copy of the pool."""
    total = sum(lengths)
    q, k, v = split(torch.randn(total, CHANNELS))
    g, beta = -torch.rand(1, total, HV), torch.rand(1, total, HV)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    plain = ExtendCall(q=q, k=k, v=v, gates=LogGates(g=g[0], beta=beta[0]), states=machine.states.clone(),
                       slots=slots_of(*slots), cu_seqlens=offsets)  # fmt: skip
    got = machine.dispatcher.extend(
        q[None], k[None], v[None], g, beta, ssm_states=machine.states, cache_indices=slots_of(*slots),
        query_start_loc=offsets, **more,
    )  # fmt: skip
    return got, plain


def test_extend_outside_the_backend_uses_the_log_gates_and_fills_the_given_output() -> None:
    start(**ALL)
    machine = Machine()
    output = torch.full((1, 6, HV, V), torch.nan)
    (out, last, h), plain = dispatch_extend(machine, [6], [3], output=output, layer_id=1, extend_prefix_lens=None)
    assert out.data_ptr() == output.data_ptr()
    assert (last, h) == (None, None)
    close(output[0], oracle.extend(plain).out)


def planned(lengths: list[int], every: int) -> dict[str, Any]:
    starts = torch.tensor([0, *(n // every for n in lengths)]).cumsum(0)
    return {"state_checkpoint_cu_starts": starts, "num_state_checkpoints": int(starts[-1]),
            "state_checkpoint_every_n_tokens": every}  # fmt: skip


def checkpoints_of(plain: ExtendCall, plan: dict[str, Any]) -> Tensor:
    wanted = CheckpointPlan(every=plan["state_checkpoint_every_n_tokens"], starts=plan["state_checkpoint_cu_starts"],
                            count=plan["num_state_checkpoints"])  # fmt: skip
    fields = {name: getattr(plain, name) for name in ("q", "k", "v", "gates", "slots", "cu_seqlens")}
    result = oracle.extend(ExtendCall(**fields, states=plain.states.clone(), checkpoints=wanted)).checkpoints
    assert result is not None
    return result


LENGTHS = [130, 3, 128, 64, 200]


def test_planned_checkpoints_come_back_in_the_planned_layout() -> None:
    start(**ALL)
    machine = Machine()
    assert machine.dispatcher.extend_uses_state_checkpoints
    plan = planned(LENGTHS, 64)
    (_, _, h), plain = dispatch_extend(machine, LENGTHS, [3, 1, 2, 7, 5], **plan)
    close(h[0], checkpoints_of(plain, plan))


class ChunkKernel:
    """An extend as SGLang's Triton kernel answers: the states before every chunk of 64 tokens."""

    uses_state_checkpoints = False
    supports_packed_decode = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def extend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
               cache_indices: Tensor, query_start_loc: Tensor, **_: Any) -> tuple[Tensor, None, Tensor]:  # fmt: skip
        self.calls.append("extend")
        assert ssm_states.is_contiguous(), "SGLang's chunk kernel drops writes to a strided pool"
        before, outs = [], []
        for s, (left, right) in enumerate(zip(query_start_loc.tolist(), query_start_loc.tolist()[1:], strict=False)):
            for at in range(left, right, 64):
                before.append(ssm_states[cache_indices[s]].clone())
                rows = slice(at, min(at + 64, right))
                call = ExtendCall(q=q[0][rows], k=k[0][rows], v=v[0][rows],
                                  gates=LogGates(g=g[0][rows], beta=beta[0][rows]), states=ssm_states,
                                  slots=cache_indices[s : s + 1],
                                  cu_seqlens=slots_of(0, rows.stop - rows.start))  # fmt: skip
                outs.append(oracle.extend(call).out)
        return torch.cat(outs)[None], None, torch.stack(before)[None]

    def packed_decode(self, mixed_qkv: Tensor, *_: Any, **__: Any) -> str:
        self.calls.append("packed_decode")
        return f"packed {tuple(mixed_qkv.shape)}"

    def target_verify(self, **_: Any) -> str:
        self.calls.append("target_verify")
        return "verified"


def own(machine: Machine) -> ChunkKernel:
    """Stand ``ChunkKernel`` behind every kernel that the seam put into the dispatcher."""
    kernel = ChunkKernel()
    for name in ("decode_kernel", "extend_kernel", "verify_kernel", "tree_verify_kernel"):
        getattr(machine.dispatcher, name).original = kernel
    return kernel


def start_refusing(*reasons: str, fallback: str | None = None) -> Any:
    fake = FakeGatedDeltaRule(0.0, reasons, {Clause.CAPTURE: "a fake"})
    names = dict.fromkeys(ALL, "fake") | ({} if fallback is None else {"gdn_fallback": fallback})
    container = build(device="cpu", conv="reference", adapters=[fake_entry("fake", fake)], **names)
    return start(container, **names)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "page-major"])
def test_a_refused_extend_goes_to_sglangs_kernel_with_checkpoints_in_the_planned_layout(strided: bool) -> None:
    if strided and installed_seam().gather_switch is None:
        pytest.skip("this release gathers a page-major pool before it calls the dispatcher")
    one = start_refusing("no such head ratio")
    machine = Machine(strided=strided)
    kernel = own(machine)
    plan = planned(LENGTHS, 64)
    (out, _, h), plain = dispatch_extend(machine, LENGTHS, [3, 1, 2, 7, 5], **plan)
    close(h[0], checkpoints_of(plain, plan))
    close(out[0], oracle.extend(plain).out)
    close(machine.states, plain.states)
    assert kernel.calls == ["extend"]
    counters = one.container.counters()
    assert counters.total("fallbacks", instead_of="fake", reason="no such head ratio", phase="extend") == 1
    assert counters.total("calls", adapter="engine:ChunkKernel", phase="extend") == 1


class KernelOfPlannedCheckpoints(ChunkKernel):
    """As SGLang's FlashInfer prefill: it returns the states that were planned, none of which lies before a chunk."""

    uses_state_checkpoints = True

    def __init__(self) -> None:
        super().__init__()
        self.checkpoints = torch.empty(0)

    def extend(self, *args: Any, **kwargs: Any) -> Any:
        out, last, _ = super().extend(*args, **kwargs)
        self.checkpoints = torch.randn(1, kwargs["num_state_checkpoints"], *kwargs["ssm_states"].shape[1:])
        return out, last, self.checkpoints


def test_a_refused_extend_gets_the_checkpoints_of_a_kernel_that_keeps_the_plan_as_they_are() -> None:
    start_refusing("no such head ratio")
    machine = Machine()
    kernel = machine.dispatcher.extend_kernel.original = KernelOfPlannedCheckpoints()
    (_, _, h), _ = dispatch_extend(machine, LENGTHS, [3, 1, 2, 7, 5], **planned(LENGTHS, 64))
    assert h is kernel.checkpoints


class KernelWithoutChunkStates(ChunkKernel):
    """As SGLang's CuTe DSL prefill, which keeps no states between chunks."""

    def extend(self, *args: Any, **kwargs: Any) -> Any:
        out, last, _ = super().extend(*args, **kwargs)
        return out, last, None


def test_a_refused_extend_is_served_by_a_kernel_that_returns_no_chunk_states_too() -> None:
    start_refusing("no such head ratio")
    machine = Machine()
    machine.dispatcher.extend_kernel.original = KernelWithoutChunkStates()
    (out, _, h), plain = dispatch_extend(machine, LENGTHS, [3, 1, 2, 7, 5], **planned(LENGTHS, 64))
    assert h is None, "what SGLang itself asserts against where it needs them"
    close(out[0], oracle.extend(plain).out)
    close(machine.states, plain.states)


def test_an_extend_that_must_not_update_the_pool_is_sglangs() -> None:
    one = start(**ALL)
    machine = Machine()
    kernel = own(machine)
    dispatch_extend(machine, [5], [3], inplace_update=False)
    assert kernel.calls == ["extend"]
    assert one.container.counters().total("fallbacks", phase="extend", instead_of="reference") == 1


@pytest.mark.parametrize(
    ("argument", "reason"), [("replayssm_d", "ReplaySSM"), ("window_mask", "requires known arguments")]
)
def test_a_decode_with_arguments_that_change_its_meaning_is_sglangs(argument: str, reason: str) -> None:
    one = start(**ALL)
    machine = Machine()
    kernel = own(machine)
    packed, a, b = machine.tokens(2)
    before = machine.states.clone()
    machine.dispatcher.packed_decode(
        packed, a, b, A_log=machine.A_log, dt_bias=machine.dt_bias, scale=K**-0.5, ssm_states=machine.states,
        cache_indices=slots_of(1, 2), num_v_heads=HV, head_v_dim=V, **{argument: torch.zeros(1)},
    )  # fmt: skip
    assert kernel.calls == ["packed_decode"]
    assert torch.equal(machine.states, before)
    reasons = [dict(labels)["reason"] for (name, labels), _ in one.container.counters().snapshot().items()
               if name == "fallbacks"]  # fmt: skip
    assert len(reasons) == 1
    assert reason in reasons[0]


@pytest.mark.parametrize("captures", [False, True], ids=["eager only", "can be captured"])
def test_an_extend_inside_capture_is_ours_where_the_adapter_can_be_captured(captures: bool) -> None:
    fake = FakeGatedDeltaRule(7.0)
    fake.capabilities = dataclasses.replace(fake.capabilities, captures_extend=captures)
    names = dict.fromkeys(ALL, "fake")
    one = start(build(device="cpu", conv="reference", adapters=[fake_entry("fake", fake)], **names), **names)
    machine = Machine()
    kernel = own(machine)
    with capture():
        dispatch_extend(machine, [5], [3])
    counters = one.container.counters()
    assert (len(fake.calls), kernel.calls) == ((1, []) if captures else (0, ["extend"]))
    refused = counters.total("fallbacks", phase="extend", mode="captured", reason="extend requires eager execution")
    assert refused == (0 if captures else 1)
    dispatch_extend(machine, [5], [3])
    assert len(fake.calls) == (2 if captures else 1), "eagerly it is ours"


def test_without_a_setting_sglangs_own_kernels_serve_and_are_counted() -> None:
    one = start()
    machine = Machine(draft=2)
    assert not machine.dispatcher.extend_uses_state_checkpoints, "SGLang's Triton plan is kept with its kernel"
    kernel = own(machine)
    packed, a, b = machine.tokens(2)
    machine.metadata([3, 6], [0, 1, 2])
    out = machine.backend.forward_decode(machine.layer, machine.batch("DECODE", [1, 1]), packed, a, b)
    assert out == f"packed (2, {CHANNELS})"
    dispatch_extend(machine, [3], [1])
    assert kernel.calls == ["packed_decode", "extend"]
    counters = one.container.counters()
    assert counters.total("calls", adapter="engine:ChunkKernel") == 2
    assert counters.total("fallbacks") == 0


def test_one_phase_is_routed_and_the_others_are_sglangs() -> None:
    one = start(gdn_decode="reference")
    machine = Machine()
    kernel = own(machine)
    packed, a, b = machine.tokens(1)
    machine.metadata([3], [0, 1])
    machine.backend.forward_decode(machine.layer, machine.batch("DECODE", [1]), packed, a, b)
    dispatch_extend(machine, [3], [1])
    assert kernel.calls == ["extend"]
    assert one.container.counters().total("calls", adapter="reference", phase="decode") == 1


def test_another_familys_gdn_layers_are_left_alone() -> None:
    start(**ALL)
    machine = Machine(family="qwen3_next")
    assert type(machine.dispatcher.decode_kernel).__name__ == "TritonGDNKernel"
    assert not machine.dispatcher.extend_uses_state_checkpoints
