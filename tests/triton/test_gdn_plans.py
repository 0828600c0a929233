"""What the Triton gated delta rule refuses to plan, without a GPU: nothing of such a plan is kept."""

from __future__ import annotations

import pytest
import torch

from qwen35.adapters.triton.gated_delta_rule import TritonGatedDeltaRule
from qwen35.domain.errors import UnsupportedError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import GdnPlan


def plan(key_width: int, value_width: int, token_dtype: torch.dtype = torch.bfloat16) -> GdnPlan:
    return GdnPlan(
        geometry=GdnGeometry(key_heads=1, value_heads=2, key_width=key_width, value_width=value_width),
        state_dtype=torch.float32, device=torch.device("cuda"), max_batch=2, max_tokens=100, token_dtype=token_dtype,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("widths", "reason"),
    [
        ((24, 32), "extend of bfloat16 tokens requires a key width that is a multiple of 16, got 24"),
        ((32, 40), "extend of bfloat16 tokens requires a value width that is a multiple of 16, got 40"),
        ((512, 32), "key width requires at most 256, got 512"),
    ],
)
def test_a_plan_that_cannot_be_served_is_refused_before_anything_of_it_is_kept(
    widths: tuple[int, int], reason: str
) -> None:
    adapter = TritonGatedDeltaRule()
    with pytest.raises(UnsupportedError) as refused:
        adapter.prepare(plan(*widths))
    assert refused.value.reasons == (reason,)
    assert adapter.scratch_bytes == adapter.scratch_bound == 0
