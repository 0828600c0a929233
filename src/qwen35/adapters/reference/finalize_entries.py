"""Entry points of the plain-torch fused finalize. Importing this imports no torch."""

from __future__ import annotations

from typing import Any

from qwen35.domain.capabilities import Support
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry, AdapterOptions


def _create(platform: Platform, _: AdapterOptions) -> Any:
    import torch

    from qwen35.adapters.reference.finalize_fusion import ReferenceFinalizeFusion

    return ReferenceFinalizeFusion(torch.float32, platform.device_type)


FINALIZE_FUSION = AdapterEntry(
    port="finalize_fusion", name="reference", summary="plain torch, float32, over torch.distributed", rank=1,
    probe=lambda _: Support.of(), create=_create,
)  # fmt: skip
