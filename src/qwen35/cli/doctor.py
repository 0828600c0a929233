"""``qwen35 doctor``: what is here, what can be used, and what the container would choose."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypedDict

import typer

from qwen35.cli.house import DEVICE_HELP, open_registry, settings_in_force
from qwen35.cli.screen import output
from qwen35.domain.capabilities import Capabilities, Phase
from qwen35.domain.errors import Qwen35Error
from qwen35.domain.finalize_capabilities import FusionCapabilities

if TYPE_CHECKING:
    from qwen35.cli.doctor_choices import BuildFacts, ChoiceFacts
    from qwen35.services.registry import AdapterRegistry

SCHEMA = 2
EXIT_CANNOT_BUILD = 1


class AdapterFacts(TypedDict):
    """One adapter. ``reasons`` say why it is not usable; ``offers`` is what it can do, in words of its port;
    ``deviations`` maps clauses to why they are not kept."""

    name: str
    summary: str
    rank: int
    usable: bool
    reasons: list[str]
    offers: list[str]
    deviations: dict[str, str]


class Report(TypedDict):
    """What ``--json`` prints; ``schema`` counts changes of this shape."""

    schema: int
    versions: dict[str, str | None]
    device: dict[str, Any]
    settings: dict[str, Any]
    ports: dict[str, list[AdapterFacts]]
    choices: list[ChoiceFacts]
    build: BuildFacts


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead of tables."),
    device: str = typer.Option("", help=DEVICE_HELP),
) -> None:
    """Show every port and adapter, usable or not and why, and what would be chosen here.

    Exit code 1 where build() would fail with the settings in force.
    """
    report = gather(device)
    if as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        _show(report)
    if not report["build"]["ok"]:
        raise typer.Exit(EXIT_CANNOT_BUILD)


def gather(device: str = "") -> Report:
    """The report. Raises ``ConfigurationError`` for settings that are not valid or a device that is not there."""
    from qwen35.cli.doctor_choices import choices, try_to_build
    from qwen35.testing.machine import device_facts, versions

    settings = settings_in_force(device)
    registry = open_registry(settings)
    platform = registry.platform
    report = Report(
        schema=SCHEMA, versions=versions(), device=dict(device_facts(platform)), settings=settings.model_dump(),
        ports={p: [_adapter(registry, p, n) for n in registry.names(p)] for p in registry.ports()},
        choices=choices(registry, settings), build=try_to_build(registry, settings),
    )  # fmt: skip
    registry.close()
    return report


def _adapter(registry: AdapterRegistry, port: str, name: str) -> AdapterFacts:
    entry, support = registry.entry(port, name), registry.usable(port, name)
    facts = AdapterFacts(
        name=name, summary=entry.summary, rank=entry.rank, usable=support.ok, reasons=list(support.reasons),
        offers=[], deviations={},
    )  # fmt: skip
    if not support:
        return facts
    try:
        can = registry.adapter(port, name).capabilities
    except Qwen35Error as exc:
        facts["usable"], facts["reasons"] = False, [str(exc)]
        return facts
    facts["offers"] = _offers(can)
    facts["deviations"] = {str(clause): why for clause, why in can.deviations.items()}
    return facts


def _offers(can: Capabilities | FusionCapabilities) -> list[str]:
    """The phases of an adapter of a recurrence or convolution; ranks and dtypes of a fused finalize."""
    if isinstance(can, FusionCapabilities):
        sizes = "any number of ranks" if can.tp_sizes is None else f"{_joined(can.tp_sizes)} ranks"
        return [f"{sizes}{' of one host' if can.one_host else ''}", *sorted(can.dtypes)]
    return ["all phases"] if len(can.phases) == len(Phase) else sorted(map(str, can.phases))


def _joined(sizes: frozenset[int]) -> str:
    *most, last = map(str, sorted(sizes))
    return f"{', '.join(most)} or {last}" if most else last


def _show(report: Report) -> None:
    from rich.table import Table

    console, device = output(), report["device"]
    capability = f", compute capability {device['compute_capability']}" if device["compute_capability"] else ""
    console.print(f"device    {device['device']} ({device['name']}{capability})", markup=False)
    found = [f"{name} {release or '-'}" for name, release in report["versions"].items()]
    console.print(f"versions  {', '.join(found)}", markup=False)
    settings = [f"{name}={value}" for name, value in report["settings"].items()]
    console.print(f"settings  {', '.join(settings)}", markup=False)
    for port, adapters in report["ports"].items():
        table = Table("adapter", "usable", "offers", "why not, or which clauses it cannot keep", title=port)
        for facts in adapters:
            why = facts["reasons"] or [f"{clause}: {reason}" for clause, reason in facts["deviations"].items()]
            usable = "[green]yes[/]" if facts["usable"] else "[red]no[/]"
            table.add_row(_plain(facts["name"]), usable, ", ".join(facts["offers"]), _plain("; ".join(why)))
        console.print(table)
    table = Table("setting", "asked for", "chosen", "why", title="what the container would choose")
    for choice in report["choices"]:
        why = [choice["reason"], *(f"not {n}: {'; '.join(r)}" for n, r in choice["rejected"].items())]
        nobody = "none" if choice["ok"] else "[red]none[/]"
        chosen = _plain(choice["adapter"]) if choice["adapter"] else nobody
        table.add_row(choice["setting"], _plain(choice["requested"]), chosen, _plain("\n".join(why)))
    console.print(table)
    build = report["build"]
    console.print(f"build()   {'works' if build['ok'] else 'fails: ' + build['reason']}", markup=False)


def _plain(text: str) -> str:
    """Text that rich must not read as markup."""
    from rich.markup import escape

    return escape(text)
