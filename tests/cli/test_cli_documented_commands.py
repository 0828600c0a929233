"""Every command in the documents parses: a renamed option cannot stay behind in the text."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from torch.distributed.run import get_args_parser
from typer.core import TyperGroup

from qwen35.cli.main import app
from qwen35.settings import ENVIRONMENT_PREFIX, Settings

ROOT = Path(__file__).parents[2]
COMMANDS = ("doctor", "swap", "generate", "conform", "demo", "sglang")
#: What stands in a document for one of a script's choices.
PLACEHOLDERS = {"SUITE": "small"}
_ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=\S*")
_SCRIPT = re.compile(r"benchmarks/\w+\.py")


def documented() -> list[tuple[str, str]]:
    """(file, command line) of every line of a code block and every span of code in a table that is a command of ours.

    A backslash continues a line; variables may stand before a command.
    """
    found = []
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]:
        text = path.read_text(encoding="utf-8")
        lines = []
        for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            lines += block.replace("\\\n", " ").splitlines()
        for row in re.findall(r"^\|.*\|$", text, re.MULTILINE):
            lines += re.findall(r"`([^`]+)`", row)
        found += [(path.name, line.removeprefix("$ ").strip()) for line in lines if is_command(line)]
    return found


def is_command(line: str) -> bool:
    """Whether this is a command that ``parse`` can judge, and not code that only looks like one."""
    words = line.removeprefix("$ ").split()
    with_settings = bool(words) and words[0].startswith(ENVIRONMENT_PREFIX)
    while words and _ASSIGNMENT.fullmatch(words[0]):
        del words[0]
    if len(words) < 2:
        return False
    script = words[0] == "python" and words[1].startswith("benchmarks/")
    return with_settings or script or words[0] in ("qwen35", "torchrun", "make")


def parse(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What kind of command it was. Raises what its parser raises, ``KeyError`` for an unknown command or variable."""
    words = shlex.split(line, comments=True)
    while assigned := _ASSIGNMENT.fullmatch(words[0]):
        name = assigned[1]
        if name.startswith(ENVIRONMENT_PREFIX):
            _ = Settings.model_fields[name.removeprefix(ENVIRONMENT_PREFIX).lower()]
        del words[0]
    if words[0] == "torchrun":
        options = get_args_parser().parse_args(words[1:])
        assert options.module, "torchrun takes a file where -m is not given"
        parse_ours([options.training_script, *options.training_script_args])
    elif words[0] == "python" and _SCRIPT.fullmatch(words[1]):
        parse_script(ROOT / words[1], [PLACEHOLDERS.get(word, word) for word in words[2:]], monkeypatch)
    elif words[0] == "qwen35":
        parse_ours(words)
    elif words[0] == "make":
        made = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
    else:
        assert words[:3] == ["python", "-m", "sglang.launch_server"], "what does this command belong to?"
    return words[0]


def parse_ours(words: list[str]) -> None:
    name, *words = words
    assert name == "qwen35"
    command: Any = typer.main.get_command(app)
    while isinstance(command, TyperGroup) and words:
        name, *words = words
        command = command.commands[name]
    command.make_context(name, words)


class Parsed(Exception):  # noqa: N818 - the script's own parser took its arguments
    """Ends a script where its work would begin."""


def parse_script(script: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own parser on ``words``: it runs up to there, and no further."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: Any) -> NoReturn:
        parse_args(self, *given)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.syspath_prepend(script.parent)
        patch.setattr(sys, "argv", [str(script), *words])
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        if "typer.run(main)" in script.read_text(encoding="utf-8"):
            one = typer.Typer()
            one.command()(runpy.run_path(str(script))["main"])
            typer.main.get_command(one).make_context(script.name, words)
            return
        with pytest.raises(Parsed):
            runpy.run_path(str(script), run_name="__main__")


def test_every_documented_command_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for file, line in documented():
        try:
            seen.add(parse(line, monkeypatch))
        except (Exception, SystemExit, AssertionError) as exc:  # noqa: BLE001 - whatever the parser raises names the line
            pytest.fail(f"{file}: {line}: {exc!r}")
    assert seen == {"qwen35", "torchrun", "python", "make"}, "a kind of command is no longer found in the documents"
    assert any(line.startswith("QWEN35_") for _, line in documented())


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        ("qwen35 swap --gnd triton", Exception, r"[Nn]o such option"),
        ("qwen35 swop", KeyError, "swop"),
        ("qwen35 sglang explian", KeyError, "explian"),
        ("QWEN35_GDN_DECOED=triton qwen35 doctor", KeyError, "gdn_decoed"),
        ("QWEN35_GDN_DECODE=triton qwen35 doctr", KeyError, "doctr"),
        ("torchrun --nproc-per-node 2 -m qwen35 doctr", KeyError, "doctr"),
        ("torchrun --processes 2 -m qwen35 doctor", SystemExit, "2"),
        ("torchrun --nproc-per-node 2 -m qwen35 swap --fusoin all", Exception, r"[Nn]o such option"),
        ("python benchmarks/finalize.py --pears nccl", SystemExit, "2"),
        ("python benchmarks/engine_suite.py SUIT --out DIR", SystemExit, "2"),
        ("python benchmarks/gpu_report.py --ot DIR -- tests", Exception, r"[Nn]o such option"),
        ("python benchmarks/finalise.py", FileNotFoundError, "finalise"),
    ],
)
def test_a_command_that_is_not_there_would_be_noticed(
    line: str, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_command(line)
    with pytest.raises(error, match=said):
        parse(line, monkeypatch)


def test_doctor_and_a_small_swap_run_as_documented(run: Any, tmp_path: Path) -> None:
    ours = [shlex.split(line, comments=True) for _, line in documented() if line.startswith("qwen35 ")]
    assert ["qwen35", "doctor"] in ours
    doctor = run("doctor", env={"QWEN35_DEVICE": "cpu"})
    assert doctor.exit_code == 0, doctor.output
    documented_swap = next(words for words in ours if words[1] == "swap")
    small = ("--gdn", "reference", "--decode-batches", "1", "--prefill", "", "--verify", "", "--repeats", "1")
    swap = run(*documented_swap[1:], *small, "--device", "cpu", "--out", tmp_path / "swap")
    assert swap.exit_code == 0, swap.output
    assert "decode 1: reference" in swap.stdout
    assert (tmp_path / "swap" / "swap.json").is_file()


@pytest.mark.parametrize("words", [("doctor",), ("swap",), ("conform",), ("sglang", "explain")])
def test_help_says_what_the_exit_codes_mean(run: Any, words: tuple[str, ...]) -> None:
    told = " ".join(run(*words, "--help").stdout.split())
    assert "exit code 1 where" in told.lower()
    codes = " ".join(run("--help").stdout.split())
    assert re.search("Exit codes: 0, done; 1, done, and the answer is no.*; 2, an error: .*; 130, Ctrl-C", codes)


def test_the_help_lists_every_command() -> None:
    group = typer.main.get_command(app)
    assert set(group.commands) == set(COMMANDS)  # type: ignore[attr-defined]
