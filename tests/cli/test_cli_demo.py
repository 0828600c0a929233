"""``qwen35 demo``, the README's first command, whole: on a CPU Triton is interpreted in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors import safe_open
from torch import Tensor

import qwen35
from qwen35.cli.demo import (
    NEW_TOKENS,
    PROMPT,
    TOLERANCE,
    float32_products,
    judge,
    logit_error,
    make_checkpoint,
    written,
)
from qwen35.cli.swap_show import time_text
from qwen35.model import Model, Session, load_model
from qwen35.testing.measure import Method, relative_error


def served(folder: Path) -> dict[str, set[str]]:
    """By the adapter that was asked for, those that served."""
    found = {}
    for adapter in ("reference", "triton"):
        with safe_open(folder / f"{adapter}.safetensors", "pt") as file:
            by_phase = json.loads(file.metadata()["served_by"])
        assert {"decode", "extend"} <= by_phase.keys()
        found[adapter] = set(by_phase.values())
    return found


@pytest.mark.parametrize(
    ("errors", "wrong"),
    [({"triton": 1.0}, "triton by 1.0e+00"), ({"triton": float("nan")}, "triton by nan"),
     ({"reference": 2e-4, "triton": 1e-6}, "reference by 2.0e-04")],
)  # fmt: skip
def test_logits_that_differ_are_said_and_exit_with_1(
    capsys: pytest.CaptureFixture[str], errors: dict[str, float], wrong: str
) -> None:
    with pytest.raises(typer.Exit) as ended:
        judge(errors)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().out == f"logits differ from transformers' by more than 1e-04: {wrong}\n"


def test_demo_runs_both_adapters_against_transformers_and_swaps(run: Any, tmp_path: Path) -> None:
    result = run("demo", "--dir", tmp_path / "demo", env={"QWEN35_DEVICE": "cpu"})
    assert result.exit_code == 0, result.output
    assert "reference: tokens" in result.stdout
    assert "triton: tokens" in result.stdout
    assert "both adapters give transformers' logits within 1e-04" in result.stdout
    report = json.loads((tmp_path / "demo" / "swap" / "swap.json").read_text())
    assert report["interrupted"] is False
    assert {r["adapter"] for row in report["rows"] for r in row["results"] if r["ran"]} == {"triton", "reference"}
    assert served(tmp_path / "demo") == {"reference": {"reference"}, "triton": {"triton"}}
    assert (tmp_path / "demo" / "checkpoint" / "config.json").is_file()
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {
        path.relative_to(tmp_path / "demo").parts[0] for path in written(tmp_path / "demo")
    }


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", ["0", "1"], ids=["float32", "where the environment asks for TF32"])
def test_on_a_gpu_it_passes_and_its_table_has_triton_s_graph_replays(tmp_path: Path, tf32: str) -> None:
    folder = tmp_path / "demo"
    environment = {**os.environ, "QWEN35_DEVICE": "cuda", "COLUMNS": "160", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": tf32}
    done = subprocess.run(
        [sys.executable, "-m", "qwen35", "demo", "--dir", str(folder)], cwd=tmp_path, env=environment,
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)  # noqa: T201 - pytest shows the errors that were seen, with -s or -rP
    for said in ("reference: tokens", "triton: tokens", "both adapters give transformers' logits within 1e-04"):
        assert said in done.stdout
    assert "no GPU here" not in done.stdout
    report = json.loads((folder / "swap" / "swap.json").read_text())
    assert report["interrupted"] is False
    assert report["device"]["device"].startswith("cuda")
    assert served(folder) == {"reference": {"reference"}, "triton": {"triton"}}
    labels = [row["label"] for row in report["rows"]]
    assert [label.split()[0] for label in labels] == ["decode", "decode", "decode", "extend", "verify"], labels
    for row in report["rows"]:
        results = {result["adapter"]: result for result in row["results"]}
        assert {name for name, result in results.items() if result["ran"]} == {"triton", "reference"}, row
        ours = results["triton"]
        assert (ours["method"], ours["broken"], ours["deviations"]) == (Method.GRAPH, [], []), ours
        assert time_text(ours) in done.stdout


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    """As ``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1`` leaves it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("tf32_allowed")
def test_tf32_is_off_inside_and_allowed_again_after_it() -> None:
    with float32_products():
        assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(KeyError), float32_products():
        raise KeyError
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32_allowed")
def test_on_a_gpu_products_inside_are_of_float32(seed: int) -> None:
    source = torch.Generator("cuda").manual_seed(seed)
    a, b = (torch.randn(256, 256, device="cuda", generator=source) for _ in range(2))
    exact = a.double() @ b.double()
    with float32_products():
        inside = relative_error(a @ b, exact)
    assert inside < 1e-6, f"seed {seed}"
    assert relative_error(a @ b, exact) > 1e-5, f"TF32 was allowed and not used: this shows nothing; seed {seed}"


def plain_torch(checkpoint: Path) -> Model:
    return load_model(
        checkpoint, gated_delta_rule=qwen35.adapter("gated_delta_rule", "reference", device="cpu"),
        short_convolution=qwen35.adapter("short_convolution", "reference", device="cpu"), device="cpu",
        dtype=torch.float32, quiet=True,
    )  # fmt: skip


def generated(model: Model, tokens: list[int] | None = None) -> tuple[list[int], Tensor]:
    """The demo's tokens and logits [steps, vocabulary]; with ``tokens``, the logits where these were chosen."""
    model.prepare(max_batch=1, max_tokens=len(PROMPT))
    session = Session(model, slots=1, max_length=len(PROMPT) + NEW_TOKENS)
    slot = session.open()
    chosen, logits = list(tokens or []), [session.extend([slot], [PROMPT])[0].clone()]
    for step in range(NEW_TOKENS):
        if tokens is None:
            chosen.append(int(logits[-1].argmax()))
        if step + 1 < NEW_TOKENS:
            logits.append(session.decode([slot], [chosen[step]])[0].clone())
    return chosen, torch.stack(logits)


@torch.no_grad()
def test_the_bound_covers_products_of_three_tf32_and_none_of_one(tmp_path: Path) -> None:
    theirs = make_checkpoint(tmp_path, 0)  # the seed of ``make run``
    model = plain_torch(tmp_path)
    tokens, logits = generated(model)
    assert logit_error(theirs, tokens, logits) < TOLERANCE / 10
    weight, unit, gain = model.embed_tokens.weight, 2.0**-20, 0.0
    kept = weight.clone()
    for draw in range(4):
        signs = torch.randn(kept.shape, generator=torch.Generator().manual_seed(draw)).sign()
        weight.copy_(kept * (1 + unit * signs))
        moved = generated(model, tokens)[1]
        gain = max(gain, *(relative_error(x, y) / unit for x, y in zip(moved, logits, strict=True)))
    weight.copy_(kept)
    # Three products of TF32 are within 2**-21 of float32's; every layer of the four, all in one direction.
    assert 1 < gain < TOLERANCE / (len(model.config.layer_types) * 2.0**-21), f"gain {gain:.0f}"
    for parameter in model.parameters():
        if parameter.dim() >= 2 and parameter is not weight:
            # Eleven bits are what TF32 keeps of a factor.
            mantissa, exponent = torch.frexp(parameter)
            parameter.copy_(torch.ldexp((mantissa * 2**11).round() / 2**11, exponent))
    assert logit_error(theirs, *generated(model)) > TOLERANCE, "a model in TF32 passes for one in float32"


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
