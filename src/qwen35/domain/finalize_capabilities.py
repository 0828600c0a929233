"""What an adapter of the fused finalize states of itself, and what a rank can see of its own device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from types import MappingProxyType

from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.domain.precision import UNIT_ROUNDOFF


class FusionClause(StrEnum):
    """The clauses of the finalize contract."""

    DROPPED = "dropped experts"
    ZERO_WEIGHT = "zero weights"
    UNREFERENCED = "unreferenced rows"
    IDENTICAL = "identical bits"
    ISOLATION = "isolation"
    CAPTURE = "capture"
    PRECISION = "precision"
    REFUSAL = "refusal"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionCapabilities:
    """A set that is None allows everything.

    ``one_host``: the ranks must be on one host, each on a device of its own, all alike (``peer_reasons``).
    ``most_tokens``: the largest ``max_m`` of a workspace; where more is asked for, one of so many serves, and larger
    steps are not fused. ``roundings`` counts how many roundings to the token dtype lie between the inputs and the norm
    (the last one included). ``weight_dtypes``, ``fewest_routed_rows`` and ``most_routed_elements`` are what a handoff
    may bring. ``deviations`` says which clauses the adapter cannot keep, and why.
    """

    device_types: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[str] = frozenset({"bfloat16", "float32"})
    tp_sizes: frozenset[int] | None = None
    one_host: bool = False
    most_tokens: int | None = None
    roundings: float = 1.0
    weight_dtypes: frozenset[str] = frozenset({"bfloat16", "float32"})
    fewest_routed_rows: int = 0
    most_routed_elements: int | None = None
    deviations: Mapping[FusionClause, str] = field(default_factory=lambda: MappingProxyType({}))

    def within(self, asked: WorkspaceSignature) -> WorkspaceSignature:
        """``asked``, or where it is for more tokens than ``most_tokens`` the same for so many."""
        if self.most_tokens is None or asked.max_m <= self.most_tokens:
            return asked
        return replace(asked, max_m=self.most_tokens)

    def against(self, handoff: FinalizeHandoff) -> tuple[str, ...]:
        """Why the adapter cannot take a handoff that meets the contract. A rank's own: the others' may differ."""
        reasons = []
        dtype = str(handoff.expert_weights.dtype).removeprefix("torch.")
        if dtype not in self.weight_dtypes:
            reasons.append(f"expert_weights require {' or '.join(sorted(self.weight_dtypes))}, got {dtype}")
        rows, elements = handoff.routed_output.shape[0], prod(handoff.routed_output.shape)
        if rows < self.fewest_routed_rows:
            reasons.append(f"rows of routed_output require at least {self.fewest_routed_rows}, got {rows}")
        if self.most_routed_elements is not None and elements > self.most_routed_elements:
            reasons.append(f"routed_output requires at most {self.most_routed_elements} elements, got {elements}")
        return tuple(reasons)

    def bound(self, dtype: str) -> float:
        """Largest ``||got - oracle|| / ||oracle||`` of norm and residual, where no terms cancel.

        Rounding to a dtype adds at most its unit roundoff; float32 sums over ranks, experts and the row's
        squares stay within 64 of its units.
        """
        return self.roundings * UNIT_ROUNDOFF[dtype] + 64 * UNIT_ROUNDOFF["float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What one rank sees of its own device; looked up once, then passed in.

    ``no_symmetric_memory`` and ``no_multicast`` are reasons against, kept apart: peers of one host can often
    read and write each other's memory where NVLink multicast is missing or switched off. ``closed_peers`` are
    the ``uuid`` of devices of this ``host`` whose memory this one cannot reach. ``model`` is the device's own name.
    """

    device: str
    host: str = ""
    uuid: str = ""
    model: str = ""
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    no_symmetric_memory: tuple[str, ...] = ()
    no_multicast: tuple[str, ...] = ()
    closed_peers: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What peers must have in common, in words."""
        capability = ".".join(map(str, self.compute_capability or ())) or "none"
        return f"{self.model or 'a device'} (compute capability {capability}, {self.multiprocessors} multiprocessors)"


def peer_reasons(ranks: Sequence[DeviceFacts]) -> tuple[str, ...]:
    """Why the devices of these ranks cannot work on shared memory as peers of one host; none: they can.

    They must be alike, since each rank works out by its own device which program of which rank serves a row: ranks
    that come to different answers would wait for one another for good.
    """
    reasons = [
        f"peers require one host, got rank 0 on {ranks[0].host} and rank {rank} on {facts.host}"
        for rank, facts in enumerate(ranks) if facts.host != ranks[0].host
    ]  # fmt: skip
    for rank, facts in enumerate(ranks):
        reasons += [
            f"peers require memory access, which rank {rank} has not to rank {other}"
            for other, peer in enumerate(ranks) if peer.uuid and peer.uuid in facts.closed_peers
        ]  # fmt: skip
        first = [peer.uuid for peer in ranks].index(facts.uuid)
        if facts.uuid and first < rank:
            reasons.append(f"peers require a device each, got rank {first} and rank {rank} on {facts.uuid}")
        if facts.kind != ranks[0].kind:
            reasons.append(f"peers require like devices, got {ranks[0].kind} on rank 0 and {facts.kind} on rank {rank}")
    return tuple(reasons)
