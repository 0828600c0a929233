"""How an adapter is found: the value behind one entry point of the group ``qwen35.adapters``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from qwen35.domain.capabilities import Phase, Support
from qwen35.domain.platform import Platform

#: Entry points are named "<port>.<adapter>", for example "gated_delta_rule.triton".
ENTRY_POINT_GROUP = "qwen35.adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """Settings that concern single adapters. ``prefill_split``: the sequence-split prefill kernel, where there
    is one. ``checked``: adapters that wait for other ranks wait with a time-out."""

    prefill_split: Literal["auto", "on", "off"] = "auto"
    checked: bool = False


@runtime_checkable
class HoldsScratch(Protocol):
    """What an adapter may offer besides its port: how much scratch it holds, for gauges."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes held now."""

    @property
    def scratch_bound(self) -> int:
        """Bytes that are never exceeded under the current plan."""


@runtime_checkable
class SaysBranches(Protocol):
    """What an adapter may offer besides its port: which of several ways calls went, for the record of decisions."""

    @property
    def branches(self) -> Mapping[Phase, str]:
        """The branch that the latest call of each phase took, in words; a phase that has one way only may lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    """One adapter of one port.

    ``probe(platform)`` says whether the adapter can be used there and why not; it never raises and imports
    nothing that changes the process. ``create(platform, options)`` imports the kernel package and makes the
    adapter; it is called only where the probe allowed it. ``rank`` orders the automatic choice among usable adapters
    without deviations: the highest wins; 0 and less are used only when named.
    """

    port: str
    name: str
    summary: str
    probe: Callable[[Platform], Support]
    create: Callable[[Platform, AdapterOptions], Any]
    rank: int = 0
