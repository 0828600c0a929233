"""A case: the plain values from which one call of a port is made. Hypothesis draws and shrinks cases, never tensors."""

from __future__ import annotations

import random
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Generic, TypeVar

import torch

from qwen35.domain.capabilities import GateKind, Phase
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.conv_calls import Activation


class Strides(StrEnum):
    """Which strides differ from those of a dense tensor and from one another's. ``ROWS``: of rows or tokens, in each
    token tensor, the output and a convolution's weight; ``ALL``: of rows, tokens, heads, nodes and parents."""

    DENSE = "dense"
    ROWS = "rows"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnSizes:
    """Heads, widths, dtypes and options of the gated delta rule in one case."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    token_dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    gates: GateKind = GateKind.RAW
    scale: float | None = None

    @property
    def geometry(self) -> GdnGeometry:
        """The same heads and widths as a geometry."""
        return GdnGeometry(
            key_heads=self.key_heads, value_heads=self.value_heads,
            key_width=self.key_width, value_width=self.value_width,
        )  # fmt: skip

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """[HV, V, K]."""
        return (self.value_heads, self.value_width, self.key_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSizes:
    """Channels, width, dtypes and options of the short convolution in one case."""

    channels: int
    width: int = 4
    token_dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    bias: bool = False
    activation: Activation = "silu"

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """[C, W - 1]."""
        return (self.channels, self.width - 1)


S = TypeVar("S", GdnSizes, ConvSizes)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Case(Generic[S]):
    """One call as plain values; every tensor follows from ``seed``.

    ``pool`` slots; one entry of ``slots`` a row or sequence. Extend: ``lengths``, ``fresh``, ``every``
    (checkpoints). Verify and commit: ``draft`` tokens a row, ``nodes`` T' of the intermediates, ``capacity``
    their R, ``rows``, ``parents``; commit: ``last``. ``packed``: tokens are views of one projection; ``strides``:
    what has strides of its own that nothing else in the call has, see ``Strides``;
    ``shift``: read-only tensors start that many elements into their buffer; ``paged``: the slot stride exceeds
    the slot; ``long``: int64 slots; ``own_out``: the caller gives ``out``; ``prepared``: ``prepare`` runs first.
    """

    phase: Phase
    sizes: S
    seed: int
    pool: int
    slots: tuple[int, ...]
    write_slots: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = ()
    host_lengths: bool = False
    fresh: tuple[bool, ...] | None = None
    every: int | None = None
    draft: int = 0
    nodes: int = 0
    capacity: int = 0
    rows: tuple[int, ...] | None = None
    parents: tuple[tuple[int, ...], ...] | None = None
    last: tuple[int, ...] = ()
    packed: bool = False
    strides: Strides = Strides.DENSE
    shift: int = 0
    paged: bool = False
    long: bool = False
    own_out: bool = False
    prepared: bool = False

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)
            if f.default is MISSING or getattr(self, f.name) != f.default
        ]  # fmt: skip
        return f"Case({', '.join(shown)})"

    @property
    def leading(self) -> tuple[int, ...]:
        """Leading sizes of the token tensors: [B], [T] or [B, T]."""
        if self.phase is Phase.EXTEND:
            return (sum(self.lengths),)
        if self.phase is Phase.DECODE:
            return (len(self.slots),)
        return (len(self.slots), self.draft)

    @property
    def offsets(self) -> tuple[int, ...]:
        """cu_seqlens of ``lengths``."""
        total, out = 0, [0]
        for length in self.lengths:
            total += length
            out.append(total)
        return tuple(out)

    @property
    def written(self) -> frozenset[int]:
        """Slots that the call may write."""
        if self.phase is Phase.VERIFY:
            return frozenset()
        targets = self.slots if self.write_slots is None else self.write_slots
        out = set()
        for i, (read, write) in enumerate(zip(self.slots, targets, strict=True)):
            idle = (self.phase is Phase.EXTEND and not self.lengths[i]) or (
                self.phase is Phase.COMMIT and self.last[i] < 0
            )
            if read >= 0 and write >= 0 and not idle:
                out.add(write)
        return frozenset(out)

    def choices(self) -> random.Random:
        """A source of a law's further choices, fixed by the seed."""
        return random.Random(self.seed)
