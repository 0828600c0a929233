"""Which adapter of the fused finalize serves a group: one choice, the same on every rank, with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qwen35.domain.capabilities import Support
from qwen35.domain.errors import Qwen35Error, UnavailableError
from qwen35.domain.finalize_capabilities import DeviceFacts, FusionCapabilities, peer_reasons
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.services.finalize_agreement import Agreement
from qwen35.services.registry import AUTO, NAMED_ONLY_RANK, AdapterRegistry, reasons_of

PORT = "finalize_fusion"


@dataclass(frozen=True, slots=True)
class FusionChoice:
    """The adapter taken, why, of how many tokens it serves steps (as many as asked for, or fewer), and why each better
    one was not taken: reasons bear the rank that has them."""

    name: str
    reason: str
    max_m: int
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def choose_fusion(
    adapters: AdapterRegistry, requested: str, signature: WorkspaceSignature, facts: DeviceFacts, agreement: Agreement
) -> FusionChoice:
    """The adapter named by ``requested``, or for "auto" the first in rank order that every rank can use.

    One rank that cannot use an adapter is enough for nobody to use it. Every rank of the group calls this
    together. Raises ``UnavailableError`` alike on all ranks, with every rank's reasons, also where an adapter that
    one of them asks fails, and ``UnknownNameError`` for a name that is not known.
    """
    ranked = tuple(n for n in adapters.names(PORT) if adapters.entry(PORT, n).rank > NAMED_ONLY_RANK)
    names = ranked if requested == AUTO else (adapters.entry(PORT, requested).name,)
    own: dict[str, tuple[bool, tuple[str, ...]]] = {}
    failure: Exception | None = None
    try:
        own = {name: _against(adapters, name, signature) for name in names}
    except Exception as exc:  # noqa: BLE001 - an adapter may raise anything; unheard, it leaves the others waiting
        failure = exc
    records = agreement.exchange((facts, own, None if failure is None else f"{type(failure).__name__}: {failure}"))
    failed = [f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(records) if text is not None]
    if failed:
        raise UnavailableError(f"{PORT} adapter {requested!r}", failed) from failure
    peers = peer_reasons([facts for facts, _, _ in records])
    rejected: dict[str, tuple[str, ...]] = {}
    for name in names:
        reasons = [
            f"rank {rank}: {reason}"
            for rank, (_, seen, _) in enumerate(records) for reason in seen.get(name, (False, ("not installed",)))[1]
        ]  # fmt: skip
        if any(seen.get(name, (False, ()))[0] for _, seen, _ in records):
            reasons += peers
        if not reasons:
            why = "named in the settings" if requested != AUTO else "best adapter that every rank can use"
            can: FusionCapabilities = adapters.adapter(PORT, name).capabilities
            return FusionChoice(name, why, can.within(signature).max_m, rejected)
        rejected[name] = tuple(reasons)
    found = [f"{name}: {reason}" for name, reasons in rejected.items() for reason in reasons]
    raise UnavailableError(f"{PORT} adapter {requested!r}", found)


def _against(adapters: AdapterRegistry, name: str, signature: WorkspaceSignature) -> tuple[bool, tuple[str, ...]]:
    """Whether the adapter needs peers of one host, and this rank's reasons against it: one that serves fewer tokens
    than ``signature`` asks for is asked about those."""
    usable = adapters.usable(PORT, name)
    if not usable:
        return False, usable.reasons
    try:
        adapter = adapters.adapter(PORT, name)
    except Qwen35Error as exc:
        return False, reasons_of(exc)
    can: FusionCapabilities = adapter.capabilities
    support: Support = adapter.supports(can.within(signature))
    return can.one_host, support.reasons
