"""``torchrun -m qwen35 generate``: the ranks share the model, and one of them speaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from model.model_checkpoints import build

WORDS = ("--token-ids", "5,17,200,3,90", "--max-new-tokens", "4", "--device", "cpu")
REFERENCE = ("--gdn-decode", "reference", "--gdn-extend", "reference", "--gdn-verify", "reference",
             "--conv", "reference")  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """A mixture whose heads two ranks can share."""
    folder = tmp_path_factory.mktemp("shared")
    build("moe", seed).save_pretrained(folder)
    return folder


def torchrun(
    folder: Path, checkpoint: Path, *words: str | Path, command: tuple[str | Path, ...] = ("-m", "qwen35")
) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = (*command, "generate", checkpoint, *WORDS, *words)
    return subprocess.run(
        [sys.executable, *launcher, *map(str, words)], cwd=folder, env=environment, timeout=240,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_two_ranks_generate_and_compare_as_one_process_does_and_print_once(
    run: Any, checkpoint: Path, tmp_path: Path, seed: int
) -> None:
    files = [tmp_path / "two.safetensors", tmp_path / "one.safetensors"]
    words = (*REFERENCE, "--finalize", "reference", "--compare", "reference64")
    result = torchrun(tmp_path, checkpoint, *words, "--logits", files[0])
    assert result.returncode == 0, result.stderr
    for line in ("served by ", "ranks      2, fused finalize: reference", "reference64 on the same tokens"):
        assert result.stdout.count(line) == 1, result.stdout
    alone = run("generate", checkpoint, *WORDS, *REFERENCE, "--logits", files[1], "--json")
    report = json.loads(alone.stdout)
    assert (report["ranks"], report["finalized_by"]) == (1, None)
    two, one = (load_file(file) for file in files)
    assert str(two["tokens"].tolist())[1:-1] in result.stdout
    # Wiring, not rounding: the prompt is fixed and the weights are not, so a step may be an unsteady one.
    same = 1 + int((two["tokens"] == one["tokens"]).long().cumprod(0)[:-1].sum())
    errors = (two["logits"] - one["logits"])[:same].norm(dim=-1) / one["logits"][:same].norm(dim=-1)
    assert errors.max() < 1e-2, f"seed {seed}: {errors}"


#: What is left to run when the interpreter ends: threads of a process group would abort the process there, sometimes.
WATCHED = """
import atexit, os, pathlib
found = pathlib.Path("left-over." + os.environ["RANK"])
atexit.register(lambda: found.write_text(str([name for task in pathlib.Path("/proc/self/task").iterdir()
                                              if "gloo" in (name := (task / "comm").read_text().strip())])))
from qwen35.__main__ import main
main()
"""


def test_no_thread_of_the_process_group_outlives_the_command(checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    result = torchrun(tmp_path, checkpoint, *REFERENCE, "--finalize", "reference", command=(script,))
    assert result.returncode == 0, result.stderr
    # A file a rank: two that print into one pipe may cut into each other's lines.
    assert [(tmp_path / f"left-over.{rank}").read_text() for rank in range(2)] == ["[]", "[]"], result.stdout


def test_a_refusal_ends_every_rank(run: Any, checkpoint: Path) -> None:
    launch = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    for words, environment, said in (
        (("--device", "cuda:1"), launch, "each takes a GPU of its own"),
        (("--device", "cpu"), {**launch, "RANK": "2"}, "RANK must be a whole number in 0..1"),
        (("--device", "cpu", "--finalize", "refrence"), {}, "Did you mean 'reference'?"),
    ):
        result = run("generate", checkpoint, "--token-ids", "1", *words, env=environment)
        assert result.exit_code == 2, result.output
        assert said in result.stderr, result.stderr


def test_one_rank_alone_refuses_an_adapter_that_fuses_but_not_a_setting_that_names_one(
    run: Any, checkpoint: Path, tmp_path: Path
) -> None:
    words = ("generate", checkpoint, *WORDS[:2], "--max-new-tokens", "1", "--device", "cpu", *REFERENCE)
    for launch in ({}, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}):
        refused = run(*words, "--finalize", "reference", "--logits", "logits.safetensors", env=launch)
        assert refused.exit_code == 2, refused.output
        assert "--finalize reference fuses what several ranks do together, got one rank" in refused.stderr
        assert "torchrun --nproc-per-node 2" in refused.stderr
        assert not (tmp_path / "logits.safetensors").exists()
    for word in ("auto", "off"):
        assert run(*words, "--finalize", word).exit_code == 0
    assert run(*words, env={"QWEN35_FINALIZE": "reference"}).exit_code == 0
    (tmp_path / "qwen35.toml").write_text('finalize = "reference"\n')
    assert run(*words).exit_code == 0
