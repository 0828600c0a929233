"""SGLang's Triton kernels as an adapter, as entry points find it. Importing this imports neither SGLang nor torch."""

from __future__ import annotations

from typing import Any

from qwen35.adapters.sglang.driven_kernels import report
from qwen35.domain.capabilities import Support
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry, AdapterOptions

#: The oldest GPUs with bfloat16 matrix products.
MIN_COMPUTE_CAPABILITY = (8, 0)


def probe(platform: Platform) -> Support:
    """Whether SGLang's Triton kernels run there, with everything that is missing."""
    reasons = list(report().reasons)
    if platform.device_type != "cuda":
        reasons.append(f"device requires cuda, got {platform.device_type}")
    else:
        reasons += platform.below(MIN_COMPUTE_CAPABILITY)
    return Support.of(*reasons)


def create(platform: Platform, _: AdapterOptions) -> Any:
    """Import SGLang and Triton and make the adapter."""
    from qwen35.adapters._kernels.rows import triton_rows
    from qwen35.adapters.sglang.driven_kernels import load
    from qwen35.adapters.sglang.gated_delta_rule import SGLangGatedDeltaRule

    return SGLangGatedDeltaRule(load(), triton_rows(), platform)


GATED_DELTA_RULE = AdapterEntry(
    port="gated_delta_rule", name="sglang", summary="SGLang's Triton kernels, for comparison", probe=probe,
    create=create, rank=10,
)  # fmt: skip
