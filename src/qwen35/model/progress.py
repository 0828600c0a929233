"""The progress bars of loading and generating."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(quiet: bool) -> Progress:
    """A bar on standard error that vanishes when done; ``quiet`` shows nothing."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=quiet,
    )  # fmt: skip
