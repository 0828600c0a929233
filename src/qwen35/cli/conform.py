"""``qwen35 conform``: the law suites of the contract against one adapter, clause by clause."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from qwen35.cli.house import DEVICE_HELP, EXIT_INTERRUPTED, command_line, settings_in_force
from qwen35.cli.screen import errors, output, progress_bar
from qwen35.domain.errors import UnknownNameError

if TYPE_CHECKING:
    from qwen35.container import Container
    from qwen35.domain.platform import Platform
    from qwen35.services.counters import Counters
    from qwen35.testing.conformance import LawReport

SCHEMA = 5
EXIT_BROKEN = 1
#: The settings that hand a port to one adapter.
_SETTINGS = {
    "gated_delta_rule": ("gdn_decode", "gdn_extend", "gdn_verify"),
    "short_convolution": ("conv",),
}  # fmt: skip
_STYLES = {"passed": "green", "failed": "bold red", "deviates": "yellow", "skipped": "dim"}


def conform(
    adapter: str = typer.Argument(help="Adapter by name, built in or from any installed package."),
    port: str = typer.Option("gated_delta_rule", help="gated_delta_rule or short_convolution."),
    examples: int = typer.Option(0, min=0, help="Cases a law; 0: what the profile says."),
    profile: str = typer.Option("", help="cpu, interpreter or gpu sizes; default: by the device."),
    clause: str = typer.Option("", help="Only this clause, as the table spells it."),
    seed: int = typer.Option(-1, help="Repeat the run with this seed; -1: a fresh one."),
    device: str = typer.Option("", help=DEVICE_HELP),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Check an adapter against every clause of the contract.

    Exit code 1 where one is broken, or nothing could be shown. Ctrl-C shows the laws that were finished, exit code 130.
    """
    from qwen35.container import build

    if port not in _SETTINGS:
        raise UnknownNameError("port", port, _SETTINGS)
    settings = settings_in_force(device).model_copy(update={"gdn_fallback": None, "gdn_shadow": None})
    named: dict[str, Any] = dict.fromkeys(_SETTINGS[port], adapter)
    suite = Suite(port, lambda: build(settings, **named))
    reports = suite.run(examples=examples or None, profile=profile, clause=clause, seed=None if seed < 0 else seed)
    command = command_line(["qwen35", "conform", adapter], {
        "port": port, "examples": examples or None, "profile": profile or None, "clause": clause or None,
        "seed": None if seed < 0 else seed, "device": device or None,
    })  # fmt: skip
    result = document(suite.platform, port, adapter, reports, command, suite.interrupted)
    if as_json:
        typer.echo(json.dumps(result, indent=1, allow_nan=False))
    else:
        show(result)
    if suite.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not result["ok"]:
        raise typer.Exit(EXIT_BROKEN)


class Suite:
    """The laws of ``port`` against services of containers that ``make`` builds, a fresh one a law, so that what
    guards a deployment is judged with the adapter. Raises what ``make`` raises, before any law. ``interrupted``: Ctrl-C
    ended the run."""

    def __init__(self, port: str, make: Callable[[], Container]) -> None:
        self._port, self._make = port, make
        self._open, self.interrupted = [make()], False
        self.platform = self._open[0].platform()

    def run(self, *, examples: int | None, profile: str, clause: str, seed: int | None) -> list[LawReport]:
        """Every report; after Ctrl-C those of the laws that were finished."""
        from qwen35.container import close
        from qwen35.domain.capabilities import Clause
        from qwen35.testing.conformance import iter_laws, laws_of
        from qwen35.testing.limits import Profile

        only, sizes = _choice("clause", Clause, clause), _choice("profile", Profile, profile)
        reports = []
        with progress_bar() as bar:
            task = bar.add_task("laws", total=len(laws_of(self._port, only)))
            try:
                for report in iter_laws(
                    self._port, self._service, device=self.platform.device, profile=sizes, examples=examples,
                    only=only, counters=self._counters, seed=seed,
                ):  # fmt: skip
                    reports.append(report)
                    bar.update(task, advance=1, description=f"{report.clause}: {report.law}")
                    while self._open:
                        close(self._open.pop())
            except KeyboardInterrupt:
                self.interrupted = True
                errors().print("interrupted: showing the laws that were finished", style="yellow")
            finally:
                while self._open:
                    close(self._open.pop())
        return reports

    def _service(self) -> Any:
        container = self._make()
        self._open.append(container)
        return container.gated_delta_rule() if self._port == "gated_delta_rule" else container.short_convolution()

    def _counters(self) -> Counters:
        """Those of the container that made the latest service."""
        return self._open[-1].counters()


def _choice(kind: str, options: Any, name: str) -> Any:
    """The member of the enum ``options`` called ``name``; None for an empty name."""
    if not name:
        return None
    known = {str(member): member for member in options}
    if name not in known:
        raise UnknownNameError(kind, name, known)
    return known[name]


def document(
    platform: Platform, port: str, adapter: str, reports: list[LawReport], command: str, interrupted: bool = False
) -> dict[str, Any]:
    """What ``--json`` prints. ``command``: what ran; its laws have the seeds. ``ok``: every law was asked, something
    passed and nothing failed. ``fallback`` is None: none is configured. ``fallbacks`` counts the calls that one served
    all the same; a law with any has failed."""
    from qwen35.testing.conformance import LawStatus
    from qwen35.testing.machine import device_facts, versions

    passed = any(report.status is LawStatus.PASSED for report in reports)
    laws = [asdict(report) | {"clause": str(report.clause), "status": str(report.status)} for report in reports]
    return {
        "schema": SCHEMA, "kind": "conform", "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command, "port": port, "adapter": adapter,
        "ok": passed and not interrupted and all(report.ok for report in reports), "interrupted": interrupted,
        "fallback": None, "fallbacks": sum(report.fallbacks for report in reports),
        "device": device_facts(platform), "versions": versions(), "laws": laws,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """A table of laws, then what broke, with its smallest example."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("clause", "law", "result", "cases", "refused", title=f"{result['port']}: {result['adapter']}")
    for law in result["laws"]:
        status = f"[{_STYLES[law['status']]}]{law['status']}[/]"
        table.add_row(law["clause"], escape(law["law"]), status, str(law["examples"]), str(law["refused"]))
    output().print(table)
    for law in result["laws"]:
        if law["status"] == "passed":
            continue
        typer.echo(f"{law['clause']}, {law['law']}: {law['status']}: {law['reason']}")
        if law["example"]:
            typer.echo(f"  smallest example (seed {law['seed']}): {law['example']}")
    counts = {status: sum(law["status"] == status for law in result["laws"]) for status in _STYLES}
    typer.echo(", ".join(f"{count} {status}" for status, count in counts.items()))
    typer.echo(f"calls that a fallback served: {result['fallbacks']}")
    if not result["fallbacks"]:
        typer.echo(f"no fallback is configured: {result['adapter']} served every call itself or refused it")
