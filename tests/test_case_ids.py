"""Ids in markers and lines of docs/cases.md are the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MARKERS = {"row": "## Rows", "case": "## Cases"}


def used(kind: str) -> set[str]:
    """The ids that markers of this kind name anywhere in tests."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"pytest.mark.{kind}":
                found.update(ids_of(node, path))
    return found


def ids_of(call: ast.Call, path: Path) -> Iterator[str]:
    for argument in call.args:
        assert isinstance(argument, ast.Constant), f"{path.name}: an id must be spelled out: {ast.unparse(call)}"
        yield str(argument.value)


def described(kind: str) -> list[str]:
    """The ids that have a line in the section of this kind."""
    text = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    section = text.partition(f"\n{MARKERS[kind]}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([A-Z]\d+) \| .*\w.* \|$", section, re.MULTILINE)


@pytest.mark.parametrize("kind", MARKERS)
def test_every_id_of_a_marker_has_a_line_and_every_line_a_test(kind: str) -> None:
    lines = described(kind)
    assert len(lines) == len(set(lines)), "an id twice"
    assert sorted(used(kind) - set(lines)) == [], "ids that docs/cases.md does not describe"
    assert sorted(set(lines) - used(kind)) == [], "lines of docs/cases.md without a test"
