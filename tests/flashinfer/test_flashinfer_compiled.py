"""A decode whose layout was served is launched without FlashInfer's functions, where that is seen to do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_flashinfer_known import known, laid_out, want

from fake_compiled import FakeCompiled, Kernel
from fake_flashinfer import FakeFlashInfer
from flashinfer_bed import BF16, F32, HOPPER, Bed
from qwen35.adapters.flashinfer.gated_delta_rule import FlashInferGatedDeltaRule
from qwen35.ports.adapter import AdapterOptions

#: Rows of a plan for which the kernel of many rows is looked at too.
MANY = 256


def bed_over(
    state: torch.dtype, most: int = MANY, **changes: Any
) -> tuple[Bed, FakeCompiled]:
    """A bed whose FlashInfer keeps kernels, prepared."""
    bed = Bed(state, null=0, prepared=False)
    bed.plan = replace(bed.plan, max_batch=most)
    fake = FakeCompiled(FakeFlashInfer(), **changes)
    bed.fake = fake.fake
    bed.adapter = FlashInferGatedDeltaRule(fake.kernels(), bed.rows, HOPPER, AdapterOptions())
    bed.adapter.prepare(bed.plan)
    bed.fake.calls.clear()
    fake.launched.clear()
    return bed, fake


def called(bed: Bed) -> int:
    return sum(name == "decode" for name, _ in bed.fake.calls)


@pytest.mark.parametrize("state", [F32, BF16], ids=str)
@pytest.mark.parametrize("slots", [[3], [4, -1, 2], [1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["in place", "write slots"])
def test_the_second_call_of_a_layout_launches_what_the_first_compiled(
    state: torch.dtype, slots: list[int], split: bool
) -> None:
    bed, fake = bed_over(state)
    changes: dict[str, Any] = {}
    if split:
        changes["write_slots"] = torch.tensor([5 if slot >= 0 else -1 for slot in slots[:1]] + slots[1:]).int()
    call = known(bed, slots, **changes)
    out, states = want(bed, call)
    fake.launched.clear()
    got = bed.adapter.decode(call)
    assert torch.equal(got, out), f"seed {bed.seed}"
    assert torch.equal(call.states, states), f"seed {bed.seed}"
    assert called(bed) == 0
    assert len(fake.launched) == 1


def test_a_kernel_that_prepare_has_not_seen_is_not_launched() -> None:
    bed, fake = bed_over(BF16, most=4)
    call = known(bed, [1, 2, 3, 4])
    fake.launched.clear()
    bed.adapter.decode(call)
    assert called(bed) == 1
    assert not fake.launched


def swapped(kernel: Kernel) -> Kernel:
    """Takes q for k."""

    def other(*arguments: Any) -> None:
        shuffled = list(arguments)
        at = 4 if shuffled[1].dim() == 1 else 5  # behind the pool, A_log, a and dt_bias, and the unread corner
        shuffled[at], shuffled[at + 1] = shuffled[at + 1], shuffled[at]
        kernel(*shuffled)

    return other


def refusing(kernel: Kernel) -> Kernel:
    def other(*arguments: Any) -> None:
        raise TypeError("expected 16 arguments")

    return other


@pytest.mark.parametrize("state", [F32, BF16], ids=str)
@pytest.mark.parametrize("altered", [swapped, refusing])
def test_a_kernel_that_does_something_else_is_never_launched(
    state: torch.dtype, altered: Callable[[Kernel], Kernel]
) -> None:
    bed, fake = bed_over(state, altered=altered)
    call = known(bed, [4, -1, 2])
    out, states = want(bed, call)
    fake.launched.clear()
    assert torch.equal(bed.adapter.decode(call), out), f"seed {bed.seed}"
    assert torch.equal(call.states, states), f"seed {bed.seed}"
    assert called(bed) == 1
    assert not fake.launched


@pytest.mark.parametrize(
    ("state", "hidden"),
    [(F32, "_get_compiled_decode_kernel"), (F32, "cuda"), (BF16, "_compiled_kernels_mtp"), (BF16, "_USE_PACKED_FMA")],
    ids=str,
)
def test_a_release_that_keeps_kernels_elsewhere_is_served_by_its_function(state: torch.dtype, hidden: str) -> None:
    bed, fake = bed_over(state, hidden=hidden)
    call = known(bed, [3, 2])
    out, _ = want(bed, call)
    assert torch.equal(bed.adapter.decode(call), out), f"seed {bed.seed}"
    assert called(bed) == 1
    assert not fake.launched


def test_layouts_have_kernels_of_their_own() -> None:
    bed, fake = bed_over(F32)
    known(bed, [3, 2])
    other = laid_out(bed.decode([3, 2], scale=0.5))
    out, _ = want(bed, other)
    bed.fake.calls.clear()
    assert torch.equal(bed.adapter.decode(other), out), f"seed {bed.seed}"
    assert called(bed) == 1, "another scale was compiled anew"
    fake.launched.clear()
    again = laid_out(bed.decode([1, 4], scale=0.5))
    out, _ = want(bed, again)
    assert torch.equal(bed.adapter.decode(again), out), f"seed {bed.seed}"
    assert len(fake.launched) == 1
