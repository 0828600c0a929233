"""What the documents show in Python runs as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def snippets(text: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def ran(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``code`` in a process of its own, on a CPU."""
    command = ["env", "QWEN35_DEVICE=cpu", "OMP_NUM_THREADS=1", sys.executable, "-c", code]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_readmes_python_serves_a_call_without_a_gpu(tmp_path: Path) -> None:
    (snippet,) = snippets((ROOT / "README.md").read_text(encoding="utf-8"))
    done = ran(snippet, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "reference served (2, 32, 128)\n"


@pytest.mark.gpu
def test_the_readmes_python_serves_a_call_on_a_gpu(tmp_path: Path) -> None:
    (snippet,) = snippets((ROOT / "README.md").read_text(encoding="utf-8"))
    done = subprocess.run([sys.executable, "-c", snippet], check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "served (2, 32, 128)" in done.stdout
