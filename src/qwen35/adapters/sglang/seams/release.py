"""What the rest of the seam needs to know of one release of SGLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qwen35.adapters.sglang.seam import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a scheduler process stands: its GPU and its ranks. ``data_rank`` counts replicas of the whole engine, or
    under attention data parallelism the groups of its tensor-parallel ranks (None: there is one of them)."""

    gpu: int
    tensor_rank: int
    pipeline_rank: int = 0
    data_rank: int | None = None

    @property
    def counts(self) -> bool:
        """Whether this process counts for its replica: a replica's ranks serve the same calls."""
        return self.tensor_rank == 0 and self.pipeline_rank == 0

    @property
    def first(self) -> bool:
        """Whether this is the process that speaks for all replicas: they are told the same."""
        return self.counts and not self.data_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One release.

    ``targets``: what is hooked or relied on, by keys that all releases share. ``place`` reads the arguments of
    Scheduler.__init__ by name. ``gather_switch``: the attribute of GDNAttnBackend that, set False, hands extend
    the strided pool itself (None: a page-major pool is always gathered first). ``weight_updates``: the keys of
    what changes parameters. ``cutedsl_on``: whether SGLang's own switch asks for its CuTe DSL fusion.
    ``completes_declined_norm``: whether SGLang sums over ranks itself where its fused norm declines a call.
    """

    version: str
    targets: Mapping[str, Target]
    place: Callable[[Mapping[str, Any]], Place]
    gather_switch: str | None
    weight_updates: tuple[str, ...]
    cutedsl_on: Callable[[], bool]
    completes_declined_norm: bool
