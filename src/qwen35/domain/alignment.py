"""What to do about a tensor whose address a kernel cannot take: three kinds of tensor, three rules.

- A read-only input is copied into scratch whose address is stable.
- A parameter has an aligned copy, brought up to date by ``refresh_parameters()``.
- A mutable tensor is never copied: the call goes to the configured fallback with the original tensors.

An output that the caller provided is written in scratch and copied over, since nothing reads it before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from qwen35.domain.array import Array
from qwen35.domain.capabilities import Phase


class Role(StrEnum):
    """How a call uses a tensor."""

    INPUT = "input"
    PARAMETER = "parameter"
    MUTABLE = "mutable"
    OUTPUT = "output"


class Remedy(StrEnum):
    """What is done about a tensor: nothing, scratch for this call, a lasting copy, or refusal."""

    NONE = "none"
    SCRATCH = "scratch"
    COPY = "copy"
    REFUSE = "refuse"


_REMEDIES = {
    Role.INPUT: Remedy.SCRATCH,
    Role.OUTPUT: Remedy.SCRATCH,
    Role.PARAMETER: Remedy.COPY,
    Role.MUTABLE: Remedy.REFUSE,
}


def misalignment(array: Array, itemsize: int, alignment: int) -> int:
    """Bytes by which the start, or else some row, of ``array`` misses a multiple of ``alignment``; 0: none.

    A row starts at a multiple of each stride; the last dimension is taken as dense, so its stride does not count.
    An empty array has no address to miss.
    """
    shape = tuple(array.shape)
    if 0 in shape:
        return 0
    off = array.data_ptr() % alignment
    for size, stride in zip(shape[:-1], array.stride()[:-1], strict=True):
        if off:
            break
        if size > 1:
            off = (stride * itemsize) % alignment
    return off


def remedy(role: Role, off: int) -> Remedy:
    """What to do about a tensor of this role that is ``off`` bytes off."""
    return _REMEDIES[role] if off else Remedy.NONE


def padded(nbytes: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that holds ``nbytes``."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class CapturedBranch:
    """Which adapter a captured call of ``phase`` went to, why, and the addresses on which that hangs."""

    phase: Phase
    adapter: str
    reasons: tuple[str, ...]
    addresses: tuple[tuple[str, int], ...]


def replay_reasons(branches: Iterable[CapturedBranch], phase: Phase, addresses: Mapping[str, int]) -> tuple[str, ...]:
    """Why a replay of ``phase`` on tensors at ``addresses`` would not run what was captured; empty: it would."""
    captured = [dict(b.addresses) for b in branches if b.phase is phase]
    if not captured:
        return (f"no {phase} was captured",)
    if any(all(known.get(name) == at for name, at in addresses.items()) for known in captured):
        return ()
    now = ", ".join(f"{name} at {at:#x}" for name, at in addresses.items())
    return (f"no {phase} was captured with {now}: tensors moved since; capture again",)
