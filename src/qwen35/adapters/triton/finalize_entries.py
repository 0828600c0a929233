"""Entry point of the Triton fused finalize; Triton itself is imported by ``create`` only."""

from __future__ import annotations

from typing import Any

from qwen35.adapters._kernels.sources import found_spec
from qwen35.domain.capabilities import Support
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry, AdapterOptions
from qwen35.services.finalize_facts import device_facts


def _probe(platform: Platform) -> Support:
    reasons = []
    if platform.device_type != "cuda":
        reasons.append(f"device requires cuda, got {platform.device_type}")
    if found_spec("triton") is None:
        reasons.append("triton is not installed")
    return Support.of(*reasons)


def _create(platform: Platform, options: AdapterOptions) -> Any:
    from qwen35.adapters.triton.finalize_fusion import TritonFinalizeFusion

    return TritonFinalizeFusion(device_facts(platform.device), checked=options.checked)


FINALIZE_FUSION = AdapterEntry(
    port="finalize_fusion", name="triton", summary="our own kernels over symmetric memory, without multicast", rank=30,
    probe=_probe, create=_create,
)  # fmt: skip
