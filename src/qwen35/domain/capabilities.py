"""What an adapter states of itself, and how it answers for one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from qwen35.domain.precision import Precision


class Phase(StrEnum):
    """The four calls of the contract."""

    DECODE = "decode"
    EXTEND = "extend"
    VERIFY = "verify"
    COMMIT = "commit"


class Clause(StrEnum):
    """The clauses of the contract; docs/contract.md says what each one asks."""

    PADDING = "padding"
    WRITE_SLOTS = "write slots"
    ISOLATION = "isolation"
    ORDER = "order"
    COMPOSITION = "composition"
    VERIFY = "verify"
    EMPTY = "empty"
    FRESH = "fresh"
    SIZE = "size"
    FINITE = "finite"
    CAPTURE = "capture"
    PRECISION = "precision"
    STRIDES = "strides"
    REFUSAL = "refusal"


class GateKind(StrEnum):
    """``raw``: a, b, A_log, dt_bias. ``log``: log decay and beta."""

    RAW = "raw"
    LOG = "log"


def reason_kind(reason: str) -> str:
    """``reason`` without what came, so that refusals of many values are one kind: "X requires Y" of
    "X requires Y, got Z"."""
    return reason.partition(", got ")[0]


@dataclass(frozen=True, slots=True)
class Support:
    """An answer with its reasons: one clause a reason, "X requires Y, got Z". ``ok`` has none."""

    ok: bool
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok

    @staticmethod
    def of(*reasons: str) -> Support:
        """Support that holds unless there are reasons against it."""
        return Support(not reasons, reasons)


ALL_PHASES = frozenset(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an adapter can do. A set that is None allows everything.

    ``gates`` are the kinds that some phase takes, ``raw_only`` the phases that take raw ones alone: see ``gates_of``.
    ``min_compute_capability`` is that of the oldest GPU on which the adapter is used; it says nothing of a CPU.
    ``byte_alignment`` is what the kernel needs of every data pointer (1: nothing beyond the dtype's own).
    ``deviations`` says which clauses the adapter cannot keep, and why; an adapter with a deviation is
    used only when it is named. ``precision`` gives the error bound of each phase.
    """

    phases: frozenset[Phase] = ALL_PHASES
    gates: frozenset[GateKind] = frozenset(GateKind)
    raw_only: frozenset[Phase] = frozenset()
    token_dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    state_dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    key_widths: frozenset[int] | None = None
    value_widths: frozenset[int] | None = None
    head_ratios: frozenset[int] | None = None
    conv_widths: frozenset[int] | None = None
    device_types: frozenset[str] = frozenset({"cpu", "cuda"})
    min_compute_capability: tuple[int, int] | None = None
    trees: bool = False
    checkpoints: bool = False
    checkpoint_multiple: int = 1
    captures_extend: bool = False
    byte_alignment: int = 1
    precision: Mapping[Phase, Precision] = field(default_factory=lambda: MappingProxyType({}))
    deviations: Mapping[Clause, str] = field(default_factory=lambda: MappingProxyType({}))

    def gates_of(self, phase: Phase) -> frozenset[GateKind]:
        """The kinds of gates that calls of ``phase`` may bring."""
        return self.gates - {GateKind.LOG} if phase in self.raw_only else self.gates
