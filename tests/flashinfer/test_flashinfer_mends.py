"""The FlashInfer adapter over a fake that has 0.6.18's faults: the contract holds, and each detour is the one meant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fake_flashinfer import FakeFlashInfer
from flashinfer_bed import BF16, F32, HOPPER, HV, Bed, W
from qwen35.adapters.flashinfer.entries import MIN_COMPUTE_CAPABILITY
from qwen35.adapters.flashinfer.gated_delta_rule import FlashInferGatedDeltaRule
from qwen35.domain.capabilities import GateKind, Phase
from qwen35.domain.errors import UnavailableError
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.gated_delta_rule import (
    CheckpointPlan,
    LogGates,
)
from qwen35.services.assembly import guarded
from qwen35.services.counters import Counters
from torch_rows import TorchRows


def test_a_float32_decode_costs_no_launch_beyond_the_kernel() -> None:
    bed = Bed(F32)
    bed.adapter.decode(bed.decode([2, -1, 5]))
    assert bed.rows.launches == []
    assert bed.fake.latest("decode")["output_state_indices"] is None


def test_a_bfloat16_decode_that_may_pad_costs_an_index_launch_and_a_zero_launch() -> None:
    bed = Bed(BF16, null=0)
    bed.adapter.decode(bed.decode([2, -1, 5]))
    assert bed.rows.launches == ["index", "zero_rows"]


def test_a_release_that_skips_padding_by_itself_needs_no_null_slot() -> None:
    bed = Bed(F32, later=True)
    assert {b.finite_softplus for b in bed.adapter.behaviours.values()} == {True}
    bed.adapter.decode(bed.decode([2, -1]))
    assert bed.rows.launches == []


@pytest.mark.parametrize("change", ["nothing", "null slot", "write slots", "long slots", "misaligned slots", "gates"])
def test_minus_one_reaches_a_kernel_that_borrows_the_null_slot_for_it(change: str) -> None:
    """Only where that is the null slot, and nothing else asks for an index launch."""
    bed = Bed(BF16, null=3 if change == "null slot" else 0, later=change != "gates")
    call = bed.decode([2, -1, 5])
    if change == "write slots":  # the padded row has a live one
        call = replace(call, write_slots=torch.tensor([4, 1, 5], dtype=torch.int32))
    if change == "long slots":
        call = replace(call, slots=call.slots.long())
    if change == "misaligned slots":
        call = replace(call, slots=torch.tensor([9, 2, -1, 5], dtype=torch.int32)[1:])
    before = call.states.clone()
    out = bed.adapter.decode(call)
    assert not out[1].any()
    live = {4, 5} if change == "write slots" else {2, 5}
    changed = {i for i in range(6) if not torch.equal(call.states[i], before[i])}
    assert live <= changed <= live | {bed.plan.null_slot}, f"seed {bed.seed}"
    assert bed.rows.launches == (["zero_rows"] if change == "nothing" else ["index", "zero_rows"])


@pytest.mark.parametrize("state", [F32, BF16])
def test_a_plan_whose_rows_never_pad_costs_no_launch_where_the_gates_need_none(state: torch.dtype) -> None:
    bed = Bed(state, null=0, pad=False, later=True)
    bed.adapter.decode(bed.decode([2, 4]))
    assert bed.rows.launches == []


@pytest.mark.parametrize("fewest", [2, 3], ids=["any rows", "many rows only"])
@pytest.mark.parametrize("slot", [-1, 2], ids=["before the pool", "another slot"])
def test_a_kernel_that_writes_another_slot_for_padding_is_found_out(slot: int, fewest: int) -> None:
    """Though the plan's null slot is the one that other releases borrow, -1 does not reach this kernel."""
    bed = Bed(BF16, null=0, later=True, prepared=False)

    def stray(**arguments: Any) -> None:
        bed.fake.decode(**arguments)
        pool, read = arguments["initial_state"], arguments["initial_state_indices"]
        if len(read) >= fewest and bool((read < 0).any()):
            start = pool.storage_offset() + slot * pool.stride(0)
            pool.as_strided(pool.shape[1:], pool.stride()[1:], max(start, 0)).fill_(7.0)

    adapter = FlashInferGatedDeltaRule(bed.fake.kernels(decode=stray), bed.rows, HOPPER, AdapterOptions())
    adapter.prepare(replace(bed.plan, max_batch=512))
    bed.rows.launches.clear()
    call = bed.decode([4, -1, 5])
    before = call.states.clone()
    adapter.decode(call)
    assert bed.rows.launches == ["index", "zero_rows"]
    assert all(torch.equal(call.states[i], before[i]) for i in (1, 2, 3)), f"seed {bed.seed}"


@pytest.mark.parametrize("state", [F32, BF16])
@pytest.mark.parametrize("writes", [False, True])
def test_a_bfloat16_pool_is_served_by_its_own_function_where_there_is_one(state: torch.dtype, writes: bool) -> None:
    bed = Bed(state, null=0)
    kernels = bed.fake.kernels(decode_bf16=bed.fake.decode_bf16)
    adapter = FlashInferGatedDeltaRule(kernels, bed.rows, HOPPER, AdapterOptions())
    adapter.prepare(bed.plan)
    bed.fake.calls.clear()
    changes = {"write_slots": torch.tensor([1, 5, 3], dtype=torch.int32)} if writes else {}
    call = bed.decode([2, -1, 5], scale=0.25, **changes)
    states = call.states.clone()
    out = bed.adapter.decode(replace(call, states=states))
    assert not any(name == "decode_bf16" for name, _ in bed.fake.calls)
    assert torch.equal(adapter.decode(call), out), f"seed {bed.seed}"
    assert torch.equal(call.states, states), f"seed {bed.seed}"
    assert any(name == "decode_bf16" for name, _ in bed.fake.calls) == (state == BF16)


# Padding and write slots


@pytest.mark.case("C3")
def test_the_fake_has_the_fault_that_the_null_slot_mends() -> None:
    bed = Bed(BF16, pad=False)
    call = bed.decode([-1, 1])
    before = call.states.clone()
    bed.adapter.decode(call)
    assert not torch.equal(before[0], call.states[0]), "a plan that never pads leaves slot 0 to the kernel"


@pytest.mark.case("C1")
@pytest.mark.case("C3")
@pytest.mark.parametrize("null", [0, 3, 5])
def test_a_bfloat16_pool_keeps_every_slot_but_the_null_slot(null: int) -> None:
    bed = Bed(BF16, null=null)
    call = bed.decode([2, -1, 4])
    before = call.states.clone()
    out = bed.adapter.decode(call)
    assert bool((out[1] == 0).all())
    for slot in {0, 1, 3, 5} - {null}:
        assert torch.equal(before[slot], call.states[slot]), f"slot {slot} changed, seed {bed.seed}"
    assert not torch.equal(before[2], call.states[2])


def test_a_bfloat16_pool_without_a_null_slot_is_refused_where_rows_may_pad() -> None:
    bed = Bed(BF16)
    assert "null slot" in bed.refusal(bed.decode([2, 3]))
    assert "null slot" in bed.adapter.supports(bed.decode([1, 2])).reasons[0]


def test_a_null_slot_outside_the_pool_is_refused() -> None:
    bed = Bed(BF16, null=6)
    assert "a slot of the pool of 6, got 6" in bed.refusal(bed.decode([2, 3]))


@pytest.mark.parametrize("state", [F32, BF16])
def test_write_slots_need_the_null_slot(state: torch.dtype) -> None:
    writes = torch.tensor([-1, 4], dtype=torch.int32)
    bed = Bed(state, pad=False)
    assert "write slots require a null slot" in bed.refusal(bed.decode([2, 3], write_slots=writes))
    bed = Bed(state, null=5)
    call = bed.decode([2, 3], write_slots=writes)
    before = call.states.clone()
    bed.adapter.decode(call)
    unchanged = [s for s in range(5) if torch.equal(before[s], call.states[s])]
    assert unchanged == [0, 1, 2, 3], f"only slot 4 is written, seed {bed.seed}"


@pytest.mark.case("C6")
@pytest.mark.case("C12")
@pytest.mark.row("D06")
def test_long_and_misaligned_slots_pass_through_index_scratch_at_one_address() -> None:
    bed = Bed(F32)
    base = torch.tensor([9, 1, 0], dtype=torch.int32)
    want = bed.decode([1, 0])
    expected = want.states.clone()
    out = bed.adapter.decode(replace(want, states=expected))
    addresses = set()
    for slots in (want.slots.long(), base[1:].int()):
        states = want.states.clone()
        assert torch.equal(bed.adapter.decode(replace(want, states=states, slots=slots)), out)
        assert torch.equal(states, expected)
        seen = bed.fake.latest("decode")["initial_state_indices"]
        assert seen.dtype == torch.int32
        assert seen.data_ptr() % 32 == 0
        addresses.add(seen.data_ptr())
    assert len(addresses) == 1


@pytest.mark.case("C14")
@pytest.mark.row("D08")
def test_a_converted_parameter_is_refreshed_in_place() -> None:
    bed = Bed(F32)
    call = bed.decode([1])
    bed.adapter.decode(call)
    first = bed.fake.latest("decode")["dt_bias"]
    assert first.dtype == F32, "the float32 decode is compiled for the first dtype it meets"
    call.gates.dt_bias.data.copy_(torch.full((HV,), 2.0))
    assert bed.adapter.refresh_parameters() == 1
    bed.adapter.decode(call)
    second = bed.fake.latest("decode")["dt_bias"]
    assert second.data_ptr() == first.data_ptr()
    assert second.tolist() == [2.0, 2.0]


@pytest.mark.case("C11")
@pytest.mark.case("C14")
@pytest.mark.row("D08")
def test_behind_the_guard_a_copy_that_the_adapter_converts_again_is_refreshed_in_place_too() -> None:
    """A bfloat16 dt_bias off alignment is copied by the guard, and that copy is converted by the adapter."""
    bed = Bed(F32)
    rule = guarded("flashinfer", bed.adapter, Counters())
    base = torch.zeros(HV + 1, dtype=BF16)
    call = bed.decode([1])
    call = replace(call, gates=replace(call.gates, dt_bias=base[1:]))
    assert base[1:].data_ptr() % 32
    rule.decode(call)
    first = bed.fake.latest("decode")["dt_bias"]
    base.data.copy_(torch.full((HV + 1,), 2.0))
    assert rule.refresh_parameters() == 2
    rule.decode(call)
    second = bed.fake.latest("decode")["dt_bias"]
    assert second.tolist() == [2.0, 2.0]
    assert second.data_ptr() == first.data_ptr()


@pytest.mark.row("D07")
def test_parameter_copies_are_never_shared_and_stay_while_views_come_and_go() -> None:
    bed = Bed(F32)
    one = bed.decode([1])
    other = replace(one, gates=replace(one.gates, dt_bias=one.gates.dt_bias.clone()))
    seen = []
    for call in (one, other, replace(one, gates=replace(one.gates, dt_bias=one.gates.dt_bias[:]))):
        bed.adapter.decode(call)
        seen.append(bed.fake.latest("decode")["dt_bias"].data_ptr())
    assert seen[0] != seen[1], "equal parameters of two layers"
    assert seen[0] == seen[2], "a new view of the same parameter"
    assert bed.adapter.refresh_parameters() == 2


@pytest.mark.case("C11")
def test_misaligned_parameters_are_copied() -> None:
    bed = Bed(F32)
    call = bed.decode([1])
    base = torch.zeros(HV + 1)
    bed.adapter.decode(replace(call, gates=replace(call.gates, A_log=base[1:])))
    assert bed.fake.latest("decode")["A_log"].data_ptr() % 32 == 0


def test_parameters_that_want_gradients_reach_the_kernel_without() -> None:
    bed = Bed(F32)
    call = bed.decode([1])
    learned = replace(
        call.gates, A_log=torch.nn.Parameter(call.gates.A_log), dt_bias=torch.nn.Parameter(call.gates.dt_bias)
    )
    bed.adapter.decode(replace(call, gates=learned))
    seen = bed.fake.latest("decode")
    assert not seen["A_log"].requires_grad
    assert not seen["dt_bias"].requires_grad
    assert seen["A_log"].data_ptr() == learned.A_log.data_ptr(), "a float32 parameter is not copied"


@pytest.mark.case("C28")
def test_what_cannot_be_honoured_is_refused_with_its_reason() -> None:
    bed = Bed(F32, null=0)
    log = LogGates(g=torch.zeros(1, HV), beta=torch.ones(1, HV))
    assert "raw, got log" in bed.refusal(replace(bed.decode([1]), gates=log))
    single = bed.decode([1])
    assert "gates.a requires bfloat16" in bed.refusal(
        replace(single, gates=replace(single.gates, a=single.gates.a.float()))
    )
    parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    assert "a tree" in bed.refusal(replace(bed.verify([1]), parents=parents))
    assert "one row's one token" in bed.refusal(bed.verify([1], draft=1))
    assert bed.adapter.supports(bed.verify([1, 2], draft=1)), "two rows compile"
    assert "scale" in bed.refusal(replace(bed.extend([4], [1]), scale=0.0))
    starts = torch.tensor([0, 0], dtype=torch.int64)
    assert "a multiple of 64" in bed.refusal(
        replace(bed.extend([4], [1]), checkpoints=CheckpointPlan(every=32, starts=starts, count=0))
    )
    padded = torch.zeros(6, HV * W * W + 2)[:, : HV * W * W].unflatten(1, (HV, W, W))
    assert "slot stride" in bed.refusal(bed.decode([1], states=padded))


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.EXTEND, Phase.VERIFY])
@pytest.mark.parametrize("kind", list(GateKind))
def test_gates_are_taken_as_stated_for_each_phase(phase: Phase, kind: GateKind) -> None:
    bed = Bed(F32)
    made = {Phase.DECODE: lambda: bed.decode([1, 2]), Phase.EXTEND: lambda: bed.extend([3], [1]),
            Phase.VERIFY: lambda: bed.verify([1, 2])}[phase]()  # fmt: skip
    lead = made.q.shape[:-2]
    log = LogGates(g=torch.zeros(*lead, HV), beta=torch.ones(*lead, HV))
    stated = kind in bed.adapter.capabilities.gates_of(phase)
    assert stated == (kind is GateKind.RAW or phase is Phase.EXTEND)
    support = bed.adapter.supports(replace(made, gates=log) if kind is GateKind.LOG else made)
    assert support.ok == stated
    assert stated or support.reasons == (f"{phase} gates require raw, got log",)


@pytest.mark.case("C10")
@pytest.mark.case("C15")
@pytest.mark.row("D19")
def test_misaligned_tensors_are_refused_by_name() -> None:
    bed = Bed(F32)
    call = bed.decode([1])
    ba = bed.randn(1, 2 * HV)
    reason = bed.refusal(replace(call, gates=replace(call.gates, a=ba[:, HV:])))
    assert reason.startswith("gates.a requires 32-byte alignment, got an address")
    base = torch.zeros(6 * HV * W * W + 1)
    assert "states requires 32-byte" in bed.refusal(bed.decode([1], states=base[1:].view(6, HV, W, W)))


@pytest.mark.row("D27")
def test_missing_kernels_are_refused_when_the_adapter_is_made() -> None:
    fake = FakeFlashInfer()
    for name in ("decode", "mtp", "prefill"):
        with pytest.raises(UnavailableError, match=f"missing the {name} kernel"):
            FlashInferGatedDeltaRule(fake.kernels(**{name: None}), TorchRows(), HOPPER, AdapterOptions())
    only_float32 = FlashInferGatedDeltaRule(fake.kernels(mtp_bf16=None), TorchRows(), HOPPER, AdapterOptions())
    assert only_float32.capabilities.state_dtypes == frozenset({"float32"})
    assert only_float32.capabilities.min_compute_capability == MIN_COMPUTE_CAPABILITY
    thor = replace(HOPPER, compute_capability=(11, 0))
    offered = FlashInferGatedDeltaRule(fake.kernels(), TorchRows(), thor, AdapterOptions()).capabilities.phases
    assert offered == frozenset({Phase.DECODE, Phase.COMMIT})


@pytest.mark.row("D27")
@pytest.mark.parametrize(("cuda", "offered"), [("12.8", False), ("13.0", True)])
def test_on_compute_capability_10_prefill_is_offered_from_cuda_13_on(
    cuda: str, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    blackwell = replace(HOPPER, compute_capability=(10, 0))
    for platform, wanted in ((blackwell, offered), (HOPPER, True)):
        made = FlashInferGatedDeltaRule(FakeFlashInfer().kernels(), TorchRows(), platform, AdapterOptions())
        assert (Phase.EXTEND in made.capabilities.phases) == wanted
