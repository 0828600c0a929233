"""Finds adapters by entry point, says which are usable here, and makes each one once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from qwen35.domain.capabilities import Capabilities, Phase, Support
from qwen35.domain.errors import ConfigurationError, Qwen35Error, UnavailableError, UnknownNameError
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry, AdapterOptions
from qwen35.services.discovery import (
    FAILURES,
    NO_PORT,
    PORTS,
    adapter_fault,
    blamed,
    entry_faults,
    installed_entries,
    said,
    support_fault,
)

AUTO = "auto"
#: An adapter of this rank or less is used only when it is named.
NAMED_ONLY_RANK = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Which adapter was taken for a port, why, and why each other one was not."""

    port: str
    name: str
    reason: str
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class AdapterRegistry:
    """The adapters known to one container; each is made at most once and closed with it.

    ``extra`` are known besides the installed ones, and instead of those of the same port and name; raises
    ``ConfigurationError`` for one with a field of the wrong kind. An installed one that is broken is unusable.
    """

    def __init__(
        self, platform: Platform, options: AdapterOptions | None = None, extra: Iterable[AdapterEntry] = ()
    ) -> None:
        self.platform = platform
        self._options = options or AdapterOptions()
        found, given = installed_entries(), list(extra)
        for entry in given:
            wrong = entry_faults(entry)
            if wrong:
                raise ConfigurationError(f"adapter {entry.port}.{entry.name}: {'; '.join(wrong)}")
        self._entries = {key: one.entry for key, one in found.items()} | {(e.port, e.name): e for e in given}
        self._origins = {key: one.origin for key, one in found.items() if one.entry is self._entries[key]}
        self._made: dict[tuple[str, str], Any] = {}

    def apart(self) -> AdapterRegistry:
        """A registry of the same adapters that has made none of them yet: what it makes is shared with nobody."""
        other = copy(self)
        other._made = {}
        return other

    def ports(self) -> tuple[str, ...]:
        """Every port that has an adapter; with ``NO_PORT`` where an entry point names none."""
        return tuple(sorted({port for port, _ in self._entries}))

    def names(self, port: str) -> tuple[str, ...]:
        """The adapters of ``port``, best rank first."""
        entries = [e for e in self._entries.values() if e.port == port]
        return tuple(e.name for e in sorted(entries, key=lambda e: (-e.rank, e.name)))

    def entry(self, port: str, name: str) -> AdapterEntry:
        """The entry; raises ``UnknownNameError`` listing the known names."""
        if port not in self.ports():
            raise UnknownNameError("port", port, PORTS)
        entry = self._entries.get((port, name)) or self._misnamed(name)
        if entry is None:
            raise UnknownNameError(f"{port} adapter", name, self.names(port))
        return entry

    def _misnamed(self, name: str) -> AdapterEntry | None:
        """What was most likely meant by ``name``: an adapter whose entry point names no port."""
        lost = (e for (port, whole), e in self._entries.items() if port == NO_PORT and whole.split(".")[-1] == name)
        return next(lost, None)

    def usable(self, port: str, name: str) -> Support:
        """Whether the adapter can be used on this machine, with reasons; a probe that fails is one."""
        entry, origin = self.entry(port, name), self._origins.get((port, name))
        try:
            support: Support = entry.probe(self.platform)
        except Exception as exc:  # noqa: BLE001 - another package's code may raise anything, though a probe must not
            return Support.of(blamed(f"its probe failed with {said(exc)}", origin))
        fault = support_fault(support)
        return support if fault is None else Support.of(blamed(fault, origin))

    def adapter(self, port: str, name: str) -> Any:
        """The adapter, made at the first request.

        Raises ``UnavailableError`` with the probe's reasons, with what its factory raised, with what keeps the object
        that it gave from being the port, or where the device is older than its capabilities ask for.
        """
        if (port, name) not in self._made:
            what, support = f"{port} adapter {name!r}", self.usable(port, name)
            if not support:
                raise UnavailableError(what, support.reasons)
            self._made[port, name] = self._make(what, port, name)
        return self._made[port, name]

    def _make(self, what: str, port: str, name: str) -> Any:
        origin = self._origins.get((port, name))
        try:
            made = self.entry(port, name).create(self.platform, self._options)
        except Qwen35Error:
            raise
        except FAILURES as exc:
            raise UnavailableError(what, [blamed(f"its factory failed with {said(exc)}", origin)]) from exc
        fault = adapter_fault(port, made)
        if fault is not None:
            raise UnavailableError(what, [blamed(fault, origin)])
        old = _too_old(self.platform, made.capabilities)
        if old:
            made.close()
            raise UnavailableError(what, old)
        return made

    def choose(self, port: str, requested: str, phase: Phase | None = None) -> Choice:
        """The adapter named by ``requested``, or for "auto" the usable one of the highest rank that keeps
        every clause and offers ``phase`` (None: whatever it offers); one of rank 0 or less is only ever taken by name.
        Raises ``UnavailableError`` where the named one, or every one, cannot be used."""
        if requested != AUTO:
            self.adapter(port, requested)
            return Choice(port, requested, "named in the settings")
        rejected: dict[str, tuple[str, ...]] = {}
        for name in self.names(port):
            reasons = self._against(port, name, phase)
            if not reasons:
                return Choice(port, name, "best usable adapter that keeps every clause", rejected)
            rejected[name] = reasons
        found = [f"{name}: {'; '.join(why)}" for name, why in rejected.items()]
        raise UnavailableError(f"no {port} adapter is usable here", found or ["none is installed"])

    def _against(self, port: str, name: str, phase: Phase | None) -> tuple[str, ...]:
        """Why the automatic choice does not take this adapter; none: it may."""
        rank = self.entry(port, name).rank
        if rank <= NAMED_ONLY_RANK:
            return (f"rank {rank}: used only when named",)
        try:
            can = self.adapter(port, name).capabilities
        except Qwen35Error as exc:  # whatever it raises, the others are there to choose from
            return reasons_of(exc)
        missing = () if phase is None or phase in can.phases else (f"{phase} is not offered",)
        return (*missing, *(f"deviates from {clause}: {why}" for clause, why in can.deviations.items()))

    def close(self) -> None:
        """Close every adapter that was made, also where one of them fails to. Idempotent."""
        with ExitStack() as closing:
            for made in self._made.values():
                closing.callback(made.close)
            self._made.clear()


def reasons_of(exc: Qwen35Error) -> tuple[str, ...]:
    """Why an adapter could not be made; at least one reason."""
    return (exc.reasons if isinstance(exc, UnavailableError) else ()) or (str(exc),)


def _too_old(platform: Platform, can: object) -> tuple[str, ...]:
    """The reason against a GPU of a lower compute capability than ``can`` asks for; none: it is new enough, or none."""
    if platform.device_type != "cuda" or not isinstance(can, Capabilities) or can.min_compute_capability is None:
        return ()
    return platform.below(can.min_compute_capability)
