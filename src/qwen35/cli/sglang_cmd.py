"""``qwen35 sglang explain``: what the plugin would do inside SGLang on this machine, and why."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

from qwen35.cli.framework import FrameworkCommand
from qwen35.domain.errors import ConfigurationError

#: Each entry point is a function from a model directory ("": none) to a text.
ENGINES_GROUP = "qwen35.engines"
ENGINE = "sglang"

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
    """
    points = entry_points(group=ENGINES_GROUP, name=ENGINE)
    if not points:
        raise ConfigurationError(f"no entry point {ENGINE!r} of {ENGINES_GROUP}: install this package again")
    typer.echo(next(iter(points)).load()(model))
