"""Run the tests that need a GPU and commit-ready report what happened: one JSON, one line a test that did not pass.

    python benchmarks/gpu_report.py --out results/laws_triton.json -- tests/laws tests/cases -k triton

What stands behind ``--`` goes to pytest; with pytest-xdist installed add ``-n 12``. After ``--limit`` seconds pytest is
interrupted, and the report holds what it got to, marked as interrupted; ``--after REPORT`` then runs what is left.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from qwen35.services.platform import detect_platform
from qwen35.testing.machine import device_facts, versions

ROOT = Path(__file__).parents[1]
MAX_MESSAGE = 2000


def main(
    pytest_arguments: Annotated[list[str], typer.Argument(help="Behind --: what to run.")],
    out: Annotated[Path, typer.Option(help="The JSON to write.")],
    limit: Annotated[int, typer.Option(help="Seconds after which pytest is interrupted.")] = 600,
    after: Annotated[list[Path] | None, typer.Option(help="Reports whose passed tests are left out.")] = None,
) -> None:
    """Run pytest -m gpu and write the report; exits as pytest did."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        fixed = ["-m", "pytest", "-m", "gpu", "-q", "--tb=short", f"--junitxml={junit}"]
        fixed += [f"--deselect={test}" for report in after or () for test in passed(report)]
        process = subprocess.Popen([sys.executable, *fixed, *pytest_arguments], cwd=ROOT)
        interrupted = False
        try:
            process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            interrupted = True
            process.send_signal(signal.SIGINT)
            process.wait()
        tests = read(junit) if junit.exists() else []
    report = {
        "kind": "gpu tests", "created": datetime.now(UTC).isoformat(timespec="seconds"), "interrupted": interrupted,
        "command": shlex.join(["pytest", "-m", "gpu", *pytest_arguments]), "after": [path.name for path in after or ()],
        "device": device_facts(detect_platform()),
        "versions": versions(), "counts": dict(Counter(test["outcome"] for test in tests)), "tests": tests,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    typer.echo(f"{out}: {report['counts']}")
    raise typer.Exit(process.returncode)


def passed(report: Path) -> list[str]:
    """Pytest's ids of the tests that passed by ``report``."""
    found = []
    for test in json.loads(report.read_text(encoding="utf-8"))["tests"]:
        module, _, name = test["test"].partition("::")
        if test["outcome"] == "passed":
            found.append(f"{module.replace('.', '/')}.py::{name}")
    return found


def read(junit: Path) -> list[dict[str, Any]]:
    """Name, outcome, seconds and message of every test in a JUnit file that ended.

    Tests under way when pytest was interrupted stand in it without a name and without a failure.
    """
    found = []
    for case in ElementTree.parse(junit).iter("testcase"):
        if not case.get("name"):
            continue
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if problem is None else problem.tag
        message = "" if problem is None else (problem.get("message") or "")[:MAX_MESSAGE]
        if problem is not None and problem.get("type") == "pytest.xfail":
            outcome = "deviates"
        found.append({
            "test": f"{case.get('classname')}::{case.get('name')}", "outcome": outcome,
            "seconds": round(float(case.get("time") or 0), 2), "message": message,
        })  # fmt: skip
    return found


if __name__ == "__main__":
    typer.run(main)
