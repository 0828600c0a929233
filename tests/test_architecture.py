"""The tree is the architecture: the lint passes, it can fail, and the drawing is what the code says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("domain/geometry.py", "import torch"),
        ("services/counters.py", "import qwen35.container"),
        ("services/counters.py", "import triton"),
        ("adapters/reference/entries.py", "import qwen35.adapters.triton.entries"),
        ("cli/main.py", "import qwen35.adapters.reference.entries"),
    ],
)
def test_the_lint_fails_on_a_forbidden_import(tmp_path: Path, module: str, line: str) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    target = tmp_path / "src/qwen35" / module
    target.write_text(target.read_text() + f"\n{line}\n")
    lint = "import sys; sys.path.insert(0, 'src'); import importlinter.cli as cli; cli.lint_imports_command()"
    result = run(sys.executable, "-c", lint, "--no-cache", cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout


def test_the_drawing_is_fresh() -> None:
    result = run(sys.executable, "tools/draw_architecture.py", "--check")
    assert result.returncode == 0, result.stderr


@pytest.mark.row("A01")
@pytest.mark.row("I03")
def test_importing_the_library_and_listing_adapters_imports_no_kernel_package() -> None:
    code = """
import sys
import qwen35, qwen35.domain.capabilities
assert "torch" not in sys.modules, "the domain needs no framework"
import qwen35.container, qwen35.model, qwen35.services.registry as registry
from qwen35.domain.platform import Platform
known = registry.AdapterRegistry(Platform(device="cpu", device_name="CPU"))
names = {port: known.names(port) for port in known.ports()}
assert "reference" in names["gated_delta_rule"], names
heavy = {"flashinfer", "sglang", "cutlass", "aiter"} & set(sys.modules)
assert not heavy, heavy
"""
    result = run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
