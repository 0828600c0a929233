"""Several engines' results as one document: each against the first."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
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


def outputs(first: dict[str, Any], run: dict[str, Any]) -> dict[str, float] | None:
    """Mean and largest difference of the log-probabilities of chosen ids, and over how many ``tokens``.

    Of each prompt only the leading ids that are equal in both count: behind the first that differs, contexts do too.
    A prompt that has not one log-probability an id is left out. None where nothing is left.
    """
    if any(name not in one for one in (first, run) for name in ("output_ids", "output_logprobs")):
        return None
    pairs: tuple[list[list[float]], list[list[float]]] = ([], [])
    for index, same in enumerate(leading(first["output_ids"], run["output_ids"])):
        if all(len(one["output_logprobs"][index]) == len(one["output_ids"][index]) for one in (first, run)):
            for values, one in zip(pairs, (first, run), strict=True):
                values.append(one["output_logprobs"][index][:same])
    tokens = sum(map(len, pairs[0]))
    return {**difference(*pairs), "tokens": tokens} if tokens else None


def decoded(run: dict[str, Any]) -> dict[str, float] | None:
    """How far the log-probabilities of the ids that ``run`` decoded (or verified) are from transformers' of the same
    ids, and of how many ``tokens``. The first id of a prompt is left out: extend gives it. So is a prompt that has not
    one log-probability an id. None where nobody judged them, or nothing is left."""
    pairs = zip(run.get("output_logprobs", ()), run.get("output_logprobs_truth", ()), strict=False)
    whole = [(values[1:], truth[1:]) for values, truth in pairs if len(values) == len(truth)]
    own, truth = [values for values, _ in whole], [values for _, values in whole]
    tokens = sum(map(len, own))
    return {**difference(own, truth), "tokens": tokens} if tokens else None


def compare(args: argparse.Namespace) -> None:
    """Every run against the first, its own batch against its own single requests, and what else it recorded."""
    made = document([json.loads(Path(path).read_text()) for path in args.results])
    for row in made["rows"]:
        say(json.dumps({name: value for name, value in row.items() if name in SHOWN}))
    if args.out:
        Path(args.out).write_text(json.dumps(made, indent=1) + "\n")


SHOWN = (
    "tag", "prompt_logprobs", "output_logprobs", "decoded_from_truth", "noise", "equal_leading_ids", "same_ids",
    "second_pass", "cached_tokens", "after_update", "throughput_ratio", "stress", "accepted", "divergences",
)  # fmt: skip


def document(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A row a run, each against the first. Engine arguments that all share stand apart from the rows."""
    first = runs[0]
    engines = [run["engine"] for run in runs if "engine" in run]
    common = {
        name: value for name, value in (engines[0] if engines else {}).items()
        if all(other.get(name) == value for other in engines)
    }  # fmt: skip
    rows = [compared(first, run) for run in runs]
    for row in rows:
        if "engine" in row:
            row["engine"] = {name: value for name, value in row["engine"].items() if name not in common}
    return {
        "kind": "engines", "against": first["tag"], **{name: first[name] for name in ("created", "device", "versions")},
        "engine": common, "rows": rows,
    }  # fmt: skip


def compared(first: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """One row: what ``run`` was, how far it is from ``first``, and its own figures."""
    kept = (
        "tag", "command", "plugin", "settings", "engine", "start_s", "bench", "stress", "kernels_by_rank", "counters",
        "accepted", "samples", "rounds", "device_steps",
    )  # fmt: skip
    row: dict[str, Any] = {name: run[name] for name in kept if name in run}
    row["prompt_logprobs"] = difference(first["prompt_logprobs"], run["prompt_logprobs"])
    if "prompt_logprobs_batch" in run:
        row["noise"] = difference(run["prompt_logprobs"], run["prompt_logprobs_batch"])
    if "output_ids" in first and "output_ids" in run:
        row["equal_leading_ids"] = leading(first["output_ids"], run["output_ids"])
        row["same_ids"] = first["output_ids"] == run["output_ids"]
    if (apart := outputs(first, run)) is not None:
        row["output_logprobs"] = apart
    if (judged := decoded(run)) is not None:
        row["decoded_from_truth"] = judged
    if "samples" in first and "samples" in run:
        row["throughput_ratio"] = paired(first["samples"], run["samples"])
    if "prompt_logprobs_second" in run:
        row["second_pass"] = difference(run["prompt_logprobs"], run["prompt_logprobs_second"])
        row["second_pass_against_first_run"] = difference(first["prompt_logprobs"], run["prompt_logprobs_second"])
        row["cached_tokens"] = {name: sum(found) for name, found in run["cached_tokens"].items()}
    if "after_update" in run:
        row["after_update"] = updated(first, run)
    found = [value for name, value in run.get("counters", {}).items() if name.startswith("qwen35_shadow_divergences")]
    if any(setting.startswith("gdn_shadow=") for setting in run.get("settings", ())):
        row["divergences"] = int(sum(found))
    return row


def paired(first: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """``other`` over ``first`` round by round: the median, and the quartiles; and the ratio of their own medians."""
    found = {}
    for name, values in first.items():
        ratios = [b / a for a, b in zip(values, other.get(name, ()), strict=False)]
        if ratios:
            low, middle, high = ranked(ratios, 0.25, 0.5, 0.75)
            own = statistics.median(other[name]) / statistics.median(values)
            found[name] = {"median": middle, "low": low, "high": high, "of_medians": own}
            found[name] = {what: round(ratio, 3) for what, ratio in found[name].items()}
    return found


def ranked(values: Sequence[float], *parts: float) -> list[float]:
    """The values at these parts of the way from the lowest to the highest."""
    ordered = sorted(values)
    return [ordered[round(part * (len(ordered) - 1))] for part in parts]


def own_rounds(samples: Mapping[str, list[float]]) -> dict[str, tuple[float, float]]:
    """The quartiles of one engine's own rounds over their median; of measures with several rounds."""
    found = {}
    for name, values in samples.items():
        if len(values) > 1:
            middle = statistics.median(values)
            low, high = ranked(values, 0.25, 0.75)
            found[name] = (low / middle, high / middle)
    return found


def updated(first: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """After a weight update: how far from the old weights' results, and from ``first``, a cold engine of the new."""
    after = run["after_update"]
    apart = difference(first["prompt_logprobs"], after["prompt_logprobs"])
    return {
        "moved": difference(run["prompt_logprobs"], after["prompt_logprobs"]), "from_cold": apart,
        "equal_to_cold": apart["max"] == 0.0 and first["output_ids"] == after["output_ids"],
        "equal_leading_ids": leading(first["output_ids"], after["output_ids"]),
    }  # fmt: skip
