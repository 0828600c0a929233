"""Services over fake adapters, and small calls for them."""

from __future__ import annotations

from typing import Any

from finalize_fakes import FakeFusion

from qwen35.domain.finalize_capabilities import DeviceFacts
from qwen35.domain.platform import Platform
from qwen35.services.counters import Counters
from qwen35.services.finalize_fusion import FinalizeService
from qwen35.services.finalize_registry import WorkspaceRegistry
from qwen35.services.registry import AdapterRegistry
from qwen35.testing.finalize_cases import FinalizeCase

CPU = Platform(device="cpu", device_name="CPU")
FACTS = DeviceFacts(device="cpu", host="here")


def adapters(*fakes: FakeFusion) -> AdapterRegistry:
    return AdapterRegistry(CPU, extra=[f.entry(rank=100 - i) for i, f in enumerate(fakes)])


def service(*fakes: FakeFusion, requested: str = "auto", **options: Any) -> FinalizeService:
    return FinalizeService(
        adapters(*fakes), requested, options.pop("workspaces", None) or WorkspaceRegistry(), Counters(),
        facts=lambda _: FACTS, **options,
    )  # fmt: skip


def case(m: int = 3, **changes: Any) -> FinalizeCase:
    return FinalizeCase(**({"seed": 5, "m": m, "top_k": 2, "hidden": 16, "tp_size": 1, "dtype": "float32"} | changes))
