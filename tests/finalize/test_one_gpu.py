"""The fused finalize on one GPU: a group of one rank, and the registry inside a real capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from finalize_tasks import fusion_named

from qwen35.domain.errors import CaptureError
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.services.finalize_agreement import Alone
from qwen35.services.finalize_registry import WorkspaceRegistry
from qwen35.testing.finalize_laws import CAPTURE_LAWS, LAST_LAW, LAWS, FinalizeKit

pytestmark = pytest.mark.gpu


def signature(**changes: Any) -> WorkspaceSignature:
    values: dict[str, Any] = {"hidden": 2048, "top_k": 8, "max_m": 200, "device": "cuda:0"} | changes
    return WorkspaceSignature(group=None, tp_size=1, rank=0, **values)


@pytest.fixture(scope="module", params=["triton", "triton two-step"])
def kit(request: pytest.FixtureRequest) -> FinalizeKit:
    fusion = fusion_named(request.param, "cuda:0")
    return FinalizeKit(fusion.prepare(signature()), fusion.capabilities, Alone())


@pytest.mark.parametrize("law", [*sorted(LAWS), *sorted(CAPTURE_LAWS)])
def test_laws_hold_for_one_rank(kit: FinalizeKit, law: str) -> None:
    (LAWS | CAPTURE_LAWS)[law](kit, 31)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_widths_that_are_no_power_of_two_hold_too(dtype: str) -> None:
    fusion = fusion_named("triton", "cuda:0")
    kit = FinalizeKit(
        fusion.prepare(signature(hidden=1000, top_k=3, max_m=40, dtype=dtype)), fusion.capabilities, Alone()
    )
    LAWS["equals_the_oracle"](kit, 8)
    LAST_LAW(kit, 9)


@pytest.mark.row("A19")
@pytest.mark.case("C41")
def test_inside_a_real_capture_nothing_is_made_and_what_is_there_is_found() -> None:
    registry, fusion, made = WorkspaceRegistry(), fusion_named("triton", "cuda:0"), []

    def create(asked: WorkspaceSignature) -> Any:
        made.append(fusion.prepare(asked))
        return made[-1]

    asked = signature(max_m=4)
    scratch = torch.zeros(1, device="cuda:0")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        scratch.add_(1)
        with pytest.raises(CaptureError):
            registry.obtain(asked, Alone(), create)
    assert made == []
    live = registry.obtain(asked, Alone(), create)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        scratch.add_(1)
        assert registry.obtain(asked, Alone(), create) is live
    assert len(made) == 1
    registry.release()
