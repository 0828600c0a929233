"""Entry points of the plain-torch adapters."""

from __future__ import annotations

import torch

from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.adapters.reference.short_convolution import ReferenceShortConvolution
from qwen35.domain.capabilities import Support
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry

F32, F64 = "plain torch, float32", "plain torch, float64: the oracle"


def _anywhere(_: Platform) -> Support:
    return Support.of()


GATED_DELTA_RULE = AdapterEntry(
    port="gated_delta_rule", name="reference", summary=F32, rank=1, probe=_anywhere,
    create=lambda platform, _: ReferenceGatedDeltaRule(torch.float32, platform.device_type),
)  # fmt: skip
GATED_DELTA_RULE_64 = AdapterEntry(
    port="gated_delta_rule", name="reference64", summary=F64, probe=_anywhere,
    create=lambda platform, _: ReferenceGatedDeltaRule(torch.float64, platform.device_type),
)  # fmt: skip
SHORT_CONVOLUTION = AdapterEntry(
    port="short_convolution", name="reference", summary=F32, rank=1, probe=_anywhere,
    create=lambda platform, _: ReferenceShortConvolution(torch.float32, platform.device_type),
)  # fmt: skip
SHORT_CONVOLUTION_64 = AdapterEntry(
    port="short_convolution", name="reference64", summary=F64, probe=_anywhere,
    create=lambda platform, _: ReferenceShortConvolution(torch.float64, platform.device_type),
)  # fmt: skip
