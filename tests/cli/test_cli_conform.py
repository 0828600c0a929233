"""``qwen35 conform``: the built-in reference passes, another package's broken adapter does not."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cli_third_party import CLOSED, PORT, Delegate

from qwen35 import build
from qwen35.cli.conform import Suite, document, show
from qwen35.domain.capabilities import Clause, Support
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.adapter import AdapterEntry
from qwen35.ports.gated_delta_rule import DecodeCall
from qwen35.testing import laws_of


class Declining(Delegate):
    """Declines a decode when it is called, so that the service's fallback serves it."""

    def decode(self, call: DecodeCall) -> Any:
        raise UnsupportedError("decode", ["a better day"])


def test_reference_passes_clause_by_clause_without_a_fallback(run: Any) -> None:
    result = run("conform", "reference", "--clause", "padding", "--examples", "3", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert report["command"] == (
        "qwen35 conform reference --port gated_delta_rule --examples 3 --clause padding --device cpu"
    )
    assert datetime.now(UTC) - datetime.fromisoformat(report["created"]) < timedelta(minutes=10)
    assert report["fallback"] is None
    assert report["laws"]
    for law in report["laws"]:
        assert law["clause"] == "padding"
        assert law["status"] == "passed", law
        assert law["examples"] > 0
        assert law["fallbacks"] == 0
    assert report["fallbacks"] == 0


def test_short_convolution_has_laws_of_its_own(run: Any) -> None:
    words = ("--port", "short_convolution", "--clause", "write slots", "--examples", "2", "--device", "cpu")
    result = run("conform", "reference", *words)
    assert result.exit_code == 0, result.output
    assert "short_convolution: reference" in result.stdout
    assert "calls that a fallback served: 0\n" in result.stdout
    assert "no fallback is configured" in result.stdout


@pytest.mark.usefixtures("third_party")
def test_a_broken_adapter_of_another_package_fails_with_its_smallest_example(run: Any) -> None:
    words = ("conform", "clamping", "--clause", "padding", "--examples", "20", "--device", "cpu")
    result = run(*words, "--json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is False
    failed = [law for law in report["laws"] if law["status"] == "failed"]
    assert len(failed) == 1, failed
    assert failed[0]["law"].startswith("decode")
    assert failed[0]["example"]
    assert failed[0]["reason"]
    table = run(*words)
    assert table.exit_code == 1
    assert "smallest example (seed" in table.stdout


@pytest.mark.usefixtures("third_party")
def test_every_container_is_closed_with_all_that_it_made(run: Any) -> None:
    CLOSED.clear()
    words = ("--clause", "padding", "--examples", "1", "--device", "cpu", "--json")
    laws = json.loads(run("conform", "plain", *words).stdout)["laws"]
    assert len(CLOSED) >= len(laws) + 1, "a container a law, and the one that told the device"


def test_what_a_fallback_served_is_counted_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    entry = AdapterEntry(
        port=PORT, name="declining", summary="", probe=lambda _: Support.of(), create=lambda *_: Declining()
    )
    suite = Suite(PORT, lambda: build(
        adapters=[entry], device="cpu", gdn_decode="declining", gdn_extend="reference", gdn_verify="reference",
        gdn_fallback="reference", conv="reference",
    ))  # fmt: skip
    reports = suite.run(examples=2, profile="", clause="empty", seed=None)
    result = document(suite.platform, PORT, "declining", reports, "qwen35 conform declining")
    counts = {law["law"]: law["fallbacks"] for law in result["laws"]}
    assert counts.pop("decode: no sequences at all") == 2, counts
    assert set(counts.values()) == {0}, counts
    assert (result["ok"], result["fallbacks"]) == (False, 2)
    show(result)
    shown = capsys.readouterr().out
    assert "calls that a fallback served: 2\n" in shown
    assert "no fallback is configured" not in shown


@pytest.mark.usefixtures("third_party")
def test_ctrl_c_shows_the_laws_that_were_finished(run: Any) -> None:
    CLOSED.clear()
    words = ("conform", "interrupted", "--clause", "verify", "--examples", "2", "--device", "cpu")
    result = run(*words, "--json")
    assert result.exit_code == 130, result.output
    assert "interrupted" in result.stderr
    report = json.loads(result.stdout)
    assert (report["ok"], report["interrupted"]) == (False, True)
    # The last law of the clause decodes, which is where Ctrl-C comes.
    assert [law["law"] for law in report["laws"]] == [law.name for law in laws_of(PORT, Clause.VERIFY)][:-1]
    assert "Interrupted" in CLOSED
    table = run(*words)
    assert table.exit_code == 130
    assert "the accepted node is copied" in table.stdout


def test_a_suite_that_could_show_nothing_has_not_passed(run: Any) -> None:
    result = run("conform", "reference", "--clause", "capture", "--device", "cpu", "--json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert {law["status"] for law in report["laws"]} == {"skipped"}
    assert all(law["reason"] for law in report["laws"])
