"""What a call on FlashInfer's workspace is made of, whichever backend it has: recorded from a fake launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from finalize_fakes import signature

from qwen35.adapters.flashinfer.finalize_names import FusionNames
from qwen35.adapters.flashinfer.finalize_workspace import FlashInferFusionWorkspace
from qwen35.domain.errors import ClosedError, UnsupportedError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.testing.finalize_cases import FinalizeCase

SIGNATURE = signature(dtype="bfloat16", eps=1e-5, weight_bias=1.0)


class Native:
    """As much of FlashInfer's workspace as the adapter touches."""

    def __init__(self) -> None:
        self.room, self.destroyed = True, 0

    def is_buffer_size_sufficient(self, *_: Any) -> bool:
        return self.room

    def destroy(self) -> None:
        self.destroyed += 1


class Bed:
    def __init__(self, most: int | None = None) -> None:
        self.native, self.launched = Native(), []
        names = FusionNames(
            make=None, launch=lambda **given: self.launched.append(given), finalize="finalize", all_reduce="all-reduce"
        )  # type: ignore[arg-type]
        self.workspace = FlashInferFusionWorkspace(
            "ipc", SIGNATURE, self.native, names, addresses=(1,), most_elements=most
        )
        self.case = FinalizeCase(seed=5, m=3, top_k=2, hidden=16, tp_size=1, dtype="bfloat16", dropped=0.0, zeroed=0.0)
        self.handoff = self.case.handoff(0)
        weights = self.handoff.expert_weights.bfloat16()  # type: ignore[attr-defined]
        self.handoff = replace(self.handoff, expert_weights=weights)

    def finalize(self, handoff: FinalizeHandoff | None = None) -> dict[str, Any]:
        self.workspace.finalize(handoff or self.handoff, self.case.residual(), self.case.gamma())
        return self.launched[-1]  # type: ignore[no-any-return]


@pytest.mark.row("A07")
@pytest.mark.row("A13")
def test_both_patterns_run_on_one_workspace_with_the_signatures_epsilon_and_bias() -> None:
    bed = Bed()
    bed.finalize()
    bed.workspace.all_reduce(bed.case.local(0), bed.case.residual(), bed.case.gamma())
    assert [given["pattern"] for given in bed.launched] == ["finalize", "all-reduce"]
    for given in bed.launched:
        assert (given["workspace"], given["rms_eps"], given["weight_bias"]) == (bed.native, 1e-5, 1.0)


@pytest.mark.row("A27")
def test_a_choice_of_weight_zero_is_dropped_and_the_callers_indices_are_kept() -> None:
    bed = Bed()
    bed.handoff.expert_weights[1, 0] = 0.0  # type: ignore[index]
    before = bed.handoff.permuted_indices.clone()  # type: ignore[attr-defined]
    given = bed.finalize()
    want = before.clone()
    want[1, 0] = -1
    assert torch.equal(given["expanded_idx_to_permuted_idx"], want)
    assert torch.equal(bed.handoff.permuted_indices, before)  # type: ignore[arg-type]
    address = given["expanded_idx_to_permuted_idx"].data_ptr()
    assert bed.finalize()["expanded_idx_to_permuted_idx"].data_ptr() == address, "a graph may hold it"


@pytest.mark.row("A27")
def test_what_the_kernel_cannot_take_is_refused_before_a_launch() -> None:
    bed, small = Bed(), Bed(most=8)
    empty = torch.zeros(0, 16, dtype=torch.bfloat16)
    nobody = torch.full_like(bed.handoff.permuted_indices, -1)  # type: ignore[call-overload]
    wide = bed.handoff.expert_weights.float()  # type: ignore[attr-defined]
    for which, handoff, named in (
        (bed, replace(bed.handoff, routed_output=empty, permuted_indices=nobody), "at least one row, got none"),
        (bed, replace(bed.handoff, expert_weights=wide), "expert_weights require bfloat16, got float32"),
        (small, small.handoff, "at most 8 elements"),
    ):
        with pytest.raises(UnsupportedError, match=named):
            which.finalize(handoff)
    bed.native.room = False
    with pytest.raises(UnsupportedError, match="fewer tokens, got 3"):
        bed.finalize()
    assert not bed.launched
    assert not small.launched


@pytest.mark.row("A15")
def test_destroyed_once_it_takes_no_call() -> None:
    bed = Bed()
    bed.workspace.destroy()
    bed.workspace.destroy()
    assert bed.native.destroyed == 1
    assert not bed.workspace.supports(1)
    with pytest.raises(ClosedError):
        bed.finalize()
