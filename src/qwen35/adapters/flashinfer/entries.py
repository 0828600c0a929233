"""FlashInfer's adapter, as entry points find it. Importing this imports neither FlashInfer nor torch."""

from __future__ import annotations

from typing import Any

from qwen35.adapters.flashinfer.release import PACKAGES, REMEDY, report
from qwen35.domain.capabilities import Support
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry, AdapterOptions

#: FlashInfer's GDN kernels are written for Hopper and later.
MIN_COMPUTE_CAPABILITY = (9, 0)


def probe(platform: Platform) -> Support:
    """Whether FlashInfer's GDN kernels run there, with everything that is missing and how to have it."""
    installed = report()
    reasons = list(installed.reasons)
    if not PACKAGES.keys().isdisjoint(installed.missing):
        reasons[-1] += f": {REMEDY}"  # once, behind the last one that it mends
    if platform.device_type != "cuda":
        reasons.append(f"device requires cuda, got {platform.device_type}")
    else:
        reasons += platform.below(MIN_COMPUTE_CAPABILITY)
    return Support.of(*reasons)


def create(platform: Platform, options: AdapterOptions) -> Any:
    """Import FlashInfer and Triton and make the adapter."""
    from qwen35.adapters._kernels.rows import triton_rows
    from qwen35.adapters.flashinfer.gated_delta_rule import FlashInferGatedDeltaRule
    from qwen35.adapters.flashinfer.release import load

    return FlashInferGatedDeltaRule(load(), triton_rows(), platform, options)


GATED_DELTA_RULE = AdapterEntry(
    port="gated_delta_rule", name="flashinfer", summary="FlashInfer's CuTe kernels: pool decode, split prefill, chains",
    probe=probe, create=create, rank=40,
)  # fmt: skip
