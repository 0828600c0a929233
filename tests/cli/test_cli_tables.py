"""The README's tables come from committed measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "tables.py"


def tables(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, check=False)


def result(adapter: str, time: float | None, **changes: Any) -> dict[str, Any]:
    percent = None if time is None else 1000.0 / time
    return {"adapter": adapter, "ran": time is not None, "reasons": [], "time_us": time, "percent_of_ceiling": percent,
            "method": "CUDA graph replay", "broken": [], "deviations": []} | changes  # fmt: skip


REPORT: dict[str, Any] = {
    "kind": "swap", "interrupted": False, "created": "2026-01-02T03:04:05+00:00",
    "state_dtype": "float32", "token_dtype": "bfloat16",
    "geometry": {"name": "35B-A3B", "tp": 1, "key_heads": 16, "value_heads": 32}, "copy_gb_per_s": 4260.0,
    "device": {"name": "a GPU"}, "versions": {"torch": "2.11", "triton": "3.6", "flashinfer": None},
    "rows": [
        {"phase": "decode", "label": "decode 1", "floor_us": 1.0, "winner": "triton",
         "results": [result("triton", 7.25), result("peer", None, reasons=["state dtype requires float32"])]},
        {"phase": "decode", "label": "decode 256", "floor_us": 252.0, "winner": "triton",
         "results": [result("triton", 1268.4),
                     result("peer", 900.0, method="events around one eager call",
                            broken=[{"clause": "padding", "seen": "slot 0 was written"}])]},
    ],
}  # fmt: skip


def test_the_committed_readme_is_up_to_date() -> None:
    done = tables("--check")
    assert done.returncode == 0, done.stderr


def test_tables_are_rewritten_between_their_markers_and_checked(tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results"
    results.mkdir()
    (results / "one.json").write_text(json.dumps(REPORT))
    readme.write_text("before\n<!-- table: one -->\nstale\n<!-- end -->\nafter\n")
    where = ("--readme", readme, "--results", results)
    stale = tables("--check", *where)
    assert stale.returncode == 1
    assert "stale" in stale.stderr
    assert "stale\n" in readme.read_text(), "--check must not write"
    assert tables(*where).returncode == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- table: one -->\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "| decode 1 | 1.0 | **7.2 (138 %)** | - |" in text
    assert "| decode 256 | 252 | **1,268 (1 %)** | 900 (1 %) eager † |" in text
    assert "- peer, decode: did not run: state dtype requires float32" in text
    assert "- † peer, decode: broke padding: slot 0 was written" in text
    assert tables("--check", *where).returncode == 0


def test_claims_are_shown_with_their_goals_and_with_why_they_were_not_measured(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: claims -->\n<!-- end -->\n")
    row = {"value": None, "unit": "", "at_least": None, "at_most": None, "met": None, "reasons": []}
    rows = [
        row | {"what": "decode", "value": 4.01, "unit": "times faster", "at_least": 3.5, "met": True},
        row | {"what": "host", "value": 21.5, "unit": "us more", "at_most": 15.0, "met": False},
        row | {"what": "prefill", "at_least": 1.6, "reasons": ["flashinfer is not installed"]},
    ]
    kept = {name: REPORT[name] for name in ("created", "device", "versions", "geometry")}
    (tmp_path / "claims.json").write_text(json.dumps(kept | {"kind": "gdn integration", "rows": rows}))
    assert tables("--readme", readme, "--results", tmp_path).returncode == 0
    text = readme.read_text()
    assert "HV/H 32/16, a GPU, torch 2.11, triton 3.6, 2026-01-02." in text
    assert "| decode | 4.01 times faster | at least 3.5 | met |" in text
    assert "| host | 21.50 us more | at most 15 | **missed** |" in text
    assert "| prefill | - | at least 1.6 |  |" in text
    assert "- prefill: not measured: flashinfer is not installed" in text


def test_a_document_that_is_missing_is_an_error(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: gone -->\n<!-- end -->\n")
    done = tables("--readme", readme, "--results", tmp_path)
    assert done.returncode != 0
    assert "gone.json" in done.stderr


def test_a_finalize_table_has_the_ratio_to_the_best_peer_and_no_other_tunings(tmp_path: Path) -> None:
    rows = [
        {"hidden": 2048, "top_k": 8, "m": 64, "method": method, "us": us}
        for method, us in (("ours", 5.0), ("ours, wave 1", 4.0), ("i nccl", 12.5), ("iv ipc", 8.0))
    ]
    report = {
        "kind": "finalize", "created": "2026-01-02T03:04:05+00:00", "ranks": 2, "device": "a GPU", "multicast": "off",
        "versions": {"torch": "2.11"}, "calls_a_graph": 20,
        "rows": [*rows, rows[0] | {"m": 256}, rows[3] | {"m": 256, "us": 10.0}],
    }  # fmt: skip
    (tmp_path / "one.json").write_text(json.dumps(report))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: one -->\n<!-- end -->\n")
    assert tables("--readme", readme, "--results", tmp_path).returncode == 0
    text = readme.read_text()
    assert "| 2048, 8 | 64 | 5.0 | 12.5 | 8.0 | 0.62 |" in text
    assert "| 2048, 8 | 256 | 5.0 | - | 10.0 | 0.50 |" in text
    assert "wave" not in text
