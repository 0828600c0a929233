"""What to do about a tensor whose address a kernel cannot take: three kinds of tensor, three rules.

- A read-only input is copied into scratch whose address is stable.
- A parameter has an aligned copy, brought up to date by ``refresh_parameters()``.
- A mutable tensor is never copied: the call goes to the configured fallback with the original tensors.

An output that the caller provided is written in scratch and copied over, since nothing reads it before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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

    A row starts at a multiple of each stride; the last dimension is taken as dense, so its stride does not count, nor
    does that of rows that follow one another without a gap: a copy would lie alike. An empty array has no address to
    miss.
    """
    shape = tuple(array.shape)
    if 0 in shape:
        return 0
    off, dense = array.data_ptr() % alignment, 1
    if off:
        return off
    rows = list(zip(shape, array.stride(), strict=True))
    for dimension in range(len(rows) - 1, 0, -1):
        dense *= rows[dimension][0]
        size, stride = rows[dimension - 1]
        if size > 1 and stride != dense:
            off = (stride * itemsize) % alignment or off
    return off


def remedy(role: Role, off: int) -> Remedy:
    """What to do about a tensor of this role that is ``off`` bytes off."""
    return _REMEDIES[role] if off else Remedy.NONE


def padded(nbytes: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that holds ``nbytes``."""
    return -(-nbytes // alignment) * alignment


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor lies and how it is laid out. ``storage()`` is the object that owns its memory, None once that was
    freed: another tensor may lie at the address then."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    storage: Callable[[], object | None] = field(compare=False)

    def changes(self, now: Placement) -> tuple[str, ...]:
        """In what a tensor placed ``now`` is not the one that lay here; empty: it is the very same memory."""
        if self.address != now.address:
            return (f"was at {self.address:#x}, is at {now.address:#x}",)
        was, told = self.storage(), []
        for name, before, after in (
            ("shape", self.shape, now.shape), ("strides", self.strides, now.strides), ("dtype", self.dtype, now.dtype),
        ):  # fmt: skip
            if before != after:
                told.append(f"{name} was {before}, is {after}")
        if was is None:
            told.append("the captured memory was freed, and this is other memory at its address")
        elif was is not now.storage():
            told.append("the captured memory belongs to another storage")
        return tuple(told)


@dataclass(frozen=True, slots=True)
class CapturedBranch:
    """Which adapter a captured call of ``phase`` went to, why, the tensors on whose place that hangs, and the
    ``branch`` that it took there, where the adapter says so."""

    phase: Phase
    adapter: str
    reasons: tuple[str, ...]
    tensors: tuple[tuple[str, Placement], ...]
    branch: str | None = None

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """The address of each of these tensors."""
        return tuple((name, placed.address) for name, placed in self.tensors)


def replay_reasons(
    branches: Iterable[CapturedBranch], phase: Phase, tensors: Mapping[str, Placement]
) -> tuple[str, ...]:
    """Why a replay of ``phase`` on ``tensors`` would not run what was captured; empty: it would.

    Where nothing was captured with them, the reasons say what became of the tensors of the capture nearest to them.
    """
    captured = [dict(b.tensors) for b in branches if b.phase is phase]
    if not captured:
        return (f"no {phase} was captured",)
    now = ", ".join(f"{name} at {placed.address:#x}" for name, placed in tensors.items())
    nearest: tuple[str, ...] = ()
    for known in captured:
        if not all(name in known and known[name].address == placed.address for name, placed in tensors.items()):
            continue
        nearest = tuple(f"{name}: {text}" for name, t in tensors.items() for text in known[name].changes(t))
        if not nearest:
            return ()
    if nearest:
        return tuple(f"no {phase} was captured with {now}: {text}; capture again" for text in nearest)
    return (f"no {phase} was captured with {now}: tensors moved since; capture again",)
