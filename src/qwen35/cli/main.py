"""The command line: ``qwen35 doctor | swap | generate | conform | demo | sglang``.

Commands live in modules of their own and import frameworks when they run, so that ``--help`` stays quick.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from qwen35 import __version__
from qwen35.cli import conform, demo, doctor, generate, sglang_cmd, swap
from qwen35.cli.framework import FrameworkCommand
from qwen35.cli.house import EXIT_INTERRUPTED
from qwen35.cli.screen import errors
from qwen35.domain.errors import Qwen35Error

EXIT_ERROR = 2


class _Group(TyperGroup):
    """Shows every error of ours as one red line and exits with ``EXIT_ERROR``; Ctrl-C ends in ``EXIT_INTERRUPTED``."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the words of the command line."""
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            raise _interrupted() from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Qwen35Error as exc:
            errors().print(f"error: {' '.join(str(exc).split())}", style="bold red", markup=False, soft_wrap=True)
            raise typer.Exit(EXIT_ERROR) from exc
        except KeyboardInterrupt:
            raise _interrupted() from None


def _interrupted() -> typer.Exit:
    errors().print("interrupted", style="yellow")
    return typer.Exit(EXIT_INTERRUPTED)


app = typer.Typer(
    name="qwen35", cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Qwen3.5 on kernels you choose, and the choice proved.",
    epilog="Exit codes: 0, done; 1, done, and the answer is no: a command's own help says what that is; 2, an error: "
    "words, settings or files that cannot be taken, or work that failed; 130, Ctrl-C.",
)  # fmt: skip
app.command(cls=FrameworkCommand)(doctor.doctor)
app.command(cls=FrameworkCommand)(swap.swap)
app.command(cls=FrameworkCommand)(generate.generate)
app.command(cls=FrameworkCommand)(conform.conform)
app.command(cls=FrameworkCommand)(demo.demo)
app.add_typer(sglang_cmd.app, name="sglang")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qwen35 {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Qwen3.5 on kernels you choose, and the choice proved."""
