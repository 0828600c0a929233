"""A rank's own share of the finalize by the kernel that FlashInfer's IPC adapter puts before its all-reduce."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else [pytest.mark.interpreter]

ON = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=12, deadline=None)
@given(
    m=st.integers(1, 5), top_k=st.integers(1, 4), hidden=st.sampled_from([8, 24, 1032]), shared=st.booleans(),
    weight_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.integers(1, 9),
)  # fmt: skip
def test_the_share_is_the_float64_sum_and_unreferenced_rows_are_not_read(
    m: int, top_k: int, hidden: int, shared: bool, weight_dtype: torch.dtype, dtype: torch.dtype, rows: int
) -> None:
    from qwen35.adapters._kernels.expert_sum import triton_expert_sum

    seed = random.randrange(2**31)
    source = torch.Generator(ON).manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, device=ON)

    routed, weights = randn(rows, hidden).to(dtype), randn(m, top_k).to(weight_dtype)
    indices = torch.randint(-1, rows, (m, top_k), generator=source, device=ON, dtype=torch.int32)
    weights[randn(m, top_k) > 1.0] = 0.0
    live = (indices >= 0) & (weights != 0)
    read = torch.zeros(rows, dtype=torch.bool, device=ON)
    read[indices[live].long()] = True
    routed[~read] = float("nan")
    own = randn(m, hidden).to(dtype) if shared else None
    out = torch.full((m, hidden), float("nan"), dtype=dtype, device=ON)
    triton_expert_sum()(routed, weights, indices, own, out)
    want = torch.zeros(m, hidden, dtype=torch.float64, device=ON) if own is None else own.double()
    for i in range(m):
        for j in range(top_k):
            if bool(live[i, j]):
                want[i] += weights[i, j].double() * routed[int(indices[i, j])].double()
    # Triton's interpreter cuts off what a GPU rounds: a unit of the dtype, not half of one; sums of float32 beside it.
    eps = torch.finfo(dtype).eps
    terms = want.abs().max() + 1.0
    assert bool(((out.double() - want).abs() <= eps * want.abs() + 1e-6 * terms).all()), f"seed {seed}"
