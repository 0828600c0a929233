"""Entry points of FlashInfer's fused finalize; FlashInfer is imported when a workspace is made."""

from __future__ import annotations

from typing import Any

from qwen35.adapters.flashinfer.finalize_names import installed
from qwen35.domain.capabilities import Support
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry, AdapterOptions
from qwen35.services.finalize_facts import device_facts


def _probe(platform: Platform) -> Support:
    device = [] if platform.device_type == "cuda" else [f"device requires cuda, got {platform.device_type}"]
    return Support.of(*device, *installed())


def _multicast(platform: Platform, _: AdapterOptions) -> Any:
    from qwen35.adapters.flashinfer.finalize_multicast import FlashInferMulticastFusion

    return FlashInferMulticastFusion(device_facts(platform.device))


def _ipc(platform: Platform, _: AdapterOptions) -> Any:
    from qwen35.adapters.flashinfer.finalize_ipc import FlashInferIpcFusion

    return FlashInferIpcFusion(device_facts(platform.device))


FINALIZE_MULTICAST = AdapterEntry(
    port="finalize_fusion", name="flashinfer_multicast", rank=40, probe=_probe, create=_multicast,
    summary="FlashInfer's CuTe DSL finalize over NVLink multicast (Blackwell)",
)  # fmt: skip
FINALIZE_IPC = AdapterEntry(
    port="finalize_fusion", name="flashinfer_ipc", rank=20, probe=_probe, create=_ipc,
    summary="FlashInfer's one-shot all-reduce over CUDA IPC behind an expert sum of ours, without multicast",
)  # fmt: skip
