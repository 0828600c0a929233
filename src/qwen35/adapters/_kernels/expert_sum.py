"""A rank's own share of the finalize, in one launch: the experts' weighted sum and the shared expert's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

#: routed [R, D], weights [m, top_k], indices [m, top_k] int32, shared [m, D] or None, and where the share goes [m, D].
ExpertSum: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], None]


def triton_expert_sum() -> ExpertSum:
    """The sum as a Triton kernel; imports Triton."""
    from qwen35.adapters._kernels.expert_sum_kernel import launch_expert_sum

    return launch_expert_sum
