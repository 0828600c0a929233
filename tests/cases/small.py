"""Sizes for explicit cases: K different from V and two value heads a key head where the adapter allows it."""

from __future__ import annotations

from typing import Any

from qwen35.domain.capabilities import Phase
from qwen35.testing import Bench, Case, ConvSizes, GdnSizes

TOKEN_PHASES = (Phase.DECODE, Phase.EXTEND, Phase.VERIFY)


def gdn_sizes(bench: Bench, **changes: Any) -> GdnSizes:
    """Sizes of the gated delta rule that the adapter can do."""
    limits = bench.limits
    widths = next((pair for pair in limits.widths if pair[0] != pair[1]), limits.widths[0])
    heads = next((pair for pair in limits.heads if pair[1] > pair[0]), limits.heads[0])
    sizes: dict[str, Any] = {
        "key_heads": heads[0], "value_heads": heads[1], "key_width": widths[0], "value_width": widths[1],
        "token_dtype": limits.token_dtypes[0], "state_dtype": limits.state_dtypes[0], "gates": limits.gates[0],
    }  # fmt: skip
    return GdnSizes(**(sizes | changes))


def conv_sizes(bench: Bench, **changes: Any) -> ConvSizes:
    """Sizes of the short convolution that the adapter can do."""
    limits = bench.limits
    sizes: dict[str, Any] = {
        "channels": limits.channels[0], "width": limits.conv_widths[0], "token_dtype": limits.token_dtypes[0],
        "state_dtype": limits.state_dtypes[0],
    }  # fmt: skip
    return ConvSizes(**(sizes | changes))


def sizes_of(bench: Bench, **changes: Any) -> Any:
    """Sizes of the bench's port."""
    return (gdn_sizes if bench.kit.port == "gated_delta_rule" else conv_sizes)(bench, **changes)


def case_of(bench: Bench, phase: Phase, seed: int, slots: tuple[int, ...], pool: int, **more: Any) -> Case[Any]:
    """A case of any phase: sequences of 2, 3, 4, ... tokens, drafts of 2."""
    if phase is Phase.EXTEND:
        more = {"lengths": tuple(2 + i for i in range(len(slots)))} | more
    elif phase is not Phase.DECODE:
        more = {"draft": 2, "nodes": 2, "capacity": len(slots)} | more
    sizes = more.pop("sizes", None) or sizes_of(bench)
    return Case(phase=phase, sizes=sizes, seed=seed, pool=pool, slots=slots, **more)
