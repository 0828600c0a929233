"""Consoles, tables and progress bars that the commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def output() -> Console:
    """Results. Made when used, so that it writes to whatever stdout is then."""
    from rich.console import Console

    return Console()


def errors() -> Console:
    """Errors and progress."""
    from rich.console import Console

    return Console(stderr=True)


def progress_bar() -> Progress:
    """A bar on stderr with a count and the time left; nothing is drawn where stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = errors()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
