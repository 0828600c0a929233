"""The report of a GPU test run says how each test ended, deviations apart from skips."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_report.py"
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.laws.test_laws" name="test_law[a]" time="1.25"/>
<testcase classname="tests.laws.test_laws" name="test_law[b]" time="0.5"><failure message="state of slot 0">trace</failure></testcase>
<testcase classname="tests.laws.test_laws" name="test_law[c]" time="0"><skipped type="pytest.skip" message="no tree"/></testcase>
<testcase classname="tests.laws.test_laws" name="test_law[d]" time="0"><skipped type="pytest.xfail" message="as stated"/></testcase>
<testcase time="0"/>
</testsuite></testsuites>
"""  # noqa: E501


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_a_later_run_leaves_out_what_passed_and_nothing_else(module: ModuleType, tmp_path: Path) -> None:
    tests = [
        {"test": "tests.laws.test_laws::test_law[a: b::c]", "outcome": "passed"},
        {"test": "tests.laws.test_laws::test_law[d]", "outcome": "failure"},
    ]
    (tmp_path / "one.json").write_text(json.dumps({"tests": tests}))
    assert module.passed(tmp_path / "one.json") == ["tests/laws/test_laws.py::test_law[a: b::c]"]


def test_outcomes_and_messages_are_read_from_junit(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    tests = module.read(tmp_path / "junit.xml")
    assert [test["outcome"] for test in tests] == ["passed", "failure", "skipped", "deviates"]
    assert tests[0]["test"] == "tests.laws.test_laws::test_law[a]"
    assert tests[0]["seconds"] == 1.25
    assert tests[1]["message"] == "state of slot 0"
