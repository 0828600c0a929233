"""Results name the code that they measured: a digest of the package's own files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import qwen35
from qwen35.testing.machine import source_digest, versions

PACKAGE = Path(qwen35.__file__).parent


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package in a folder of another name."""
    return shutil.copytree(PACKAGE, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))


def test_versions_name_the_code_and_a_copy_of_it_has_the_same_name(copied: Path) -> None:
    named = versions()["qwen35_source"]
    assert named is not None
    assert re.fullmatch("[0-9a-f]{12}", named)
    assert source_digest(copied) == source_digest(PACKAGE)


def test_what_is_no_code_of_ours_does_not_count(copied: Path) -> None:
    before = source_digest(copied)
    (copied / "notes.txt").write_text("x")
    (copied / "__pycache__").mkdir()
    (copied / "__pycache__" / "errors.cpython-311.pyc").write_bytes(b"x")
    assert source_digest(copied) == before


def test_every_change_of_a_file_changes_it_and_its_undoing_brings_it_back(copied: Path) -> None:
    before, file = source_digest(copied), copied / "domain" / "errors.py"
    content = file.read_bytes()
    seen = {before}
    file.write_bytes(content.replace(b"e", b"f", 1))
    seen.add(source_digest(copied))
    file.write_bytes(content + b"\n")
    seen.add(source_digest(copied))
    moved = file.rename(file.with_name("mistakes.py"))
    moved.write_bytes(content)
    seen.add(source_digest(copied))
    (copied / "domain" / "new.py").touch()
    seen.add(source_digest(copied))
    assert len(seen) == 5
    (copied / "domain" / "new.py").unlink()
    moved.rename(file)
    assert source_digest(copied) == before


def test_bytes_that_move_from_one_file_to_the_next_change_it(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"xb.py")
    (tmp_path / "b.py").write_bytes(b"y")
    before = source_digest(tmp_path)
    (tmp_path / "a.py").write_bytes(b"x")
    (tmp_path / "b.py").write_bytes(b"b.pyy")
    assert source_digest(tmp_path) != before
