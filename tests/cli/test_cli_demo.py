"""``qwen35 demo``, the README's first command, whole: on a CPU Triton is interpreted in processes of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen35.cli.demo import written


def test_demo_runs_both_adapters_against_transformers_and_swaps(run: Any, tmp_path: Path) -> None:
    result = run("demo", "--dir", tmp_path / "demo", env={"QWEN35_DEVICE": "cpu"})
    assert result.exit_code == 0, result.output
    assert "reference: tokens" in result.stdout
    assert "triton: tokens" in result.stdout
    assert "both adapters give transformers' logits within 1e-04" in result.stdout
    report = json.loads((tmp_path / "demo" / "swap" / "swap.json").read_text())
    assert report["interrupted"] is False
    assert {r["adapter"] for row in report["rows"] for r in row["results"] if r["ran"]} == {"triton", "reference"}
    assert (tmp_path / "demo" / "checkpoint" / "config.json").is_file()
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {
        path.relative_to(tmp_path / "demo").parts[0] for path in written(tmp_path / "demo")
    }


def test_without_transformers_it_says_what_to_install(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run("demo", env={"QWEN35_DEVICE": "cpu"})
    assert result.exit_code == 2, result.output
    assert "pip install 'qwen35[report]'" in result.stderr


@pytest.mark.parametrize("held", ["checkpoint/config.json", "swap/swap.json", "triton.safetensors"])
def test_what_an_earlier_demo_left_is_replaced_only_where_asked(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    path = tmp_path / "demo" / held
    path.parent.mkdir(parents=True)
    path.write_text("earlier")
    refused = run("demo", "--dir", tmp_path / "demo", env={"QWEN35_DEVICE": "cpu"})
    assert refused.exit_code == 2, refused.output
    assert "--dir already holds" in refused.stderr
    assert "give --overwrite to replace it" in refused.stderr
    assert path.read_text() == "earlier"
    assert [p for p in (tmp_path / "demo").rglob("*") if p.is_file()] == [path]
    monkeypatch.setitem(sys.modules, "transformers", None)  # stands for going on, and quickly
    asked = run("demo", "--dir", tmp_path / "demo", "--overwrite", env={"QWEN35_DEVICE": "cpu"})
    assert "pip install 'qwen35[report]'" in asked.stderr


def test_ctrl_c_is_one_word_and_exit_code_130(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qwen35", "demo", "--dir", str(tmp_path / "demo")]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("2. generate"):
            process.send_signal(signal.SIGINT)
            break
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "interrupted"
    assert "Traceback" not in said
