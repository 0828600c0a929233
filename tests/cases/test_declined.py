"""Which declined cases are skipped: the folder's own hook, shown on tests that decline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DECLINES = """
import pytest
from qwen35.testing import Profile
from qwen35.testing.bench import Refused
from subjects import Subject

@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_declines(subject):
    raise Refused(["no"])

@pytest.fixture
def subject(name):
    return Subject("gated_delta_rule", name, Profile.GPU)

def test_has_no_subject():
    raise Refused(["no"])
"""


def test_a_declined_case_is_skipped_for_other_peoples_kernels_only(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(DECLINES)
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    command = ["env", f"PYTHONPATH={HERE.parent}", sys.executable, "-m", "pytest", "-rA", str(tmp_path)]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "2 failed, 1 skipped" in done.stdout, done.stdout
    assert "triton-gpu must serve every case of its limits, and declined: no" in done.stdout
    assert "declined: no" in done.stdout.partition("SKIPPED")[2]
