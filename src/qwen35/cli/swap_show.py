"""What both swap experiments show in the same way: a table with winners in green, times, errors, the plot's outcome;
and what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from qwen35.cli.screen import output
from qwen35.domain.errors import UnavailableError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TEXT_COLUMNS = ("row", "adapter", "bits")


def show_winners(
    report: dict[str, Any], title: str, caption: str, columns: tuple[str, ...], cells: Callable[[Any], tuple[str, ...]]
) -> None:
    """Print the table of a document: a line a result, ``cells(result)`` after its row and adapter, winners in green.

    ``columns`` are the cells' names, those that matter most first; one more cell says what is broken. On a screen too
    narrow for that each row's label is a line of its own, what is broken is left to the remarks, and as many of the
    last columns are left out as must be: no value is ever cut.
    """
    console = output()
    shown = _wide(report, columns, cells)
    left = columns
    if _least_width(console, shown) > console.width:
        shown = _narrow(report, left, cells)
        while len(left) > 1 and _least_width(console, shown) > console.width:
            left = left[:-1]
            shown = _narrow(report, left, cells)
    missing = columns[len(left) :]
    shown.title = title
    shown.caption = caption + (f" Too narrow for: {', '.join(missing)}; the document has all." if missing else "")
    console.print(shown)


def _wide(report: dict[str, Any], columns: tuple[str, ...], cells: Callable[[Any], tuple[str, ...]]) -> Table:
    shown = _table(("row", "adapter", *columns))
    shown.add_column("broke", min_width=10)
    for row in report["rows"]:
        for at, result in enumerate(row["results"]):
            label = row["label"] if at == 0 else ""
            _add(shown, (label, result["adapter"], *cells(result)), _style(row, result), whole=len(columns) + 2)
        shown.add_section()
    return shown


def _narrow(report: dict[str, Any], columns: tuple[str, ...], cells: Callable[[Any], tuple[str, ...]]) -> Table:
    shown = _table(("adapter", *columns))
    shown.columns[0].no_wrap = False  # for the labels, which may be long
    for row in report["rows"]:
        _add(shown, (row["label"],), "bold", whole=0)
        for result in row["results"]:
            line = (f"  {result['adapter']}", *cells(result)[: len(columns)])
            _add(shown, line, _style(row, result), whole=len(line))
        shown.add_section()
    return shown


def _table(columns: tuple[str, ...]) -> Table:
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in TEXT_COLUMNS else "right"
        shown.add_column(name, no_wrap=True, min_width=len(name), justify=justify)
    return shown


def _add(table: Table, line: tuple[str, ...], style: str | None, whole: int) -> None:
    """Add a line, and leave room for the first ``whole`` of its cells, which rich would else cut at a space."""
    from rich.cells import cell_len
    from rich.markup import escape

    for column, cell in zip(table.columns, line[:whole], strict=False):
        column.min_width = max(column.min_width or 0, cell_len(cell))
    table.add_row(*map(escape, line), style=style)


def _style(row: dict[str, Any], result: dict[str, Any]) -> str | None:
    return "green" if result["adapter"] == row["winner"] else None


def _least_width(console: Console, table: Table) -> int:
    """Of the table with every value whole, however narrow the screen is."""
    endless = console.options.update(width=10**6)
    return console.measure(table, options=endless).minimum


def finding(report: dict[str, Any], broken: Callable[[Any], Iterable[str]]) -> bool:
    """Whether an adapter broke a clause, one of ``broken(result)``, that it does not state, or nobody won a row."""
    for row in report["rows"]:
        for result in row["results"]:
            stated = {deviation.partition(":")[0] for deviation in result["deviations"]}
            if not stated.issuperset(broken(result)):
                return True
    return any(row["winner"] is None for row in report["rows"])


def time_text(result: dict[str, Any]) -> str:
    """The median time, and how far the medians of the rounds were apart, by which a tie is judged; microseconds."""
    time, spread = result["time_us"], result["spread_us"]
    digits = 1 if spread >= 0.1 else 2
    return f"{time:,.{digits}f} +-{spread:,.{digits}f}"


def error_text(value: float | None) -> str:
    """A relative error in two digits; None: not finite."""
    return "not finite" if value is None else f"{value:.1e}"


def write_plot(plot: Callable[[dict[str, Any], Path], None], report: dict[str, Any], path: Path) -> None:
    """Draw a report that has rows, and say where it is, or why there is none."""
    if not report["rows"]:
        return
    try:
        plot(report, path)
    except UnavailableError as exc:
        typer.echo(f"no plot: {'; '.join(exc.reasons)}")
    else:
        typer.echo(f"wrote {path}")
