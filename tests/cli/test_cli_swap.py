"""``qwen35 swap`` on the CPU, small."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen35.cli.parse import token_dtype
from qwen35.cli.swap import Request, make_rows
from qwen35.cli.swap_show import error_text, time_text
from qwen35.domain.errors import UnknownNameError

SMALL = ("--device", "cpu", "--decode-batches", "1,3", "--prefill", "1x5,2x3", "--verify", "2x3", "--repeats", "2")


def swap(run: Any, checkpoint: Path, out: Path, *words: str) -> Any:
    return run("swap", "--model", checkpoint, *SMALL, "--out", out, *words)


def load(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "swap.json").read_text())
    return report


def results(report: dict[str, Any], label: str) -> dict[str, dict[str, Any]]:
    (row,) = [row for row in report["rows"] if row["label"] == label]
    return {result["adapter"]: result for result in row["results"]}


def test_swap_measures_every_row_and_writes_json_and_plot(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    result = swap(run, checkpoint, tmp_path / "out", "--gdn", "reference,reference64", "--seed", "7")
    assert result.exit_code == 0, result.output
    report = load(tmp_path / "out")
    assert (report["schema"], report["kind"], report["interrupted"], report["seed"]) == (1, "swap", False, 7)
    assert report["geometry"] == {
        "name": checkpoint.name, "tp": 1, "key_heads": 1, "value_heads": 2, "key_width": 16, "value_width": 16,
    }  # fmt: skip
    assert [row["label"] for row in report["rows"]] == ["decode 1", "decode 3", "extend 1x5+2x3", "verify 2x3"]
    assert report["copy_gb_per_s"] > 0
    for row in report["rows"]:
        for measured in row["results"]:
            assert measured["ran"]
            assert measured["time_us"] > 0
            assert measured["percent_of_ceiling"] > 0
            assert 0 <= measured["output_error"] <= measured["output_bound"], (row["label"], measured)
            assert 0 <= measured["state_error"] <= measured["state_bound"], (row["label"], measured)
    assert (tmp_path / "out" / "swap.png").read_bytes().startswith(b"\x89PNG")
    assert "decode 3" in result.stdout


def test_bytes_are_states_read_and_written_and_tokens(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    assert swap(run, checkpoint, tmp_path / "out", "--gdn", "reference").exit_code == 0
    bytes_of = {row["label"]: row["bytes"] for row in load(tmp_path / "out")["rows"]}
    state = 2 * 16 * 16 * 4  # HV * V * K, float32
    token = (2 * 1 * 16 + 2 * 2 * 16 + 2 * 2) * 4  # q, k, v, out, a, b in float32
    assert bytes_of == {
        "decode 1": 2 * state + token, "decode 3": 6 * state + 3 * token,
        "extend 1x5+2x3": 6 * state + 11 * token, "verify 2x3": (2 + 6) * state + 6 * token,
    }  # fmt: skip


def test_the_recorded_command_has_what_was_emptied() -> None:
    words = shlex.split(Request(prefill="", verify="").command())
    for option in ("--prefill", "--verify"):
        assert words[words.index(option) + 1] == ""
    assert "--gdn" not in words


def test_the_recorded_command_repeats_the_experiment(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    words = ("--gdn", "reference", "--seed", "3", "--state-dtype", "bfloat16")
    assert swap(run, checkpoint, tmp_path / "one", *words).exit_code == 0
    command = load(tmp_path / "one")["command"].split()
    assert command[:2] == ["qwen35", "swap"]
    assert run(*command[1:], "--out", tmp_path / "two").exit_code == 0
    first, second = load(tmp_path / "one"), load(tmp_path / "two")
    assert first["command"] == second["command"]
    for a, b in zip(first["rows"], second["rows"], strict=True):
        assert a["lengths"] == b["lengths"]
        # The same seed gives the same calls: the errors agree to the last bit.
        for left, right in zip(a["results"], b["results"], strict=True):
            assert (left["output_error"], left["state_error"]) == (right["output_error"], right["state_error"])


@pytest.mark.usefixtures("third_party")
def test_a_spoilt_adapter_never_wins_and_its_clause_is_named(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    names = "clamping,loud,modest,crashing,plain"
    result = swap(run, checkpoint, tmp_path / "out", "--gdn", names, "--prefill", "", "--verify", "")
    assert result.exit_code == 1, result.output
    report = load(tmp_path / "out")
    found = results(report, "decode 3")
    assert {b["clause"] for b in found["clamping"]["broken"]} >= {"padding"}
    assert {b["clause"] for b in found["loud"]["broken"]} >= {"precision"}
    assert math.isclose(found["loud"]["output_error"], 0.1, rel_tol=0.01)
    assert not found["modest"]["ran"]
    assert found["modest"]["reasons"] == ["token dtype requires float64"]
    assert found["crashing"]["reasons"] == ["IndexError: a bug of another package"]
    assert not found["plain"]["broken"]
    assert {row["winner"] for row in report["rows"]} == {"plain"}
    assert "broke padding: slot 0 was written for a row with slot -1" in result.stdout


@pytest.mark.usefixtures("third_party")
def test_an_adapter_with_right_outputs_and_wrong_states_is_over_its_bound_and_never_wins(
    run: Any, checkpoint: Path, tmp_path: Path
) -> None:
    result = swap(run, checkpoint, tmp_path / "out", "--gdn", "drifting,plain")
    assert result.exit_code == 1, result.output
    report = load(tmp_path / "out")
    for row in report["rows"]:
        drifting, plain = row["results"]
        assert 0 < drifting["output_error"] <= drifting["output_bound"], row["label"]
        assert drifting["state_error"] > drifting["state_bound"], row["label"]
        assert math.isclose(drifting["state_error"], 0.01, rel_tol=0.01), row["label"]
        assert {broken["clause"] for broken in drifting["broken"]} == {"precision"}, row["label"]
        assert all("state error" in broken["seen"] for broken in drifting["broken"]), row["label"]
        assert not plain["broken"], row["label"]
        assert row["winner"] == "plain", row["label"]


@pytest.mark.usefixtures("third_party")
def test_an_output_of_another_dtype_or_shape_breaks_a_clause_in_every_phase(
    run: Any, checkpoint: Path, tmp_path: Path
) -> None:
    words = ("--gdn", "widening,flattening,plain", "--dtype", "bfloat16")
    result = swap(run, checkpoint, tmp_path / "out", *words)
    assert result.exit_code == 1, result.output
    report = load(tmp_path / "out")
    assert {row["phase"] for row in report["rows"]} == {"decode", "extend", "verify"}
    for row in report["rows"]:
        widening, flattening, plain = row["results"]
        assert widening["output_error"] <= widening["output_bound"], f"only its dtype is wrong: {row}"
        for spoilt, got in ((widening, "float32 ["), (flattening, "bfloat16 [")):
            (broken,) = spoilt["broken"]
            assert broken["clause"] == "precision", row
            assert "the output must be bfloat16 [" in broken["seen"], row
            assert f"got {got}" in broken["seen"], row
        assert not flattening["ran"], row
        assert not plain["broken"], row
        assert row["winner"] == "plain", row


def test_percent_of_the_ceiling_is_the_floor_over_the_time(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    words = ("--gdn", "reference,reference64", "--prefill", "", "--verify", "", "--decode-batches", "64,256")
    assert swap(run, checkpoint, tmp_path / "out", *words).exit_code == 0
    report = load(tmp_path / "out")
    for row in report["rows"]:
        assert math.isclose(row["floor_us"], row["bytes"] / report["copy_gb_per_s"] / 1e3, rel_tol=0.05), row["label"]
        for measured in row["results"]:
            # Times are rounded to 0.01 microseconds, percents to four digits.
            off = 0.006 / row["floor_us"] + 0.006 / measured["time_us"] + 0.001
            expected = 100 * row["floor_us"] / measured["time_us"]
            assert math.isclose(measured["percent_of_ceiling"], expected, rel_tol=off), (row, measured)


@pytest.mark.usefixtures("third_party")
def test_ctrl_c_keeps_what_was_measured(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    result = swap(run, checkpoint, tmp_path / "out", "--gdn", "plain,interrupted")
    assert result.exit_code == 130, result.output
    report = load(tmp_path / "out")
    assert report["interrupted"] is True
    (row,) = report["rows"]
    assert row["label"] == "decode 1"
    assert [r["adapter"] for r in row["results"]] == ["plain"]
    assert row["results"][0]["time_us"] > 0
    assert (tmp_path / "out" / "swap.png").is_file()


@pytest.mark.usefixtures("third_party")
def test_a_kernel_that_takes_the_process_down_leaves_what_was_measured_and_a_trace(
    checkpoint: Path, tmp_path: Path
) -> None:
    words = ["swap", "--model", checkpoint, *SMALL, "--out", tmp_path / "out", "--gdn", "plain,fatal"]
    paths = os.pathsep.join(map(str, (tmp_path / "site", Path(__file__).parent)))
    died = subprocess.run(
        [sys.executable, "-m", "qwen35", *map(str, words)], env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert died.returncode == -signal.SIGSEGV, died.stderr
    assert "in decode" in died.stderr
    report = load(tmp_path / "out")
    assert report["interrupted"] is True
    assert [[r["adapter"] for r in row["results"]] for row in report["rows"]] == [["plain"]]


@pytest.mark.usefixtures("third_party")
def test_ctrl_c_before_anything_was_measured_replaces_nothing(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for earlier in (None, "a full report"):
        if earlier is not None:
            (out / "swap.json").write_text(earlier)
        result = swap(run, checkpoint, out, "--gdn", "interrupted,plain", "--overwrite")
        assert result.exit_code == 130, result.output
        assert result.stderr.strip() == "interrupted before anything was measured"
        assert "wrote" not in result.stdout
        assert [path.name for path in out.iterdir()] == ([] if earlier is None else ["swap.json"])
    assert (out / "swap.json").read_text() == "a full report"


def test_a_document_is_replaced_whole(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "swap.json").write_text("earlier")
    (tmp_path / "same").hardlink_to(out / "swap.json")
    words = ("--gdn", "reference", "--prefill", "", "--verify", "", "--decode-batches", "1")
    assert swap(run, checkpoint, out, *words, "--overwrite").exit_code == 0
    assert load(out)["rows"]
    assert (tmp_path / "same").read_text() == "earlier", "written in place, a second Ctrl-C leaves half of it"
    assert sorted(path.name for path in out.iterdir()) == ["swap.json", "swap.png"]


def test_an_adapter_that_cannot_run_here_is_shown_with_its_reason(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    words = ("--gdn", "triton,reference", "--prefill", "", "--verify", "", "--decode-batches", "1")
    assert swap(run, checkpoint, tmp_path / "out", *words).exit_code == 0
    found = results(load(tmp_path / "out"), "decode 1")
    assert not found["triton"]["ran"]
    assert found["triton"]["reasons"]
    assert found["triton"]["time_us"] is None


def test_a_row_that_nobody_wins_is_a_finding(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    words = ("--gdn", "triton", "--prefill", "", "--verify", "", "--decode-batches", "1")
    result = swap(run, checkpoint, tmp_path / "out", *words)
    assert result.exit_code == 1, result.output
    assert "decode 1: nobody" in result.stdout
    assert not load(tmp_path / "out")["interrupted"]
    assert swap(run, checkpoint, tmp_path / "out", *words).exit_code == 2, "refused is not found"


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize("columns", [80, 120])
def test_no_value_is_cut_at_any_width(run: Any, checkpoint: Path, tmp_path: Path, columns: int) -> None:
    words = [str(word) for word in (checkpoint, *SMALL)]
    result = run("swap", "--model", *words, "--gdn", "drifting,reference64,plain", "--out", tmp_path / "out",
                 env={"COLUMNS": str(columns)})  # fmt: skip
    table = result.stdout.partition("decode 1: ")[0].splitlines()
    assert max(map(len, table)) <= columns, result.stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.stdout
    for row in load(tmp_path / "out")["rows"]:
        for at, measured in enumerate(row["results"]):
            values = (
                measured["adapter"], time_text(measured), f"{measured['percent_of_ceiling']:.3g} %",
                error_text(measured["output_error"]), error_text(measured["state_error"]),
            )  # fmt: skip
            whole = r"\s+".join(map(re.escape, values))
            broke = r"\s+precision" if columns > 80 and measured["broken"] else ""
            before = rf"{re.escape(row['label'])}\s+" if at == 0 else r"\s+"
            shown = re.search(before + whole + broke + r"\s*$", "\n".join(table), re.MULTILINE)
            assert shown, (columns, values, result.stdout)
    assert "drifting, decode: broke precision: state error" in result.stdout


def test_without_matplotlib_there_is_no_plot_and_it_says_so(
    run: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ("--gdn", "reference", "--prefill", "", "--verify", "", "--decode-batches", "1")
    result = swap(run, checkpoint, tmp_path / "out", *words)
    assert result.exit_code == 0, result.output
    assert "no plot: matplotlib is not installed" in result.stdout
    assert load(tmp_path / "out")["rows"]
    assert not (tmp_path / "out" / "swap.png").exists()


def test_a_model_and_a_public_geometry_are_refused_together(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    result = swap(run, checkpoint, tmp_path / "out", "--gdn", "reference", "--geometry", "35B-A3B")
    assert result.exit_code == 2, result.output
    assert "--model and --geometry each give a geometry, got both" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [(), ("--fusion", "reference")])
def test_an_earlier_document_is_replaced_only_where_asked(
    run: Any, checkpoint: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "swap.json").write_text("earlier")
    words = more or ("--model", str(checkpoint), *SMALL[:4], "--prefill", "", "--verify", "", "--gdn", "reference")
    refused = run("swap", *words, "--out", out)
    assert refused.exit_code == 2, refused.output
    assert "give --overwrite to replace it" in refused.stderr
    assert (out / "swap.json").read_text() == "earlier"
    if not more:
        assert run("swap", *words, "--out", out, "--overwrite").exit_code == 0
        assert load(out)["rows"]


def test_the_table_shows_how_far_rounds_were_apart(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    words = ("--gdn", "reference", "--prefill", "", "--verify", "", "--decode-batches", "3")
    result = swap(run, checkpoint, tmp_path / "out", *words)
    measured = results(load(tmp_path / "out"), "decode 3")["reference"]
    (shown,) = re.findall(r"([\d.,]+) \+-([\d.,]+)", result.stdout)
    time, spread = (float(number.replace(",", "")) for number in shown)
    assert math.isclose(time, measured["time_us"], abs_tol=0.06)
    assert math.isclose(spread, measured["spread_us"], abs_tol=0.06)


def test_a_row_that_is_named_twice_is_measured_once() -> None:
    rows = make_rows("1,2,1", "2x3;3,3;4", "2x2,2x2")
    assert [row.label for row in rows] == ["decode 1", "decode 2", "extend 2x3", "extend 1x4", "verify 2x2"]


def test_a_token_dtype_that_is_not_known_lists_auto_too() -> None:
    with pytest.raises(UnknownNameError, match="known: auto, bfloat16, float16, float32"):
        token_dtype("foo", "cpu")


def test_an_out_that_cannot_be_a_folder_is_refused_before_measuring(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("mine")
    for out in (file, file / "below"):
        result = swap(run, checkpoint, out, "--gdn", "reference")
        assert result.exit_code == 2, result.output
        assert "--out must be a folder that can be made" in result.stderr
    assert file.read_text() == "mine"


@pytest.mark.gpu
def test_on_a_gpu_decode_is_replayed_and_stays_under_the_ceiling(run: Any, tmp_path: Path) -> None:
    words = ("--gdn", "triton", "--decode-batches", "1,64", "--prefill", "1x64", "--verify", "2x3")
    result = run("swap", "--geometry", "35B-A3B", *words, "--device", "cuda", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for row in load(tmp_path / "out")["rows"]:
        (measured,) = row["results"]
        assert measured["ran"], measured
        assert not measured["broken"], measured
        if row["phase"] != "extend":
            assert measured["method"].startswith("CUDA graph replay")
        assert measured["percent_of_ceiling"] < 105, measured
