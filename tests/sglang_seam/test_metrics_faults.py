"""Counters that cannot be written are said once, with the cause, hold nothing else back, and are whole once they can
be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_faults import lines
from test_metrics import gathered

from qwen35.adapters.sglang.seam_metrics import PrometheusMirror
from qwen35.services.counters import Counters

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


DIRECTORY = "(PROMETHEUS_MULTIPROC_DIR) must be a directory that this process can write to"
REPORT = "no directory is at fault; report that"


@pytest.mark.parametrize(
    ("there", "bad", "counter", "says", "do"),
    [
        (False, "", "'calls'", "FileNotFoundError", DIRECTORY),
        (True, "\ud800", r"'\ud800'", "UnicodeEncodeError|ValueError", REPORT),
        (True, 5, "5", "AttributeError", REPORT),
    ],
    ids=["no directory", "a bad name", "what nobody expected"],
)
def test_counters_go_on_after_a_failure(
    tmp_path: Path, there: bool, bad: object, counter: str, says: str, do: str
) -> None:
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
    assert f"the counter {counter} stands still" in said[0]
    assert [one for one in (DIRECTORY, REPORT) if one in said[0]] == [do], "what to do fits the cause"
    assert (f"{str(directory)!r} {DIRECTORY}" in said[0]) is (do == DIRECTORY)
    assert "Traceback" not in done.stderr
    calls = [line for line in gathered(directory).splitlines() if line.startswith("qwen35_calls_total{")]
    assert [line.rpartition(" ")[2] for line in calls] == ["2.0"]


class FailingMirror(PrometheusMirror):
    """Fails for some counters, and copies none."""

    def __init__(self, counters: Counters, causes: dict[str, Exception]) -> None:
        super().__init__(counters)
        self._causes = causes

    def _copy_one(self, key: tuple[str, tuple[tuple[str, str], ...]], _: int) -> None:
        if key[0] in self._causes:
            raise self._causes[key[0]]


def test_a_second_cause_is_said_beside_one_that_lasts(caplog: pytest.LogCaptureFixture) -> None:
    causes: dict[str, Exception] = {"first": ValueError("no such name")}
    counters = Counters()
    for name in ("first", "second", "third"):
        counters.add(name)
    mirror = FailingMirror(counters, causes)
    mirror.copy()
    causes |= dict.fromkeys(("second", "third"), PermissionError("not yours"))
    mirror.copy()
    mirror.copy()
    del causes["first"]
    mirror.copy()
    causes["first"] = ValueError("again")
    mirror.copy()
    said = [(DIRECTORY in text, re.findall("the counter '(.*)' stands", text)) for text in lines(caplog)]
    assert said == [(False, ["first"]), (True, ["second"]), (False, ["first"])]
