"""The benchmarks are scripts beside one another, not a package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def _extras_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test brings into this process and its children, later tests must not find."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
