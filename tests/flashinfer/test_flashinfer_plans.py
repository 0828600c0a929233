"""Two plans for one geometry: whose null slot serves, and which second plan is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashinfer_bed import BF16, F32, HOPPER, Bed
from qwen35.adapters.flashinfer.gated_delta_rule import FlashInferGatedDeltaRule
from qwen35.domain.errors import ConfigurationError
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.gated_delta_rule import DecodeCall


@pytest.mark.parametrize("state", [F32, BF16])
def test_a_later_plan_takes_nothing_from_an_earlier_one(state: torch.dtype) -> None:
    """As where a second model without padded rows is made beside an engine: rows of the first still pad."""
    bed = Bed(state, null=0)
    bed.adapter.prepare(replace(bed.plan, max_batch=1, max_draft=0, may_pad=False, null_slot=None))
    call = bed.decode([2, -1, 5])
    before = call.states.clone()
    assert not bed.adapter.decode(call)[1].any()
    changed = {i for i in range(6) if not torch.equal(call.states[i], before[i])}
    assert {2, 5} <= changed <= {0, 2, 5}, f"seed {bed.seed}"


#: Whether rows may pad, and the null slot.
_Pads = tuple[bool, int | None]


def planned(bed: Bed, plan: _Pads) -> None:
    may_pad, null_slot = plan
    bed.adapter.prepare(replace(bed.plan, may_pad=may_pad, null_slot=null_slot))


#: Both name a slot, and neither the same: write slot -1 of either would be written into a live slot of the other.
_TWO_NAMED: list[tuple[_Pads, _Pads]] = [
    ((True, 0), (True, 5)), ((True, 0), (False, 5)), ((False, 0), (True, 5)), ((False, 0), (False, 5)),
]  # fmt: skip
#: One names none and has rows that may pad.
_ONE_NAMED: list[tuple[_Pads, _Pads]] = [
    ((True, 0), (True, None)), ((True, None), (True, 5)), ((False, 0), (True, None)), ((True, None), (False, 5)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "first", "second"),
    [(F32, *pair) for pair in _TWO_NAMED] + [(BF16, *pair) for pair in _TWO_NAMED + _ONE_NAMED],
)
def test_a_second_plan_that_would_pad_into_a_live_slot_is_refused_and_changes_nothing(
    state: torch.dtype, first: _Pads, second: _Pads
) -> None:
    bed = Bed(state, prepared=False)
    planned(bed, first)
    with pytest.raises(ConfigurationError, match=f"names {first[1]}.*, got {second[1]}"):
        planned(bed, second)
    call = bed.decode([3, 2], **({} if first[1] is None else {"write_slots": torch.tensor([-1, 2], dtype=torch.int32)}))
    if not bed.adapter.supports(call):
        assert first == (True, None), "a bfloat16 pool whose rows may pad"
        return
    before = call.states.clone()
    bed.adapter.decode(call)
    changed = {i for i in range(6) if not torch.equal(call.states[i], before[i])}
    assert changed <= {2, 3, first[1]}, f"seed {bed.seed}"


@pytest.mark.parametrize("again", [False, True], ids=["twice", "three times"])
@pytest.mark.parametrize(("first", "second"), _ONE_NAMED)
def test_over_float32_whose_kernel_skips_padded_rows_a_plan_without_a_null_slot_stands_beside_one_that_names_it(
    first: _Pads, second: _Pads, again: bool
) -> None:
    bed = Bed(F32, prepared=False)
    for plan in (first, second, *([first] if again else [])):
        planned(bed, plan)
    call = bed.decode([3, -1, 2])
    before = call.states.clone()
    assert not bed.adapter.decode(call)[1].any()
    changed = {i for i in range(6) if not torch.equal(call.states[i], before[i])}
    assert changed == {2, 3}, f"seed {bed.seed}"
    # A write slot -1 of the user who names no slot would be written into a live one: refused, and nothing written.
    writes = torch.tensor([3, -1], dtype=torch.int32)
    assert "write slots require a null slot in every plan" in _refusal(bed, bed.decode([3, 2], write_slots=writes))


def test_a_decode_with_write_slots_that_was_settled_before_is_refused_after_a_plan_without_a_null_slot() -> None:
    bed = Bed(F32, null=0)
    call = bed.decode([3, 2], write_slots=torch.tensor([3, -1], dtype=torch.int32))
    bed.adapter.decode(call)
    planned(bed, (True, None))
    assert "write slots require" in _refusal(bed, call)


def _refusal(bed: Bed, call: DecodeCall) -> str:
    bed.fake.calls.clear()
    return bed.refusal(call)


@pytest.mark.parametrize(("first", "second"), _ONE_NAMED)
def test_a_release_whose_float32_kernel_borrows_slot_0_for_padding_is_refused_a_second_null_slot(
    first: _Pads, second: _Pads
) -> None:
    bed = Bed(F32, prepared=False)

    def borrow(*, initial_state_indices: torch.Tensor, **others: Any) -> None:
        bed.fake.decode(initial_state_indices=initial_state_indices.clamp(min=0), **others)

    bed.adapter = FlashInferGatedDeltaRule(
        bed.fake.kernels(decode=borrow), bed.rows, HOPPER, AdapterOptions(prefill_split="auto")
    )
    planned(bed, first)
    with pytest.raises(ConfigurationError, match=f"names {first[1]}.*, got {second[1]}"):
        planned(bed, second)


def test_the_first_user_s_padding_keeps_its_null_slot_when_another_names_a_live_one() -> None:
    bed = Bed(BF16, null=0)
    with pytest.raises(ConfigurationError, match="null slot requires"):
        bed.adapter.prepare(replace(bed.plan, null_slot=5))
    call = bed.decode([3, -1])
    before = call.states.clone()
    bed.adapter.decode(call)
    assert all(torch.equal(call.states[i], before[i]) for i in (1, 2, 4, 5)), f"seed {bed.seed}"


@pytest.mark.parametrize(
    ("first", "second", "null_slot"),
    [
        ((True, 4), (False, None), 4), ((False, 4), (False, None), 4), ((False, None), (True, 4), 4),
        ((False, None), (False, 4), 4), ((True, 4), (False, 4), 4),
    ],
)  # fmt: skip
def test_of_two_plans_that_agree_the_named_null_slot_serves_rows_that_pad(
    first: _Pads, second: _Pads, null_slot: int
) -> None:
    bed = Bed(BF16, prepared=False)
    for plan in (first, second):
        planned(bed, plan)
    pads = first[0] or second[0]
    call = bed.decode([3, -1]) if pads else bed.decode([3, 2], write_slots=torch.tensor([3, -1], dtype=torch.int32))
    before = call.states.clone()
    bed.adapter.decode(call)
    changed = {i for i in range(6) if not torch.equal(call.states[i], before[i])}
    assert 3 in changed <= {3, null_slot}, f"seed {bed.seed}"


def test_what_a_call_needed_before_any_plan_says_nothing_of_null_slots() -> None:
    bed = Bed(BF16, prepared=False)
    bed.adapter.verify(bed.verify([2, 3]))
    bed.adapter.prepare(replace(bed.plan, null_slot=4))
    call = bed.decode([3, -1])
    before = call.states.clone()
    assert not bed.adapter.decode(call)[1].any()
    assert all(torch.equal(call.states[i], before[i]) for i in (0, 1, 2, 5)), f"seed {bed.seed}"
