"""What both swap experiments show in the same way: a table with winners in green, times, errors, the plot's outcome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from qwen35.domain.errors import UnavailableError

if TYPE_CHECKING:
    from rich.table import Table

TEXT_COLUMNS = ("row", "adapter", "bits")


def winners_table(
    report: dict[str, Any], title: str, caption: str, columns: tuple[str, ...], cells: Callable[[Any], tuple[str, ...]]
) -> Table:
    """The rich table of a document: a line a result, ``cells(result)`` after its row and adapter, winners in green."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("row", "adapter", *columns):
        shown.add_column(name, no_wrap=True, justify="left" if name in TEXT_COLUMNS else "right")
    shown.add_column("broke", min_width=10)
    for row in report["rows"]:
        for at, result in enumerate(row["results"]):
            style = "green" if result["adapter"] == row["winner"] else None
            line = (row["label"] if at == 0 else "", result["adapter"], *cells(result))
            shown.add_row(*map(escape, line), style=style)
        shown.add_section()
    return shown


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
