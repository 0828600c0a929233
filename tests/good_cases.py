"""A small good call of each phase of either port, as a case."""

from __future__ import annotations

from typing import Any

from qwen35.domain.capabilities import GateKind, Phase
from qwen35.testing import Case, ConvSizes, GdnSizes

SIZES: dict[str, Any] = {
    "gated_delta_rule": GdnSizes(key_heads=2, value_heads=4, key_width=16, value_width=16, gates=GateKind.RAW),
    "short_convolution": ConvSizes(channels=24, width=4, bias=True),
}
MORE: dict[Phase, dict[str, Any]] = {
    Phase.DECODE: {}, Phase.EXTEND: {"lengths": (2, 3)}, Phase.VERIFY: {"draft": 2, "nodes": 2, "capacity": 2},
    Phase.COMMIT: {"draft": 2, "nodes": 2, "capacity": 2, "last": (1, 0)},
}  # fmt: skip


def good_case(port: str, phase: Phase, seed: int) -> Case[Any]:
    own = phase is not Phase.COMMIT
    return Case(phase=phase, sizes=SIZES[port], seed=seed, pool=4, slots=(2, 0), own_out=own, **MORE[phase])
