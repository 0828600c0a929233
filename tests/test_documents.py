"""What the documents show in Python runs as it is written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from qwen35.cli.demo import make_checkpoint

ROOT = Path(__file__).parents[1]


def snippets(text: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def readme_snippets() -> tuple[str, str]:
    """The README's one call of a kernel, and its whole model."""
    call, model = snippets((ROOT / "README.md").read_text(encoding="utf-8"))
    return call, model


def ran(code: str, folder: Path, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    """``code`` in a process of its own."""
    command = ["env", f"QWEN35_DEVICE={device}", "OMP_NUM_THREADS=1", sys.executable, "-c", code]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_readmes_python_serves_a_call_without_a_gpu(tmp_path: Path) -> None:
    done = ran(readme_snippets()[0], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "reference served (2, 32, 128)\n"


@pytest.mark.gpu
def test_the_readmes_python_serves_a_call_on_a_gpu(tmp_path: Path) -> None:
    done = ran(readme_snippets()[0], tmp_path, "cuda")
    assert done.returncode == 0, done.stderr
    assert "served (2, 32, 128)" in done.stdout


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_readmes_python_generates_with_a_model(tmp_path: Path, device: str, seed: int) -> None:
    make_checkpoint(tmp_path / "MODEL_DIR", seed)
    done = ran(readme_snippets()[1], tmp_path, device)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    for line in lines:
        finish, tokens, text = re.fullmatch(r"(\w+) (\(.*\)) (\w+)", line).groups()  # type: ignore[union-attr]
        assert (finish, text) == ("length", "None"), line
        assert len(tokens.split(", ")) == 16, line


RESULTS = ROOT / "benchmarks" / "results"
#: JSON files that are no results: a checkpoint's, and what ``qwen35 swap`` writes wherever it is told.
OTHERS = {"config.json", "swap.json"}


def results_named(text: str) -> set[str]:
    """The results that a document names: in backticks, as links, by the marks of tables that are made from them.

    Patterns such as ``engine_*.json`` are among them.
    """
    tables = {f"{name}.json" for name in re.findall(r"<!-- table: ([^ ]+) -->", text)}
    shown = re.findall(r"[`(](?:results/)?([\w.*?\[\]-]+\.json)[`)#]", text)
    return (tables | set(shown)) - OTHERS


def unnamed_and_absent(text: str, files: set[str]) -> tuple[list[str], list[str]]:
    """Files that no name in ``text`` covers, and names in ``text`` that cover no file."""
    named = results_named(text)
    unnamed = sorted(file for file in files if not any(fnmatch(file, name) for name in named))
    return unnamed, sorted(name for name in named if not any(fnmatch(file, name) for file in files))


def test_every_result_is_named_where_results_are_explained_and_every_named_one_is_there() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    unnamed, absent = unnamed_and_absent(text, {path.name for path in RESULTS.glob("*.json")})
    assert unnamed == [], "benchmarks/README.md must name each of benchmarks/results"
    assert absent == [], "benchmarks/README.md names results that are not there"


#: By result, what it lacks, as benchmarks/README.md says.
LACKING = {
    "conform_triton.json": {"created", "command"}, "prefill_tiles.json": {"created", "command", "versions"},
    "oracle_flashinfer.json": {"device"},
}  # fmt: skip


def lacking(result: dict[str, Any]) -> set[str]:
    """What a reader needs to judge a result by, and it does not hold. Of engines the suite's command counts."""
    keys = result.keys() | ({"command"} if "suite_command" in result else set())
    return {"created", "command", "versions", "device"} - keys


def test_every_result_holds_device_versions_date_and_command() -> None:
    found = {path.name: lacking(json.loads(path.read_text(encoding="utf-8"))) for path in RESULTS.glob("*.json")}
    assert {name: keys for name, keys in found.items() if keys} == LACKING
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert [name for name in LACKING if name not in text.split("\n\n")[1]] == []


def test_a_result_without_command_is_noticed() -> None:
    whole = dict.fromkeys(("created", "command", "versions", "device"), "")
    assert lacking(whole) == set()
    assert lacking({key: "" for key in whole if key != "command"}) == {"command"}
    assert lacking({key: "" for key in whole if key != "command"} | {"suite_command": ""}) == set()


def test_a_result_that_was_interrupted_is_called_so_where_it_is_cited() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    cut = [p.name for p in RESULTS.glob("*.json") if json.loads(p.read_text(encoding="utf-8")).get("interrupted")]
    assert cut == [name for name in cut if called_interrupted(text, name)]


def called_interrupted(text: str, name: str) -> bool:
    """Whether a paragraph or point that names a result says that it was interrupted."""
    points = re.split(r"\n(?=- )|\n\n", text)
    return any(name in point and "interrupted" in point for point in points)


def test_an_interrupted_result_that_passes_for_a_whole_one_is_noticed() -> None:
    text = "- `a.json`: 9 passed; interrupted.\n- `b.json`: 9 passed\n\n`c.json` was interrupted"
    assert [name for name in ("a.json", "b.json", "c.json") if called_interrupted(text, name)] == ["a.json", "c.json"]


def test_a_result_that_is_not_named_and_a_name_without_a_result_are_noticed() -> None:
    text = "`results/swap_*.json`, [tiles](results/tiles.json), `laws.json`; `results/gone.json`, `swap.json`, x.json\n"
    text += "<!-- table: host -->\n"
    assert results_named(text) == {"swap_*.json", "tiles.json", "laws.json", "gone.json", "host.json"}
    files = {"swap_a.json", "swap_b.json", "tiles.json", "laws.json", "host.json", "new.json"}
    assert unnamed_and_absent(text, files) == (["new.json"], ["gone.json"])
