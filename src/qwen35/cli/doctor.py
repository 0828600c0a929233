"""``qwen35 doctor``: what is here, what can be used, and what the container would choose."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypedDict

import typer

from qwen35.cli.house import DEVICE_HELP, open_registry, settings_in_force
from qwen35.cli.screen import output
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import Qwen35Error

if TYPE_CHECKING:
    from qwen35.services.registry import AdapterRegistry
    from qwen35.settings import Settings

SCHEMA = 1
#: The settings that name an adapter, and the port of each.
_CHOICES = {
    "gdn_decode": "gated_delta_rule", "gdn_extend": "gated_delta_rule", "gdn_verify": "gated_delta_rule",
    "conv": "short_convolution",
}  # fmt: skip


class AdapterFacts(TypedDict):
    """One adapter. ``reasons`` say why it is not usable; ``deviations`` maps clauses to why they are not kept."""

    name: str
    summary: str
    rank: int
    usable: bool
    reasons: list[str]
    phases: list[str]
    deviations: dict[str, str]


class ChoiceFacts(TypedDict):
    """What one setting leads to. ``adapter`` is None where nothing can serve; ``reason`` says why."""

    setting: str
    requested: str
    port: str
    adapter: str | None
    reason: str
    rejected: dict[str, list[str]]


class Report(TypedDict):
    """What ``--json`` prints; ``schema`` counts changes of this shape."""

    schema: int
    versions: dict[str, str | None]
    device: dict[str, Any]
    settings: dict[str, Any]
    ports: dict[str, list[AdapterFacts]]
    choices: list[ChoiceFacts]


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead of tables."),
    device: str = typer.Option("", help=DEVICE_HELP),
) -> None:
    """Show every port and adapter, usable or not and why, and what would be chosen here."""
    report = gather(device)
    if as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        _show(report)


def gather(device: str = "") -> Report:
    """The report. Raises ``ConfigurationError`` for settings that are not valid or a device that is not there."""
    from qwen35.testing.machine import device_facts, versions

    settings = settings_in_force(device)
    registry = open_registry(settings)
    platform = registry.platform
    report = Report(
        schema=SCHEMA, versions=versions(), device=dict(device_facts(platform)), settings=settings.model_dump(),
        ports={p: [_adapter(registry, p, n) for n in registry.names(p)] for p in registry.ports()},
        choices=_choices(registry, settings),
    )  # fmt: skip
    registry.close()
    return report


def _adapter(registry: AdapterRegistry, port: str, name: str) -> AdapterFacts:
    entry, support = registry.entry(port, name), registry.usable(port, name)
    facts = AdapterFacts(
        name=name, summary=entry.summary, rank=entry.rank, usable=support.ok, reasons=list(support.reasons),
        phases=[], deviations={},
    )  # fmt: skip
    if not support:
        return facts
    try:
        can = registry.adapter(port, name).capabilities
    except (Qwen35Error, ImportError) as exc:
        facts["usable"], facts["reasons"] = False, [str(exc)]
        return facts
    facts["phases"] = sorted(map(str, can.phases))
    facts["deviations"] = {str(clause): why for clause, why in can.deviations.items()}
    return facts


def _choices(registry: AdapterRegistry, settings: Settings) -> list[ChoiceFacts]:
    requested = {"gdn_decode": settings.gdn_decode, "gdn_extend": settings.gdn_extend,
                 "gdn_verify": settings.gdn_verify, "conv": settings.conv}  # fmt: skip
    found = []
    for setting, port in _CHOICES.items():
        facts = ChoiceFacts(
            setting=setting, requested=requested[setting], port=port, adapter=None, reason="", rejected={}
        )
        try:
            choice = registry.choose(port, requested[setting])
        except (Qwen35Error, ImportError) as exc:
            facts["reason"] = str(exc)
        else:
            facts["adapter"], facts["reason"] = choice.name, choice.reason
            facts["rejected"] = {name: list(why) for name, why in choice.rejected.items()}
        found.append(facts)
    return found


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
        table = Table("adapter", "usable", "phases", "why not, or which clauses it cannot keep", title=port)
        for facts in adapters:
            why = facts["reasons"] or [f"{clause}: {reason}" for clause, reason in facts["deviations"].items()]
            usable = "[green]yes[/]" if facts["usable"] else "[red]no[/]"
            phases = "all" if len(facts["phases"]) == len(Phase) else ", ".join(facts["phases"])
            table.add_row(_plain(facts["name"]), usable, phases, _plain("; ".join(why)))
        console.print(table)
    table = Table("setting", "asked for", "chosen", "why", title="what the container would choose")
    for choice in report["choices"]:
        why = [choice["reason"], *(f"not {n}: {'; '.join(r)}" for n, r in choice["rejected"].items())]
        table.add_row(choice["setting"], choice["requested"], choice["adapter"] or "[red]none[/]",
                      _plain("\n".join(why)))  # fmt: skip
    console.print(table)


def _plain(text: str) -> str:
    """Text that rich must not read as markup."""
    from rich.markup import escape

    return escape(text)
