"""The FlashInfer adapter over a fake that has 0.6.18's faults: the contract holds, and each detour is the one meant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fake_flashinfer import FakeFlashInfer
from flashinfer_bed import BF16, F32, HOPPER, HV, Bed, W
from qwen35.adapters.flashinfer.gated_delta_rule import FlashInferGatedDeltaRule
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import UnavailableError
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.gated_delta_rule import (
    CheckpointPlan,
    LogGates,
)
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
    thor = replace(HOPPER, compute_capability=(11, 0))
    offered = FlashInferGatedDeltaRule(fake.kernels(), TorchRows(), thor, AdapterOptions()).capabilities.phases
    assert offered == frozenset({Phase.DECODE, Phase.COMMIT})
