"""Finds adapters by entry point, says which are usable here, and makes each one once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from qwen35.domain.capabilities import Support
from qwen35.domain.errors import ConfigurationError, UnavailableError, UnknownNameError
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import ENTRY_POINT_GROUP, AdapterEntry, AdapterOptions

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which adapter was taken for a port, why, and why each other one was not."""

    port: str
    name: str
    reason: str
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def installed_entries() -> dict[tuple[str, str], AdapterEntry]:
    """Every adapter that an installed package declares, by (port, name).

    One that cannot be imported is kept, unusable, with the error as its reason.
    """
    found: dict[tuple[str, str], AdapterEntry] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        port, dot, name = point.name.partition(".")
        if not dot:
            raise ConfigurationError(f"entry point {point.name!r} of {ENTRY_POINT_GROUP} must be '<port>.<adapter>'")
        try:
            entry = point.load()
        except (ImportError, AttributeError) as exc:
            entry = _broken(port, name, f"{point.value} cannot be loaded: {exc}")
        if not isinstance(entry, AdapterEntry):
            entry = _broken(port, name, f"{point.value} must be an AdapterEntry, got {type(entry).__name__}")
        found[port, name] = entry
    return found


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
        """Whether the adapter can be used on this machine, with reasons."""
        return self.entry(port, name).probe(self.platform)

    def adapter(self, port: str, name: str) -> Any:
        """The adapter, made at the first request. Raises ``UnavailableError`` with the probe's reasons."""
        entry = self.entry(port, name)
        if (port, name) not in self._made:
            support = entry.probe(self.platform)
            if not support:
                raise UnavailableError(f"{port} adapter {name!r}", support.reasons)
            self._made[port, name] = entry.create(self.platform, self._options)
        return self._made[port, name]

    def choose(self, port: str, requested: str) -> Choice:
        """The adapter named by ``requested``, or for "auto" the usable one of the highest rank that keeps
        every clause. Raises ``UnavailableError`` where the named one, or every one, cannot be used."""
        if requested != AUTO:
            self.adapter(port, requested)
            return Choice(port, requested, "named in the settings")
        rejected: dict[str, tuple[str, ...]] = {}
        for name in self.names(port):
            support = self.usable(port, name)
            if not support:
                rejected[name] = support.reasons
                continue
            deviations = self.adapter(port, name).capabilities.deviations
            if deviations:
                rejected[name] = tuple(f"deviates from {clause}: {why}" for clause, why in deviations.items())
                continue
            return Choice(port, name, "best usable adapter that keeps every clause", rejected)
        reasons = [f"{name}: {'; '.join(why)}" for name, why in rejected.items()]
        raise UnavailableError(f"no {port} adapter is usable here", reasons or ["none is installed"])

    def close(self) -> None:
        """Close every adapter that was made."""
        for made in self._made.values():
            made.close()
        self._made.clear()
