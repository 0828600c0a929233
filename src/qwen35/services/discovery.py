"""Which adapters installed packages declare, and what is wrong with what another package declares or makes.

Nothing here raises for a package's fault: one that is broken must not take the others with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_args, get_origin, get_type_hints

from qwen35.domain.capabilities import Capabilities, Support
from qwen35.domain.errors import UnavailableError
from qwen35.domain.finalize_capabilities import FusionCapabilities
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import ENTRY_POINT_GROUP, AdapterEntry, AdapterOptions
from qwen35.ports.finalize_fusion import FinalizeFusion
from qwen35.ports.gated_delta_rule import GatedDeltaRule
from qwen35.ports.short_convolution import ShortConvolution

#: Each port's Protocol, and what an implementation states its capabilities as.
PORTS: dict[str, tuple[type, type[Capabilities] | type[FusionCapabilities]]] = {
    "gated_delta_rule": (GatedDeltaRule, Capabilities), "short_convolution": (ShortConvolution, Capabilities),
    "finalize_fusion": (FinalizeFusion, FusionCapabilities),
}  # fmt: skip
#: Where an entry point that names no port is listed, by its whole name.
NO_PORT = "no port"
_MEND = "correct it there, or uninstall that package"
#: What a package's code may raise while it is imported or asked to make something; a script ends with SystemExit.
FAILURES = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class Found:
    """An installed entry, and the entry point that declares it, in words."""

    entry: AdapterEntry
    origin: str


def installed_entries() -> dict[tuple[str, str], Found]:
    """Every adapter that an installed package declares, by (port, name).

    One that cannot be loaded, is no entry of that port and name, or is declared twice is kept, unusable, with the
    reason; one whose entry point names no port is kept under ``NO_PORT`` and its whole name.
    """
    declared: dict[tuple[str, str], dict[str, EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        port, _, name = point.name.partition(".")
        key = (port, name) if port in PORTS and name else (NO_PORT, point.name)
        declared.setdefault(key, {})[point.value] = point
    return {key: _found(key, list(points.values())) for key, points in declared.items()}


def _found(key: tuple[str, str], points: list[EntryPoint]) -> Found:
    origin = " and ".join(_origin(point) for point in points)
    if len(points) > 1:
        return _broken(key, f"declared more than once ({origin}: uninstall all but one)", origin)
    if key[0] == NO_PORT:
        wrong = f"an entry point must be named <port>.<adapter> with port {_either(PORTS)}, got {key[1]!r}"
        return _broken(key, f"{wrong} ({origin}: {_MEND})", origin)
    try:
        entry: object = points[0].load()
    except FAILURES as exc:
        return _broken(key, f"cannot be loaded, {said(exc)} ({origin}: mend what it imports, or uninstall it)", origin)
    if not isinstance(entry, AdapterEntry):
        return _broken(key, f"must be an AdapterEntry, got {type(entry).__name__} ({origin}: {_MEND})", origin)
    wrongs = list(entry_faults(entry))
    if (entry.port, entry.name) != key:
        wrongs.append(f"must be the entry of {key[0]}.{key[1]}, got {entry.port}.{entry.name}")
    return _broken(key, f"{', '.join(wrongs)} ({origin}: {_MEND})", origin) if wrongs else Found(entry, origin)


def _origin(point: EntryPoint) -> str:
    owner = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
    return f"entry point {point.name} = {point.value} of {owner}"


def _broken(key: tuple[str, str], reason: str, origin: str) -> Found:
    port, name = key

    def create(_: Platform, __: AdapterOptions) -> Any:
        raise UnavailableError(f"{port}.{name}", [reason])

    entry = AdapterEntry(
        port=port, name=name, summary="cannot be loaded", probe=lambda _: Support.of(reason), create=create
    )
    return Found(entry, origin)


def said(exc: BaseException) -> str:
    """What was raised, in one line's beginning."""
    return f"{type(exc).__name__}: {exc}"


def blamed(reason: str, origin: str | None) -> str:
    """``reason`` with the entry point that it comes from, where one is known."""
    return f"{reason} ({origin})" if origin else reason


def entry_faults(entry: AdapterEntry) -> tuple[str, ...]:
    """Which fields of ``entry`` are of another kind than the port asks for; none: all are sound."""
    texts = (("port", entry.port), ("name", entry.name), ("summary", entry.summary))
    wrong = [f"{name} must be a str, got {value!r}" for name, value in texts if not isinstance(value, str)]
    if isinstance(entry.port, str) and entry.port not in PORTS:
        wrong.append(f"port must be {_either(PORTS)}, got {entry.port!r}")
    if not isinstance(entry.rank, int) or isinstance(entry.rank, bool):
        wrong.append(f"rank must be an int, got {entry.rank!r}")
    called = (("probe", entry.probe), ("create", entry.create))
    return (*wrong, *(f"{name} must be callable, got {value!r}" for name, value in called if not callable(value)))


def support_fault(support: object) -> str | None:
    """What is wrong with the answer of a probe; None: nothing."""
    if not isinstance(support, Support):
        return f"its probe must return Support, got {type(support).__name__}"
    texts = support.reasons
    if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
        return f"its probe must give reasons as a tuple of str, got {texts!r}"
    if support.ok == bool(texts):
        return f"its probe must give reasons where and only where it says no, got {support!r}"
    return None


def adapter_fault(port: str, made: object) -> str | None:
    """What keeps ``made``, the product of a factory, from being an implementation of ``port``; None: nothing."""
    protocol, stated = PORTS[port]
    if isinstance(made, type):
        return f"requires a {protocol.__name__}, got the class {made.__name__} itself: create must return an object"
    lacking = []
    for member in (name for name in vars(protocol) if not name.startswith("_")):
        try:
            value = getattr(made, member)
        except AttributeError:
            lacking.append(member)
            continue
        except Exception as exc:  # noqa: BLE001 - another package's property may raise anything
            return f"its {member} failed with {said(exc)}"
        if member == "capabilities":
            if fault := _capability_fault(value, stated):
                return fault
        elif not callable(value):
            return f"its {member} must be a method, got {value!r}"
    wanted = f"requires a {protocol.__name__}, got {type(made).__name__}"
    return f"{wanted} without {', '.join(lacking)}" if lacking else None


def _capability_fault(can: object, stated: type[Capabilities] | type[FusionCapabilities]) -> str | None:
    if not isinstance(can, stated):
        return f"its capabilities must be {stated.__name__}, got {type(can).__name__}"
    hints = get_type_hints(stated)
    for field in fields(can):
        value, kinds = getattr(can, field.name), _kinds(hints[field.name])
        if not isinstance(value, kinds):
            return f"{field.name} of its capabilities must be {_either([k.__name__ for k in kinds])}, got {value!r}"
    return None


def _kinds(hint: Any) -> tuple[type, ...]:
    """The classes of an annotation's values: any set for a frozenset, a whole number for a float too."""
    members = get_args(hint) if type(None) in get_args(hint) else (hint,)
    wider = {frozenset: (Set,), float: (float, int)}
    return tuple(kind for one in members for kind in wider.get(get_origin(one) or one, (get_origin(one) or one,)))


def _either(names: Iterable[str]) -> str:
    return " or ".join(sorted(names))
