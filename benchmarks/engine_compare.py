"""Several engines' results as one document: each against the first."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def difference(first: list[list[float]], second: list[list[float]]) -> dict[str, float]:
    """Mean and largest difference of log-probabilities."""
    found = [abs(a - b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)]
    return {"mean": round(statistics.mean(found), 5), "max": round(max(found), 5)}


def leading(first: list[list[int]], second: list[list[int]]) -> list[int]:
    """How many leading ids are equal."""
    same = []
    for one, other in zip(first, second, strict=True):
        equal = [a == b for a, b in zip_longest(one, other)]
        same.append(equal.index(False) if False in equal else len(equal))
    return same


def compare(args: argparse.Namespace) -> None:
    """Every run against the first, its own batch against its own single requests, and what else it recorded."""
    runs = [json.loads(Path(path).read_text()) for path in args.results]
    first = runs[0]
    rows = [compared(first, run) for run in runs]
    for row in rows:
        say(json.dumps({name: value for name, value in row.items() if name in SHOWN}))
    if args.out:
        said = {name: first[name] for name in ("created", "device", "versions")}
        document = {"kind": "engines", "against": first["tag"], **said, "rows": rows}
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")


SHOWN = ("tag", "prompt_logprobs", "noise", "equal_leading_ids", "throughput_ratio", "stress")


def compared(first: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """One row: what ``run`` was, how far it is from ``first``, and its own figures."""
    kept = (
        "tag", "command", "plugin", "settings", "engine", "start_s", "bench", "stress", "kernels_by_rank", "counters",
    )  # fmt: skip
    row: dict[str, Any] = {name: run[name] for name in kept if name in run}
    row["prompt_logprobs"] = difference(first["prompt_logprobs"], run["prompt_logprobs"])
    if "prompt_logprobs_batch" in run:
        row["noise"] = difference(run["prompt_logprobs"], run["prompt_logprobs_batch"])
    if "output_ids" in first and "output_ids" in run:
        row["equal_leading_ids"] = leading(first["output_ids"], run["output_ids"])
    if "bench" in first and "bench" in run:
        row["throughput_ratio"] = {name: round(run["bench"][name] / value, 3) for name, value in first["bench"].items()}
    if "after_update" in run:
        row["update_moved_prompt_logprobs"] = difference(run["prompt_logprobs"], run["after_update"]["prompt_logprobs"])
    return row
