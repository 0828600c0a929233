"""What a call on FlashInfer's workspace is made of, whichever backend it has: recorded from a fake launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from finalize_fakes import FakeFusion, Meeting, signature
from finalize_services import service
from torch import Tensor

from qwen35.adapters._kernels.expert_sum import ExpertSum
from qwen35.adapters.flashinfer.finalize_names import FusionNames
from qwen35.adapters.flashinfer.finalize_scratch import ExpertShare, KeptIndices
from qwen35.adapters.flashinfer.finalize_workspace import WEIGHT_DTYPES, FlashInferFusionWorkspace
from qwen35.domain.errors import ClosedError, UnsupportedError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import FusionCapabilities
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_fusion import NormAndResidual
from qwen35.services.finalize_agreement import Agreements
from qwen35.testing.finalize_cases import FinalizeCase

SIGNATURE = signature(dtype="bfloat16", eps=1e-5, weight_bias=1.0)


class Native:
    """As much of FlashInfer's workspace as the adapter touches."""

    def __init__(self) -> None:
        self.room, self.destroyed = 32, 0

    def is_buffer_size_sufficient(self, _: int, tokens: int, *__: Any) -> bool:
        return tokens <= self.room

    def destroy(self) -> None:
        self.destroyed += 1


def capabilities_with(most: int | None) -> FusionCapabilities:
    """Those of FlashInfer's fused kernels, with a bound on what may be routed."""
    return FusionCapabilities(
        dtypes=frozenset({"bfloat16"}), roundings=16.0, weight_dtypes=WEIGHT_DTYPES, fewest_routed_rows=1,
        most_routed_elements=most,
    )  # fmt: skip


class Bed:
    def __init__(
        self, most: int | None = None, of: WorkspaceSignature = SIGNATURE, expert_sum: ExpertSum | None = None
    ) -> None:
        self.native, self.launched = Native(), []
        names = FusionNames(
            make=None, launch=lambda **given: self.launched.append(given), finalize="finalize", all_reduce="all-reduce"
        )  # type: ignore[arg-type]
        scratch = KeptIndices(of) if expert_sum is None else ExpertShare(of, expert_sum)
        self.workspace = FlashInferFusionWorkspace(
            "ipc", of, self.native, names, addresses=(1,), capabilities=capabilities_with(most), scratch=scratch
        )
        self.case = FinalizeCase(seed=5, m=3, top_k=2, hidden=16, tp_size=1, dtype="bfloat16", dropped=0.0, zeroed=0.0)
        self.handoff = self.case.handoff(0)
        weights = self.handoff.expert_weights.bfloat16()  # type: ignore[attr-defined]
        self.handoff = replace(self.handoff, expert_weights=weights)

    def finalize(self, handoff: FinalizeHandoff | None = None) -> dict[str, Any]:
        self.workspace.finalize(handoff or self.handoff, self.case.residual(), self.case.gamma())
        return self.launched[-1]  # type: ignore[no-any-return]

    def all_reduce(self) -> None:
        self.workspace.all_reduce(self.case.local(0), self.case.residual(), self.case.gamma())


@pytest.mark.row("A07")
@pytest.mark.row("A13")
def test_both_patterns_run_on_one_workspace_with_the_signatures_epsilon_and_bias() -> None:
    bed = Bed()
    bed.finalize()
    bed.all_reduce()
    assert [given["pattern"] for given in bed.launched] == ["finalize", "all-reduce"]
    for given in bed.launched:
        assert (given["workspace"], given["rms_eps"], given["weight_bias"]) == (bed.native, 1e-5, 1.0)


@pytest.mark.row("A07")
@pytest.mark.row("A13")
@pytest.mark.parametrize("shared", [True, False])
def test_every_argument_of_a_launch_is_the_callers_own(shared: bool) -> None:
    """By identity: nothing is swapped, copied or left out, but for the indices, which are copied to be written."""
    bed = Bed(of=replace(SIGNATURE, shared_expert=shared))
    handoff = bed.handoff if shared else replace(bed.handoff, gated_shared_output=None)
    residual, gamma, local = bed.case.residual(), bed.case.gamma(), bed.case.local(0)
    out = NormAndResidual(norm=torch.empty_like(residual), residual=torch.empty_like(residual))
    assert bed.workspace.finalize(handoff, residual, gamma, out) is out
    assert bed.workspace.all_reduce(local, residual, gamma, out) is out
    finalize, all_reduce = bed.launched
    common = {
        "workspace": bed.native, "residual_in": residual, "residual_out": out.residual, "norm_out": out.norm,
        "rms_gamma": gamma,
    }  # fmt: skip
    plain = {"rms_eps": 1e-5, "weight_bias": 1.0, "launch_with_pdl": False}
    indices = finalize.pop("expanded_idx_to_permuted_idx")
    assert torch.equal(indices, handoff.permuted_indices)  # type: ignore[arg-type]
    own = common | {
        "input": handoff.routed_output, "expert_scale_factor": handoff.expert_weights,
        "shared_expert_output": handoff.gated_shared_output,
    }  # fmt: skip
    for given, pattern, objects in ((finalize, "finalize", own), (all_reduce, "all-reduce", common | {"input": local})):
        assert given.keys() == {*objects, *plain, "pattern"}
        assert {name: given[name] for name in (*plain, "pattern")} == plain | {"pattern": pattern}
        assert [name for name, value in objects.items() if given[name] is not value] == []


@pytest.mark.parametrize("shared", [True, False])
def test_with_an_expert_sum_a_finalize_is_that_and_the_all_reduce(shared: bool) -> None:
    summed: list[tuple[Tensor | None, ...]] = []

    def expert_sum(routed: Tensor, weights: Tensor, indices: Tensor, own: Tensor | None, out: Tensor) -> None:
        summed.append((routed, weights, indices, own, out))

    bed = Bed(of=replace(SIGNATURE, shared_expert=shared), expert_sum=expert_sum)
    handoff = bed.handoff if shared else replace(bed.handoff, gated_shared_output=None)
    residual, gamma = bed.case.residual(), bed.case.gamma()
    out = NormAndResidual(norm=torch.empty_like(residual), residual=torch.empty_like(residual))
    assert bed.workspace.finalize(handoff, residual, gamma, out) is out
    (*given, share), (launched,) = summed[0], bed.launched
    wanted = handoff.routed_output, handoff.expert_weights, handoff.permuted_indices, handoff.gated_shared_output
    assert all(x is y for x, y in zip(given, wanted, strict=True))
    assert isinstance(share, Tensor)
    assert (share.shape, share.dtype) == (residual.shape, residual.dtype)
    assert launched == {
        "pattern": "all-reduce", "input": launched["input"], "workspace": bed.native, "residual_in": residual,
        "residual_out": out.residual, "norm_out": out.norm, "rms_gamma": gamma, "rms_eps": 1e-5, "weight_bias": 1.0,
        "launch_with_pdl": False,
    }  # fmt: skip
    assert launched["input"].data_ptr() == share.data_ptr()
    bed.workspace.finalize(handoff, residual, gamma, out)
    again = summed[1][-1]
    assert isinstance(again, Tensor)
    assert again.data_ptr() == share.data_ptr(), "a graph may hold it"


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
        (bed, replace(bed.handoff, routed_output=empty, permuted_indices=nobody), "require at least 1, got 0"),
        (bed, replace(bed.handoff, expert_weights=wide), "expert_weights require bfloat16, got float32"),
        (small, small.handoff, "at most 8 elements"),
    ):
        with pytest.raises(UnsupportedError, match=named):
            which.finalize(handoff)
    bed.native.room = 2
    with pytest.raises(UnsupportedError, match="fewer tokens, got 3"):
        bed.finalize()
    with pytest.raises(UnsupportedError, match=r"ipc all-reduce: .*fewer tokens, got 3"):
        bed.all_reduce()
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


class BedFusion(FakeFusion):
    """The bed's workspace, offered as the adapter that made it."""

    def __init__(self, most: int | None) -> None:
        super().__init__("ipc")
        self.capabilities, self.bed = capabilities_with(most), Bed(most)

    def prepare(self, asked: WorkspaceSignature) -> Any:
        self.bed = Bed(self.capabilities.most_routed_elements, asked)
        return self.bed.workspace


def wide_weights(bed: Bed) -> None:
    bed.handoff = replace(bed.handoff, expert_weights=bed.handoff.expert_weights.float())  # type: ignore[attr-defined]


def nothing_routed(bed: Bed) -> None:
    nobody = torch.full_like(bed.handoff.permuted_indices, -1)  # type: ignore[call-overload]
    empty = torch.zeros(0, 16, dtype=torch.bfloat16)
    bed.handoff = replace(bed.handoff, routed_output=empty, permuted_indices=nobody)


def far_more_routed(bed: Bed) -> None:
    routed = torch.zeros(100, 16, dtype=torch.bfloat16)
    bed.handoff = replace(bed.handoff, routed_output=routed)


def no_room(bed: Bed) -> None:
    bed.native.room = 2


@pytest.mark.row("A24")
@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (wide_weights, "expert_weights require bfloat16, got float32"),
        (nothing_routed, "rows of routed_output require at least 1, got 0"),
        (far_more_routed, "routed_output requires at most 1000 elements, got 1600"),
        (no_room, "FlashInfer's buffers require fewer tokens, got 3"),
    ],
)  # fmt: skip
def test_in_checked_mode_what_one_rank_cannot_take_is_refused_by_all_alike(fault: Any, said: str, on: int) -> None:
    meeting, fusions = Meeting(2), [BedFusion(1000) for _ in range(2)]

    def call(rank: int) -> None:
        each = service(fusions[rank], checked=True, agreements=Agreements(lambda _: meeting.side(rank)))
        each.prepare(replace(SIGNATURE, tp_size=2, rank=rank))
        bed = fusions[rank].bed
        if rank == on:
            fault(bed)
        each.finalize(bed.handoff, bed.case.residual(), bed.case.gamma())

    out = meeting.run(call)
    assert all(isinstance(e, UnsupportedError) for e in out), out
    assert {str(e) for e in out} == {f"ipc finalize: rank {on}: {said}"}
    assert not any(fusion.bed.launched for fusion in fusions)
