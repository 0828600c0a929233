"""Extends that look alike are laid out once: the pieces of scratch stay as cut until a plan or memory moves."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from elsewhere import elsewhere
from flashinfer_bed import BF16, F32, Bed
from qwen35.adapters._kernels.launches import programs_for
from qwen35.domain.alignment import power_of_two

PIECES = ("q", "k", "g", "beta", "cu_seqlens", "initial_state", "output_state")


def pieces(bed: Bed, *lengths: int) -> dict[str, torch.Tensor]:
    """Of an extend of these sequences, on a device as far as the adapter can tell."""
    bed.adapter.extend(elsewhere(bed.extend(list(lengths), list(range(1, 1 + len(lengths))))))
    call = bed.fake.latest("prefill")
    return {name: call[name] for name in (*PIECES, "v")}


def test_the_next_layer_takes_the_pieces_of_the_one_before() -> None:
    bed = Bed(F32)
    first, again = pieces(bed, 5, 2), pieces(bed, 5, 2)
    assert all(first[name] is again[name] for name in (*PIECES, "v"))
    other = pieces(bed, 4, 2)
    assert all(other[name] is not first[name] for name in PIECES)
    assert [other[name].data_ptr() for name in PIECES] == [first[name].data_ptr() for name in PIECES]


def test_a_wider_plan_is_laid_out_anew() -> None:
    """Rows that never padded may pad from now on: NaN tokens of a padded sequence must not reach the next one."""
    bed = Bed(F32, pad=False)
    call = elsewhere(bed.extend([3, 4], [2, 1]))
    bed.adapter.extend(call)
    assert bed.fake.latest("prefill")["v"] is call.v
    bed.adapter.prepare(replace(bed.plan, may_pad=True))
    padded = replace(call, slots=torch.tensor([-1, 1], dtype=torch.int32).as_subclass(type(call.slots)))
    for tokens in (padded.q, padded.k, padded.v):
        tokens[:3] = float("nan")
    out = bed.adapter.extend(padded).out
    assert bed.fake.latest("prefill")["v"] is not call.v
    assert not out[:3].any(), bed.seed
    assert out[3:].isfinite().all(), bed.seed
    assert padded.states[1].isfinite().all(), bed.seed


@pytest.mark.parametrize("state", [F32, BF16])
def test_pieces_that_were_cut_in_inference_mode_are_filled_outside(state: torch.dtype) -> None:
    bed = Bed(state)
    call = elsewhere(bed.extend([5, 2], [1, 2]))
    before = call.states.clone()
    with torch.inference_mode():
        wanted = bed.adapter.extend(call).out.clone()
    call.states.copy_(before)
    assert torch.equal(bed.adapter.extend(call).out, wanted), bed.seed


def test_a_closed_adapter_holds_no_piece() -> None:
    bed = Bed(F32)
    piece = weakref.ref(pieces(bed, 5, 2)["q"])
    bed.fake.calls.clear()
    assert piece() is not None
    bed.adapter.close()
    gc.collect()
    assert piece() is None


def test_more_than_the_plan_and_then_less_stay_apart() -> None:
    """A prompt beyond the plan has larger pieces, which lie elsewhere."""
    bed = Bed(F32)
    for lengths in ((5, 2), (400, 30), (5, 2)):
        ranges = sorted(span(x) for x in pieces(bed, *lengths).values())
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges)), lengths


def span(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


@pytest.mark.parametrize(("count", "block", "programs"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_programs_hold_what_there_is(count: int, block: int, programs: int) -> None:
    assert programs_for(count, block) == programs


@pytest.mark.parametrize(("size", "found"), [(0, 1), (1, 1), (2, 2), (3, 4), (128, 128), (129, 256)])
def test_powers_of_two_hold_what_there_is(size: int, found: int) -> None:
    assert power_of_two(size) == found
