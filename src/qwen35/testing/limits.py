"""How large the cases are: what the adapter can do, cut to what the machine does in reasonable time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch

from qwen35.domain.capabilities import Capabilities, GateKind

#: Where float16 cannot hold the values that the laws draw, and float64 would hide what they look for.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Profile(StrEnum):
    """``cpu``: small, many examples. ``interpreter``: Triton on the CPU, where a program costs
    milliseconds. ``gpu``: the widths and head layouts of public models."""

    CPU = "cpu"
    INTERPRETER = "interpreter"
    GPU = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What strategies may draw. The first entry of each tuple is the simplest: shrinking ends there.

    ``heads`` pairs (H, HV), ``widths`` pairs (K, V); ``long_lengths`` are sequence lengths around the chunk
    sizes of kernels; at most ``max_steps`` decodes follow one another; ``null_slot`` is a slot that is nobody's, for
    kernels that need one where rows may pad.
    """

    profile: Profile
    heads: tuple[tuple[int, int], ...]
    widths: tuple[tuple[int, int], ...]
    token_dtypes: tuple[torch.dtype, ...]
    state_dtypes: tuple[torch.dtype, ...]
    gates: tuple[GateKind, ...]
    channels: tuple[int, ...]
    conv_widths: tuple[int, ...]
    long_lengths: tuple[int, ...]
    max_rows: int
    max_sequences: int
    max_tokens: int
    max_draft: int
    max_steps: int
    trees: bool
    checkpoints: bool
    checkpoint_multiple: int
    examples: int
    null_slot: int | None = None

    @property
    def first_slot(self) -> int:
        """The lowest slot that cases name; slot 0 stays free where it is the null slot."""
        return 0 if self.null_slot is None else self.null_slot + 1


_HEADS = {
    Profile.CPU: ((1, 1), (1, 2), (2, 2), (2, 4), (1, 4), (2, 6)),
    Profile.INTERPRETER: ((1, 1), (1, 2), (2, 4)),
    Profile.GPU: ((4, 4), (2, 8), (16, 32), (16, 64)),
}
_WIDTHS = {
    Profile.CPU: ((8, 16), (16, 8), (12, 20), (32, 16)),
    Profile.INTERPRETER: ((16, 32), (32, 16), (16, 16), (32, 32)),
    Profile.GPU: ((128, 128), (64, 128)),
}
_CHANNELS = {
    Profile.CPU: (8, 24, 40), Profile.INTERPRETER: (8, 24, 40), Profile.GPU: (1536, 8192, 6144),
}  # fmt: skip
_LONG = {
    Profile.CPU: (63, 64, 65, 31, 33, 100), Profile.INTERPRETER: (17, 65, 64), Profile.GPU: (63, 64, 65, 129, 31, 200),
}  # fmt: skip
_EXAMPLES = {Profile.CPU: 25, Profile.INTERPRETER: 5, Profile.GPU: 10}


def limits_for(can: Capabilities, profile: Profile, *, null_slot: int | None = None) -> Limits:
    """The limits of ``profile`` within the capabilities ``can``."""
    small = profile is Profile.INTERPRETER
    return Limits(
        profile=profile,
        heads=_heads(can, profile),
        widths=_pairs(_WIDTHS[profile], can.key_widths, can.value_widths),
        token_dtypes=_dtypes(can.token_dtypes),
        state_dtypes=_dtypes(can.state_dtypes),
        gates=tuple(g for g in (GateKind.RAW, GateKind.LOG) if g in can.gates),
        channels=_CHANNELS[profile],
        conv_widths=_within((4, 2, 3, 5), can.conv_widths),
        long_lengths=_LONG[profile],
        max_rows=3 if small else 5, max_sequences=2 if small else 3,
        max_tokens=80 if small else 260, max_draft=3 if small else 4, max_steps=6 if small else 100,
        trees=can.trees, checkpoints=can.checkpoints, checkpoint_multiple=can.checkpoint_multiple,
        examples=_EXAMPLES[profile], null_slot=null_slot,
    )  # fmt: skip


def _dtypes(names: Iterable[str]) -> tuple[torch.dtype, ...]:
    known = frozenset(names)
    return tuple(dtype for name, dtype in _DTYPES.items() if name in known)


def _within(candidates: tuple[int, ...], allowed: frozenset[int] | None) -> tuple[int, ...]:
    if allowed is None:
        return candidates
    return tuple(c for c in candidates if c in allowed) or tuple(sorted(allowed))


def _heads(can: Capabilities, profile: Profile) -> tuple[tuple[int, int], ...]:
    if can.head_ratios is None:
        return _HEADS[profile]
    fitting = tuple(pair for pair in _HEADS[profile] if pair[1] // pair[0] in can.head_ratios)
    return fitting or tuple((1, ratio) for ratio in sorted(can.head_ratios))


def _pairs(
    candidates: tuple[tuple[int, int], ...], keys: frozenset[int] | None, values: frozenset[int] | None
) -> tuple[tuple[int, int], ...]:
    fitting = tuple((k, v) for k, v in candidates if (keys is None or k in keys) and (values is None or v in values))
    if fitting:
        return fitting
    some_keys = tuple(sorted(keys)) if keys else tuple(k for k, _ in candidates)
    some_values = tuple(sorted(values)) if values else tuple(v for _, v in candidates)
    return tuple((k, v) for k in some_keys for v in some_values)
