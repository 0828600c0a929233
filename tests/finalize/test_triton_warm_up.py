"""What is compiled before the first call is all that any call needs: by Triton's own keys, with nothing compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from finalize_fakes import Twin, signature
from torch import Tensor

from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import handoff_tensors
from qwen35.testing.finalize_cases import FinalizeCase

triton = pytest.importorskip("triton")

HOPPER = triton.backends.compiler.GPUTarget("cuda", 90, 32)


class Mirror:
    """Both ranks' memory is this one's."""

    def allocate(self, size: int, device: str) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    def meet(self, own: Tensor, group: Any) -> tuple[Sequence[Tensor], Any]:
        return [own, own], own


class PretendedDriver:
    """As much of Triton's driver as is asked of one until a kernel is compiled."""

    def get_current_device(self) -> int:
        return -35

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return HOPPER


@pytest.fixture
def asked() -> Iterator[list[str]]:
    """Keys of kernels that Triton was asked for, each time; nothing is compiled or launched."""
    keys: list[str] = []

    def note(**given: Any) -> bool:
        keys.append(f"{given['fn'].name} {given['key']}")
        return True

    triton.runtime.driver.set_active(PretendedDriver())
    triton.knobs.runtime.jit_cache_hook = note
    yield keys
    triton.knobs.runtime.jit_cache_hook = None
    triton.runtime.driver.set_active(None)  # looked up again when next asked for


def workspace_of(asked: WorkspaceSignature, spin_limit: int) -> Any:
    from qwen35.adapters.triton.finalize_fusion import make_workspace
    from qwen35.adapters.triton.finalize_launch import Cut, Tuning

    cut = Cut(asked, 16, Tuning(min_slice=8, one_shot_rows={1: 20}))
    return make_workspace(cut, Twin(), spin_limit, memory=Mirror())


def call_all(workspace: Any) -> None:
    """Every m, both patterns, both dtypes of weights."""
    s = workspace.signature
    for m in range(1, s.max_m + 1):
        for weights in ("bfloat16", "float32"):
            case = FinalizeCase(
                seed=m, m=m, top_k=s.top_k, hidden=s.hidden, tp_size=2, dtype=s.dtype, weight_dtype=weights,
                shared=s.shared_expert,
            )  # fmt: skip
            workspace.finalize(case.handoff(0), case.residual(), case.gamma())
        workspace.all_reduce(case.local(0), case.residual(), case.gamma())


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_no_call_asks_for_a_kernel_that_was_not_compiled_before(asked: list[str], checked: bool, shared: bool) -> None:
    of = signature(tp_size=2, hidden=64, max_m=40, dtype="bfloat16", shared_expert=shared)
    workspace = workspace_of(of, 1000 if checked else 0)
    before = set(asked)
    called: set[str] = set()
    # In checked mode a captured call runs the kernels of an unchecked one.
    for each in (workspace, workspace_of(of, 0)) if checked else (workspace,):
        asked.clear()
        call_all(each)
        called |= set(asked)
    assert len(called) > 6 * (1 + checked), "rows that are shared, rows that are not, and two-step ones"
    assert not called - before


@pytest.mark.parametrize("shared", [False, True])
def test_no_expert_sum_of_flashinfers_ipc_asks_for_another_kernel_than_its_warm_up(
    asked: list[str], shared: bool
) -> None:
    from qwen35.adapters._kernels.expert_sum import triton_expert_sum
    from qwen35.adapters.flashinfer.finalize_scratch import ExpertShare

    of = signature(tp_size=2, hidden=64, top_k=3, max_m=40, dtype="bfloat16", shared_expert=shared)
    share = ExpertShare(of, triton_expert_sum())
    share.warm_up()
    before = set(asked)
    asked.clear()
    for m in (1, 2, 7, 16, 40):
        for dtype in ("bfloat16", "float32"):
            case = FinalizeCase(
                seed=m, m=m, top_k=of.top_k, hidden=of.hidden, tp_size=2, dtype=of.dtype, weight_dtype=dtype,
                shared=shared,
            )  # fmt: skip
            routed, weights, indices, own = handoff_tensors(case.handoff(0))
            share(routed, weights, indices, own)
            # Of a step cut in two: the second's weights and indices start anywhere.
            share(routed, weights[m // 2 :], indices[m // 2 :], None if own is None else own[m // 2 :])
    assert len(set(asked)) == len(before) == 2, "one for each dtype of weights"
    assert set(asked) == before
