"""Finds adapters by entry point, says which are usable here, and makes each one once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from qwen35.domain.capabilities import Phase, Support
from qwen35.domain.errors import ConfigurationError, Qwen35Error, UnavailableError, UnknownNameError
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import ENTRY_POINT_GROUP, AdapterEntry, AdapterOptions
from qwen35.ports.finalize_fusion import FinalizeFusion
from qwen35.ports.gated_delta_rule import GatedDeltaRule
from qwen35.ports.short_convolution import ShortConvolution

AUTO = "auto"
#: An adapter of this rank or less is used only when it is named.
NAMED_ONLY_RANK = 0
_PROTOCOLS: dict[str, type] = {
    "gated_delta_rule": GatedDeltaRule, "short_convolution": ShortConvolution, "finalize_fusion": FinalizeFusion,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """Which adapter was taken for a port, why, and why each other one was not."""

    port: str
    name: str
    reason: str
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def installed_entries() -> dict[tuple[str, str], AdapterEntry]:
    """Every adapter that an installed package declares, by (port, name).

    One that cannot be loaded, is no entry of that port and name, or is declared twice is kept, unusable, with the
    reason. Raises ``ConfigurationError`` for an entry point that names no port.
    """
    declared: dict[tuple[str, str], dict[str, EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        port, dot, name = point.name.partition(".")
        if not dot:
            raise ConfigurationError(f"entry point {point.name!r} of {ENTRY_POINT_GROUP} must be '<port>.<adapter>'")
        declared.setdefault((port, name), {})[point.value] = point
    found = {}
    for (port, name), points in declared.items():
        if len(points) > 1:
            found[port, name] = _broken(port, name, f"declared more than once, uninstall all but one: {_list(points)}")
        else:
            found[port, name] = _loaded(port, name, *points.values())
    return found


def _list(points: Mapping[str, EntryPoint]) -> str:
    return ", ".join(f"{value} of {point.dist.name if point.dist else '?'}" for value, point in points.items())


def _loaded(port: str, name: str, point: EntryPoint) -> AdapterEntry:
    try:
        entry = point.load()
    except Exception as exc:  # noqa: BLE001 - another package's module may raise anything; the others must still work
        return _broken(port, name, f"{point.value} cannot be loaded: {_said(exc)}")
    if not isinstance(entry, AdapterEntry):
        return _broken(port, name, f"{point.value} must be an AdapterEntry, got {type(entry).__name__}")
    if (entry.port, entry.name) != (port, name):
        return _broken(port, name, f"{point.value} must be the entry of {port}.{name}, got {entry.port}.{entry.name}")
    return entry


def _said(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _broken(port: str, name: str, reason: str) -> AdapterEntry:
    def create(_: Platform, __: AdapterOptions) -> Any:
        raise UnavailableError(f"{port}.{name}", [reason])

    return AdapterEntry(
        port=port, name=name, summary="cannot be loaded", probe=lambda _: Support.of(reason), create=create
    )


class AdapterRegistry:
    """The adapters known to one container; each is made at most once and closed with it."""

    def __init__(
        self, platform: Platform, options: AdapterOptions | None = None, extra: Iterable[AdapterEntry] = ()
    ) -> None:
        self.platform = platform
        self._options = options or AdapterOptions()
        self._entries = installed_entries() | {(e.port, e.name): e for e in extra}
        self._made: dict[tuple[str, str], Any] = {}

    def ports(self) -> tuple[str, ...]:
        """Every port that has an adapter."""
        return tuple(sorted({port for port, _ in self._entries}))

    def names(self, port: str) -> tuple[str, ...]:
        """The adapters of ``port``, best rank first."""
        entries = [e for e in self._entries.values() if e.port == port]
        return tuple(e.name for e in sorted(entries, key=lambda e: (-e.rank, e.name)))

    def entry(self, port: str, name: str) -> AdapterEntry:
        """The entry; raises ``UnknownNameError`` listing the known names."""
        if port not in self.ports():
            raise UnknownNameError("port", port, self.ports())
        try:
            return self._entries[port, name]
        except KeyError:
            raise UnknownNameError(f"{port} adapter", name, self.names(port)) from None

    def usable(self, port: str, name: str) -> Support:
        """Whether the adapter can be used on this machine, with reasons; a probe that fails is one."""
        entry = self.entry(port, name)
        try:
            support: object = entry.probe(self.platform)
        except Exception as exc:  # noqa: BLE001 - another package's code may raise anything, though a probe must not
            return Support.of(f"its probe failed with {_said(exc)}")
        if not isinstance(support, Support):
            return Support.of(f"its probe must return Support, got {type(support).__name__}")
        return support

    def adapter(self, port: str, name: str) -> Any:
        """The adapter, made at the first request.

        Raises ``UnavailableError`` with the probe's reasons, with what its factory raised, or naming what the
        object that it gave lacks of the port.
        """
        if (port, name) not in self._made:
            what, support = f"{port} adapter {name!r}", self.usable(port, name)
            if not support:
                raise UnavailableError(what, support.reasons)
            self._made[port, name] = _made(what, self.entry(port, name), self.platform, self._options)
        return self._made[port, name]

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
        except UnavailableError as exc:
            return exc.reasons
        missing = () if phase is None or phase in can.phases else (f"{phase} is not offered",)
        return (*missing, *(f"deviates from {clause}: {why}" for clause, why in can.deviations.items()))

    def close(self) -> None:
        """Close every adapter that was made, also where one of them fails to. Idempotent."""
        with ExitStack() as closing:
            for made in self._made.values():
                closing.callback(made.close)
            self._made.clear()


def _made(what: str, entry: AdapterEntry, platform: Platform, options: AdapterOptions) -> Any:
    try:
        made = entry.create(platform, options)
    except Qwen35Error:
        raise
    except Exception as exc:
        raise UnavailableError(what, [f"its factory failed with {_said(exc)}"]) from exc
    protocol = _PROTOCOLS.get(entry.port)
    if protocol is not None and not isinstance(made, protocol):
        asked = [member for member in vars(protocol) if not member.startswith("_")]
        lacking = [member for member in asked if member not in dir(made)]
        reason = f"requires a {protocol.__name__}, got {type(made).__name__}"
        raise UnavailableError(what, [f"{reason} without {', '.join(lacking)}" if lacking else reason])
    return made
