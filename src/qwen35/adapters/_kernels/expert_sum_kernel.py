"""The kernel of ``ExpertSum``. Imported only inside factories."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qwen35.adapters._kernels.launches import programs_for

#: Columns of one program.
COLUMNS = 1024


@triton.jit(do_not_specialize=["source_rows"], do_not_specialize_on_alignment=["weights", "indices"])
def _expert_sum(
    routed, weights, indices, shared, out, source_rows, D: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    total = tl.zeros([BLOCK], tl.float32)
    if SHARED:
        total += tl.load(shared + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        index = tl.load(indices + row * TOP_K + j).to(tl.int64)
        weight = tl.load(weights + row * TOP_K + j).to(tl.float32)
        used = (index >= 0) & (index < source_rows) & (weight != 0.0)
        term = tl.load(routed + index * D + columns, mask=inside & used, other=0.0).to(tl.float32)
        total += tl.where(used, weight, 0.0) * term
    tl.store(out + row * D + columns, total.to(out.dtype.element_ty), mask=inside)


def launch_expert_sum(routed: Tensor, weights: Tensor, indices: Tensor, shared: Tensor | None, out: Tensor) -> None:
    """``out = shared + sum_j weights_j * routed[indices_j]`` [m, D], added up in float32 and rounded once.

    A choice that is dropped, of weight zero or out of range is not read. Legal inside capture once it is compiled."""
    m, hidden = out.shape
    _expert_sum[(m, programs_for(hidden, COLUMNS))](
        routed, weights, indices, routed if shared is None else shared, out, routed.shape[0], D=hidden,
        TOP_K=indices.shape[1], SHARED=shared is not None, BLOCK=COLUMNS,
    )  # fmt: skip
