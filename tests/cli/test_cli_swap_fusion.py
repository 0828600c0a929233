"""``torchrun -m qwen35 swap --fusion``: ranks compare the fused finalize's adapters, and one of them speaks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from qwen35.cli.swap_fusion import FusionRequest, experiment_of, measure, shapes_of, sizes_of
from qwen35.cli.swap_show import error_text, time_text
from qwen35.domain.capabilities import Support
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import FusionCapabilities, FusionClause
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.model import TensorParallel
from qwen35.ports.adapter import AdapterEntry
from qwen35.ports.finalize_fusion import NormAndResidual
from qwen35.services.finalize_registry import PROCESS_WORKSPACES
from qwen35.services.platform import detect_platform
from qwen35.services.registry import AdapterRegistry

PORT = "finalize_fusion"
TINY = FusionRequest(fusion="reference", hidden=64, top_k=3, tokens="1,5", device="cpu", repeats=2)


def load(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "swap.json").read_text())
    return report


def results(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["adapter"]: result for result in row["results"]}


def test_two_ranks_run_the_same_cells_and_one_of_them_writes(tmp_path: Path, seed: int) -> None:
    words = ("--fusion", "reference,triton", "--geometry", "35B-A3B,397B-A17B", "--hidden", "64", "--tokens", "1,5")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "qwen35", "swap")
    result = subprocess.run(
        [sys.executable, *launcher, *words, "--device", "cpu", "--repeats", "2", "--seed", str(seed), "--out", "out"],
        cwd=tmp_path, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}, timeout=240,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    report = load(tmp_path / "out")
    assert (report["kind"], report["ranks"], report["interrupted"]) == ("swap fusion", 2, False)
    assert report["command"].startswith("torchrun --nproc-per-node 2 -m qwen35 swap --fusion reference,triton")
    sizes = [(row["hidden"], row["top_k"], row["m"]) for row in report["rows"]]
    assert sizes == [(64, 8, 1), (64, 8, 5), (64, 10, 1), (64, 10, 5)]
    for row in report["rows"]:
        measured = results(row)
        assert row["winner"] == row["automatic"] == "reference", row
        ran, not_run = measured["reference"], measured["triton"]
        assert 0 < ran["norm_error"] <= ran["bound"], f"seed {seed}: {row}"
        assert 0 < ran["residual_error"] <= ran["bound"], f"seed {seed}: {row}"
        assert ran["time_us"] > 0
        assert (ran["bits_agree"], ran["broken"], ran["method"]) == (True, [], "wall clock on the CPU")
        reasons = [f"rank {rank}: device requires cuda, got cpu" for rank in range(2)]
        assert (not_run["ran"], not_run["reasons"]) == (False, reasons)
    assert result.stdout.count("wrote out/swap.json") == 1, result.stdout
    assert result.stdout.count("triton: did not run: rank 1: device requires cuda, got cpu") == 1, result.stdout
    assert (tmp_path / "out" / "swap.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_that_nobody_wins_is_a_finding_that_the_rank_tells_which_shows_it(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "qwen35", "swap")
    words = ("--fusion", "triton", "--tokens", "1", "--hidden", "64", "--device", "cpu", "--repeats", "1")
    result = subprocess.run(
        [sys.executable, *launcher, *words, "--out", "out"], cwd=tmp_path, timeout=240, capture_output=True, text=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert "local_rank: 0" in result.stderr
    assert "local_rank: 1" not in result.stderr
    assert "nobody" in result.stdout
    assert (tmp_path / "out" / "swap.png").is_file()


@pytest.mark.parametrize("columns", [80, 120])
def test_no_value_is_cut_at_any_width(
    tmp_path: Path, seed: int, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, report, _ = alone(tmp_path, seed, "loud", "unfinished")
    out = capsys.readouterr().out
    table = out.partition(f"{report['rows'][0]['label']}: ")[0]
    assert max(map(len, table.splitlines())) <= columns, out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    for row in report["rows"]:
        for measured in row["results"]:
            values = (
                measured["adapter"], time_text(measured), error_text(measured["norm_error"]),
                error_text(measured["residual_error"]), "alike",
            )  # fmt: skip
            assert re.search(r"\s+".join(map(re.escape, values)), table), (values, out)
    assert "loud: broke precision" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--fusion", "reference"), "torchrun --nproc-per-node 2 -m qwen35 swap --fusion reference"),
        (("--fusion", "refrence"), "Did you mean 'reference'?"),
        (("--fusion", ","), "--fusion must be names joined by commas"),
        (("--fusion", "reference", "--geometry", "35B"), "unknown geometry '35B'"),
        (("--fusion", "reference", "--tokens", "8193"), "--tokens must be sizes in 1..8192"),
        (("--fusion", "reference", "--tokens", "0"), "--tokens must be made of positive integers"),
        (("--fusion", "reference", "--gdn", "reference"), "--fusion goes with"),
        (("--fusion", "reference", "--tp", "2"), "--fusion goes with"),
        (("--tokens", "8"), "give --fusion too"),
    ],
)
def test_refusals_say_what_to_do_and_leave_nothing(run: Any, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    result = run("swap", "--device", "cpu", *words, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert said in result.stderr, result.stderr
    assert not (tmp_path / "out").exists()


@dataclass
class Spoilt:
    """Workspaces of the reference that go wrong: ``kind`` says how."""

    inner: Any
    kind: str
    live: int = 0

    @property
    def capabilities(self) -> FusionCapabilities:
        if self.kind != "modest":
            return FusionCapabilities()
        return FusionCapabilities(deviations={FusionClause.CAPTURE: "it says so"})

    def supports(self, signature: WorkspaceSignature) -> Support:
        support: Support = self.inner.supports(signature)
        return Support.of("it is too small") if self.kind == "small" else support

    def prepare(self, signature: WorkspaceSignature) -> SpoiltWorkspace:
        if self.kind == "unmade":
            raise RuntimeError("no memory")
        assert self.live == 0, "a workspace is still live"
        self.live += 1
        return SpoiltWorkspace(self, self.inner.prepare(signature))

    def close(self) -> None:
        """Holds nothing."""


class SpoiltWorkspace:
    def __init__(self, maker: Spoilt, inner: Any) -> None:
        self._maker, self._inner = maker, inner
        self.adapter, self.signature, self.addresses = maker.kind, inner.signature, inner.addresses
        self._gone = False

    def supports(self, m: int) -> Support:
        support: Support = self._inner.supports(m)
        return support

    def finalize(
        self, handoff: FinalizeHandoff, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        kind = self._maker.kind
        if kind == "early" or (kind == "interrupted" and handoff.m > 1):
            raise KeyboardInterrupt
        if kind == "crashing":
            raise RuntimeError("illegal address")
        got: NormAndResidual = self._inner.finalize(handoff, residual, gamma, out)
        if kind == "loud":
            got.norm.mul_(1.01)
        if kind == "unfinished":
            got.residual[0, 0] = float("nan")
        return got

    def all_reduce(
        self, local: Tensor, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        got: NormAndResidual = self._inner.all_reduce(local, residual, gamma, out)
        return got

    def destroy(self) -> None:
        self._inner.destroy()
        self._maker.live -= not self._gone
        self._gone = True


def alone(folder: Path, seed: int, *kinds: str) -> tuple[bool, dict[str, Any], dict[str, Spoilt]]:
    """One rank by itself on the reference and on spoilt adapters; all workspaces must be gone afterwards."""
    made: dict[str, Spoilt] = {}

    def entry(kind: str) -> AdapterEntry:
        def create(platform: Any, options: Any) -> Spoilt:
            made[kind] = Spoilt(registry.adapter(PORT, "reference"), kind)
            return made[kind]

        return AdapterEntry(port=PORT, name=kind, summary="spoilt", rank=0, probe=lambda _: Support.of(), create=create)

    registry = AdapterRegistry(detect_platform("cpu"), None, [entry(kind) for kind in kinds])
    request = replace(TINY, seed=seed)
    experiment = experiment_of(request, registry, (*kinds, "reference"), shapes_of(request), sizes_of(request))
    finished = not measure(request, experiment, registry, TensorParallel(), folder)["interrupted"]
    assert PROCESS_WORKSPACES.live is None
    assert all(maker.live == 0 for maker in made.values())
    return finished, load(folder), made


def test_a_spoilt_adapter_never_wins_and_says_why(tmp_path: Path, seed: int) -> None:
    kinds = ("small", "unmade", "crashing", "loud", "unfinished", "modest")
    finished, report, _ = alone(tmp_path, seed, *kinds)
    assert finished
    for row in report["rows"]:
        found = results(row)
        assert row["winner"] == "reference", f"seed {seed}: {row}"
        for kind, said in (
            ("small", "rank 0: it is too small"), ("unmade", "rank 0: RuntimeError: no memory"),
            ("crashing", "rank 0: RuntimeError: illegal address"),
        ):  # fmt: skip
            assert (found[kind]["ran"], found[kind]["reasons"]) == (False, [said])
        assert found["loud"]["broken"] == ["precision"], f"seed {seed}: {row}"
        assert (found["unfinished"]["broken"], found["unfinished"]["residual_error"]) == (["precision"], None)
        assert (found["modest"]["broken"], found["modest"]["deviations"]) == ([], ["capture: it says so"])


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, seed: int) -> None:
    finished, report, _ = alone(tmp_path, seed, "interrupted")
    assert not finished
    assert report["interrupted"]
    (row,) = report["rows"]
    assert row["m"] == 1
    assert all(result["ran"] for result in row["results"])


def test_ctrl_c_before_anything_was_measured_replaces_nothing(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "swap.json").write_text('"a full report"')
    finished, report, _ = alone(tmp_path, seed, "early")
    assert (finished, report) == (False, "a full report")
    assert capsys.readouterr().err.strip() == "interrupted before anything was measured"
    assert [path.name for path in tmp_path.iterdir()] == ["swap.json"]
