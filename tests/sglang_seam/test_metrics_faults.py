"""Counters that cannot be written are said once, hold nothing else back, and are whole once they can be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_metrics import gathered

#: Counts while the directory is not there, then makes it. A second count has a name that no metric can have.
OUTAGE = """
import os, sys, time
from pathlib import Path
from qwen35.services.counters import Counters
from qwen35.adapters.sglang.seam_metrics import PrometheusMirror
counters = Counters()
mirror = PrometheusMirror(counters, period=0.02)
bad = sys.argv[1]
if bad:
    counters.add(bad, port="x")
counters.add("calls", port="gated_delta_rule")
mirror.start()
time.sleep(0.5)
directory = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
directory.mkdir(exist_ok=True)
counters.add("calls", port="gated_delta_rule")
file, until = directory / f"counter_{os.getpid()}.db", time.monotonic() + 20
while not (file.exists() and b"qwen35_calls" in file.read_bytes()) and time.monotonic() < until:
    time.sleep(0.02)
time.sleep(0.2)
os._exit(0)  # without a last copy: what is in the file came from the thread
"""


@pytest.mark.parametrize(
    ("there", "bad", "says"),
    [
        (False, "", "FileNotFoundError"), (True, "\ud800", "UnicodeEncodeError|ValueError"),
        (True, 5, "AttributeError"),
    ],
    ids=["no directory", "a bad name", "what nobody expected"],
)
def test_counters_go_on_after_a_failure(tmp_path: Path, there: bool, bad: object, says: str) -> None:
    directory = tmp_path / "metrics"
    if there:
        directory.mkdir()
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(directory)}
    code = OUTAGE.replace("sys.argv[1]", ascii(bad))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    said = [line for line in done.stderr.splitlines() if "qwen35: " in line]
    assert len(said) == 1, done.stderr
    assert any(kind in said[0] for kind in says.split("|")), said
    assert "PROMETHEUS_MULTIPROC_DIR" in said[0]
    assert "Traceback" not in done.stderr
    calls = [line for line in gathered(directory).splitlines() if line.startswith("qwen35_calls_total{")]
    assert [line.rpartition(" ")[2] for line in calls] == ["2.0"]
