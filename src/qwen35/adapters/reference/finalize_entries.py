"""Entry points of the plain-torch fused finalize."""

from __future__ import annotations

import torch

from qwen35.adapters.reference.finalize_fusion import NAME, ReferenceFinalizeFusion
from qwen35.domain.capabilities import Support
from qwen35.ports.adapter import AdapterEntry

FINALIZE_FUSION = AdapterEntry(
    port="finalize_fusion", name=NAME, summary="plain torch, float32, over torch.distributed", rank=1,
    probe=lambda _: Support.of(),
    create=lambda platform, _: ReferenceFinalizeFusion(torch.float32, platform.device_type),
)  # fmt: skip
