"""``qwen35 generate`` on a checkpoint that transformers wrote."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_third_party import CLOSED, DTYPES
from safetensors.torch import load_file

import qwen35
from qwen35.cli.demo import TOLERANCE, make_checkpoint
from qwen35.model import GenerateOptions, Sampling, load_model
from qwen35.model import generate as continue_prompts
from word_tokenizer import write_tokenizer

PROMPT = "5,17,200,3,90"
BASE = ("--token-ids", PROMPT, "--max-new-tokens", "4", "--device", "cpu", "--gdn-decode", "reference",
        "--gdn-extend", "reference", "--gdn-verify", "reference", "--conv", "reference")  # fmt: skip


def generate(run: Any, checkpoint: Path, *words: str | Path) -> dict[str, Any]:
    result = run("generate", checkpoint, *BASE, *words, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def by_the_library(checkpoint: Path, sampling: Sampling) -> list[int]:
    model = load_model(
        checkpoint, gated_delta_rule=qwen35.adapter("gated_delta_rule", "reference", device="cpu"),
        short_convolution=qwen35.adapter("short_convolution", "reference", device="cpu"), dtype=torch.float32,
        quiet=True,
    )  # fmt: skip
    options = GenerateOptions(max_new_tokens=4, sampling=sampling, quiet=True)
    return list(continue_prompts(model, [[int(t) for t in PROMPT.split(",")]], options)[0].tokens)


def test_it_gives_what_the_library_gives_and_says_who_served(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    report = generate(run, checkpoint, "--logits", tmp_path / "logits.safetensors")
    assert report["prompt"] == [5, 17, 200, 3, 90]
    assert report["tokens"] == by_the_library(checkpoint, Sampling())
    assert report["served_by"]["decode"] == report["served_by"]["extend"] == "reference"
    assert report["compare"] is None
    saved = load_file(tmp_path / "logits.safetensors")
    assert saved["tokens"].tolist() == saved["logits"].argmax(-1).tolist() == report["tokens"]


def test_a_text_is_continued_and_the_continuation_shown(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with tokenizer"
    shutil.copytree(checkpoint, folder)
    words = {f"w{i}": i for i in range(json.loads((folder / "config.json").read_text())["vocab_size"])}
    write_tokenizer(folder, words, "w0")
    tokens = by_the_library(checkpoint, Sampling())
    result = run("generate", folder, "--prompt", "w5 w17 w200 w3 w90", *BASE[2:])
    assert result.exit_code == 0, result.output
    assert " ".join(f"w{token}" for token in tokens) in result.stdout.splitlines()
    assert f"tokens     {', '.join(map(str, tokens))} (length)" in result.stdout.splitlines()


def test_sampling_options_reach_the_sampler(run: Any, checkpoint: Path) -> None:
    words = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--seed", "11")
    expected = by_the_library(checkpoint, Sampling(temperature=1.5, top_k=50, top_p=0.9, seed=11))
    assert generate(run, checkpoint, *words)["tokens"] == expected


def test_compare_with_an_equal_adapter_finds_no_differing_token(run: Any, checkpoint: Path, seed: int) -> None:
    compare = generate(run, checkpoint, "--compare", "reference64")["compare"]
    assert compare["adapter"] == "reference64"
    assert compare["first_difference"] is compare["token"] is None, f"seed {seed}: {compare}"
    assert [step["step"] for step in compare["steps"]] == [0, 1, 2, 3]
    for step in compare["steps"]:
        assert 0 < step["relative_error"] < 1e-3, f"seed {seed}: {compare}"
        assert step["max_error"] > 0


#: How far logits of one step may be apart. What bfloat16 rounds these few narrow layers magnify; those of another
#: network would be 1.4 apart.
APART = {"float32": TOLERANCE, "bfloat16": 0.5}


@pytest.mark.parametrize(("adapter", "device", "dtype"), [
    ("reference64", "cpu", "float32"),
    *(pytest.param("triton", "cuda", dtype, marks=pytest.mark.gpu) for dtype in ("float32", "bfloat16", "")),
])  # fmt: skip
def test_compare_gives_the_reference_the_tokens_that_an_adapter_chose(
    run: Any, tmp_path: Path, adapter: str, device: str, dtype: str
) -> None:
    make_checkpoint(tmp_path / "checkpoint", 0)  # the demo's, over whose rounding its bound is derived
    words = [f"--gdn-{phase}={adapter}" for phase in ("decode", "extend", "verify")]
    words += [f"--conv={adapter}", f"--device={device}", *([f"--dtype={dtype}"] if dtype else [])]
    result = run("generate", tmp_path / "checkpoint", *BASE[:4], *words, "--compare", "reference",
                 "--logits", tmp_path / "logits.safetensors", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["served_by"]["decode"], report["served_by"]["extend"]) == (adapter, adapter)
    assert len(report["tokens"]) == 4
    compare, apart = report["compare"], APART[dtype or "bfloat16"]  # a GPU's default
    assert compare["adapter"] == "reference"
    errors = [step["relative_error"] for step in compare["steps"]]
    assert [step["step"] for step in compare["steps"]] == [0, 1, 2, 3]
    assert all(math.isfinite(error) and error < apart for error in errors), errors
    assert max(errors) > 0, "another adapter gives the very same bits: was it asked?"
    if dtype == "float32":
        assert compare["first_difference"] is compare["token"] is None, compare
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    assert logits.shape == (4, 256)
    assert logits.argmax(-1).tolist() == report["tokens"]


@pytest.mark.usefixtures("third_party")
def test_ctrl_c_is_one_word_and_exit_code_130(run: Any, checkpoint: Path) -> None:
    CLOSED.clear()
    result = run("generate", checkpoint, *BASE, "--gdn-decode", "interrupted")
    assert result.exit_code == 130, result.output
    assert result.stderr.strip() == "interrupted"
    assert set(CLOSED) == {"Interrupted"}


@pytest.mark.usefixtures("third_party")
def test_adapters_are_closed_when_it_is_done(run: Any, checkpoint: Path) -> None:
    CLOSED.clear()
    generate(run, checkpoint, "--gdn-decode", "plain", "--compare", "loud")
    assert set(CLOSED) == {"Delegate", "Loud"}


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize("served", ["generation", "comparison"])
@pytest.mark.parametrize("states", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", ["float32", "bfloat16"])
def test_states_and_tokens_have_the_dtypes_that_settings_say(
    run: Any, checkpoint: Path, served: str, states: str, tokens: str
) -> None:
    DTYPES.clear()
    ours = ("--gdn-decode", "recording", "--gdn-extend", "recording")
    words = ours if served == "generation" else ("--compare", "recording")
    environment = {"QWEN35_STATE_DTYPE": states}
    result = run("generate", checkpoint, *BASE, *words, "--dtype", tokens, env=environment)
    assert result.exit_code == 0, result.output
    assert len(DTYPES) == 1 + 3 * 4  # a plan; the first token and three more, in three layers
    assert set(DTYPES) == {(getattr(torch, states), getattr(torch, tokens))}


@pytest.mark.usefixtures("third_party")
def test_compare_names_the_first_differing_token(run: Any, checkpoint: Path, seed: int, tmp_path: Path) -> None:
    report = generate(run, checkpoint, "--compare", "reversing", "--logits", tmp_path / "a.safetensors")
    compare = report["compare"]
    errors = [step["relative_error"] for step in compare["steps"]]
    # The spoilt adapter prefills rightly: step 0 comes from the prompt, the decodes after it are wrong.
    assert errors[0] < 1e-5, f"seed {seed}: {errors}"
    assert min(errors[1:]) > 1e-3, f"seed {seed}: {errors}"
    # What the same spoilt adapter generates by itself differs first at the reported step, in the reported token.
    spoilt = run("generate", checkpoint, *BASE[:6], "--gdn-decode", "reversing", "--conv", "reference", "--json")
    alone = json.loads(spoilt.stdout)["tokens"]
    pairs = list(zip(report["tokens"], alone, strict=True))
    differing = [i for i, (left, right) in enumerate(pairs) if left != right]
    assert compare["first_difference"] == (differing[0] if differing else None), f"seed {seed}: {pairs}"
    if differing:
        assert compare["token"] == alone[differing[0]]


def test_table_shows_steps_and_verdict(run: Any, checkpoint: Path) -> None:
    result = run("generate", checkpoint, *BASE, "--compare", "reference64")
    assert result.exit_code == 0, result.output
    assert "reference64 on the same tokens" in result.stdout
    assert "no differing token in 4 steps" in result.stdout


def test_bad_input_is_refused_by_name(run: Any, checkpoint: Path) -> None:
    for words, said in (
        (("--token-ids", "999999"), "token id in 0.."),
        (("--token-ids", "-1"), "token ids (0 or more) joined by commas, got '-1'"),
        (("--token-ids", "1", "--dtype", "foo"), "dtype = 'foo': Input should be 'auto', 'float32', 'bfloat16' or"),
        (("--prompt", "hello"), "tokenizer"),
        (("--token-ids", "1", "--temperature", "-1"), "temperature"),
        (("--token-ids", "1", "--compare", "refrence64"), "Did you mean 'reference64'?"),
    ):
        result = run("generate", checkpoint, "--device", "cpu", *words)
        assert result.exit_code == 2, result.output
        assert said in result.stderr, result.stderr
