"""Every ``qwen35`` command in the documents parses: a renamed option cannot stay behind in the text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from qwen35.cli.main import app

ROOT = Path(__file__).parents[2]
COMMANDS = ("doctor", "swap", "generate", "conform", "demo", "sglang")


def documented() -> list[tuple[str, str]]:
    """(file, command line) of every line of a code block that begins with qwen35; a backslash continues a line."""
    found = []
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^```[a-z]*\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                words = line.removeprefix("$ ").strip()
                if words.startswith("qwen35 "):
                    found.append((path.name, words))
    return found


def parse(line: str) -> None:
    name, *words = shlex.split(line, comments=True)
    command: Any = typer.main.get_command(app)
    while isinstance(command, TyperGroup) and words:
        name, *words = words
        command = command.commands[name]
    command.make_context(name, words)


def test_every_documented_command_parses() -> None:
    for file, line in documented():
        try:
            parse(line)
        except Exception as exc:  # noqa: BLE001 - whatever the parser raises names the line
            pytest.fail(f"{file}: {line}: {exc}")


def test_a_command_that_is_not_there_would_be_noticed() -> None:
    with pytest.raises(Exception, match=r"[Nn]o such option"):
        parse("qwen35 swap --gnd triton")
    with pytest.raises(KeyError):
        parse("qwen35 swop")
    with pytest.raises(KeyError):
        parse("qwen35 sglang explian")


def test_the_help_lists_every_command() -> None:
    group = typer.main.get_command(app)
    assert set(group.commands) == set(COMMANDS)  # type: ignore[attr-defined]
