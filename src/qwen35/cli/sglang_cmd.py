"""``qwen35 sglang explain``: what the plugin would do inside SGLang on this machine, and why."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol

import typer

from qwen35.cli.framework import FrameworkCommand
from qwen35.cli.house import EXIT_FINDING
from qwen35.domain.errors import ConfigurationError

#: Each entry point is a function from a model directory ("": none) to an ``Explanation``.
ENGINES_GROUP = "qwen35.engines"
ENGINE = "sglang"


class Explanation(Protocol):
    """What a launch would do, in words, and whether it ends for what it was asked."""

    @property
    def text(self) -> str: ...
    @property
    def ends(self) -> bool: ...


app = typer.Typer(no_args_is_help=True, help="The plugin inside SGLang.")


@app.callback()
def root() -> None:
    """The plugin inside SGLang."""


@app.command(cls=FrameworkCommand)
def explain(
    model: str = typer.Option("", "--model", help="A model directory, to say what its sizes mean for each choice."),
) -> None:
    """Say what would serve each phase, for this machine, SGLang release and model, with reasons.

    Imports SGLang, to check that everything that the plugin hooks is where it expects it.

    Exit code 1 where a launch with these settings would end; 0 also where SGLang would run alone.
    """
    points = entry_points(group=ENGINES_GROUP, name=ENGINE)
    if not points:
        raise ConfigurationError(f"no entry point {ENGINE!r} of {ENGINES_GROUP}: install this package again")
    said: Explanation = next(iter(points)).load()(model)
    typer.echo(said.text)
    if said.ends:
        raise typer.Exit(EXIT_FINDING)
