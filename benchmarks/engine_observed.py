"""What is seen of an engine from outside: its kernels by name and time, and our counters on its metrics endpoint."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median, median_low
from typing import Any

from engine_model import prompts, vocabulary_of

Row = dict[str, Any]
#: How long a trace may take to be written.
TRACE_S = 40.0
#: Forwards of a prefill that are traced, seconds between them, and what a host never waits inside of one.
PREFILLS, APART_S, GAP_US = 8, 0.1, 50_000.0
#: Of prompts that no timed generation has.
SEED = 1_000_000


def profile(engine: Any, args: argparse.Namespace, ranks: int) -> dict[str, dict[str, dict[str, int]]]:
    """Names and launches of the kernels of a batch on each rank, those inside replayed CUDA graphs apart."""
    found = traced(engine, [prompts(vocabulary_of(args.model))], 24, ranks)
    return {rank: launches(kernels) for rank, kernels in found.items()}


def steps_of(engine: Any, args: argparse.Namespace) -> Callable[..., Row]:
    """What the first rank's device does in a decode step of a batch (see ``replays``), or, where no new token is asked
    for, in its prefill (``forwards``). Of one new token SGLang would begin a decode step too, and drop it."""
    vocabulary = vocabulary_of(args.model)

    def device(batch: int, length: int, new: int, seed: int) -> Row:
        seeds = (seed,) if new else range(SEED, SEED + PREFILLS)
        batches = [prompts(vocabulary, (length,) * batch, one) for one in seeds]
        if not new:
            generate(engine, prompts(vocabulary, (length,) * batch, seed), 0)  # what a first prefill compiles
        kernels = next(iter(traced(engine, batches, new, ranks=1).values()), [])
        return replays(kernels) if new else forwards(kernels)

    return device


def generate(engine: Any, ids: list[list[int]], new: int) -> None:
    """One batch, greedily, of exactly ``new`` tokens."""
    engine.generate(input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True})


def traced(engine: Any, batches: list[list[list[int]]], new: int, ranks: int) -> dict[str, list[Row]]:
    """The kernels of one generation after another, ``APART_S`` between them, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["GPU"])
        for i, ids in enumerate(batches):
            time.sleep(APART_S if i else 0.0)
            generate(engine, ids, new)
        engine.stop_profile()
        deadline = time.monotonic() + TRACE_S
        found: dict[str, list[Row]] = {}
        while len(found) < ranks and time.monotonic() < deadline:
            time.sleep(0.25)
            for trace in set(Path(folder).rglob("*.trace.json.gz")):
                try:
                    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
                except (EOFError, OSError, ValueError):  # it is still being written
                    continue
                found[rank_of(trace.name)] = [event for event in events if event.get("cat") == "kernel"]
        return dict(sorted(found.items()))


def rank_of(trace: str) -> str:
    """ "TP-0" of a trace's file name."""
    return f"TP-{trace.partition('-TP-')[2].partition('.')[0].partition('-')[0] or '0'}"


def launches(kernels: list[Row]) -> dict[str, dict[str, int]]:
    """Kernels by name, most often launched first, those of replayed graphs apart."""
    names: dict[str, Counter[str]] = {"graph": Counter(), "eager": Counter()}
    for launch in by_launch(kernels):
        names["graph" if len(launch) > 1 else "eager"].update(event["name"] for event in launch)
    return {where: dict(found.most_common()) for where, found in names.items()}


def by_launch(kernels: list[Row]) -> list[list[Row]]:
    """All kernels of one replay carry its correlation id, a kernel that was launched alone has one of its own."""
    launched: dict[int, list[Row]] = {}
    for event in kernels:
        launched.setdefault(event["args"]["correlation"], []).append(event)
    return list(launched.values())


def replays(kernels: list[Row]) -> Row:
    """The replayed graphs of the commonest size, as decode steps of one batch are; see ``medians_of``."""
    graphs = [launch for launch in by_launch(kernels) if len(launch) > 1]
    sizes = Counter(map(len, graphs)).most_common(1)
    return medians_of("replays", [graph for graph in graphs if len(graph) == sizes[0][0]])


def forwards(kernels: list[Row]) -> Row:
    """Forwards that ``traced`` kept apart, whether launched kernel by kernel or in graphs; see ``medians_of``.

    What the host does between an eager forward's kernels is in ``span_us``, and not in ``kernels_us``. The few kernels
    of an idle engine, if there are any, are no forward.
    """
    found: list[list[Row]] = []
    end = -math.inf
    for event in sorted(kernels, key=lambda event: float(event["ts"])):
        if event["ts"] - end > GAP_US:
            found.append([])
        found[-1].append(event)
        end = max(end, event["ts"] + event["dur"])
    most = max(map(len, found), default=0)
    return medians_of("forwards", [forward for forward in found if 2 * len(forward) > most])


def medians_of(what: str, steps: list[list[Row]]) -> Row:
    """How many ``steps`` of kernels there are, and of one of them microseconds, each the median over all.

    ``span_us`` from the first kernel's start to the last one's end, ``kernels_us`` the sum of the kernels' own times,
    and that sum by name, the largest ten.
    """
    if not steps:
        return {what: 0}
    by_name = [Counter[str]() for _ in steps]
    for names, step in zip(by_name, steps, strict=True):
        for event in step:
            names[event["name"]] += event["dur"]
    medians = Counter({name: median(names[name] for names in by_name) for name in set().union(*by_name)})
    return {
        what: len(steps), "kernels": median_low(map(len, steps)),
        "span_us": median(max(e["ts"] + e["dur"] for e in step) - min(e["ts"] for e in step) for step in steps),
        "kernels_us": median(sum(e["dur"] for e in step) for step in steps), "by_name": dict(medians.most_common(10)),
    }  # fmt: skip


def counters() -> dict[str, float]:
    """Our counters, as SGLang's metrics endpoint would show them."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=os.environ["PROMETHEUS_MULTIPROC_DIR"])
    return {
        f"{sample.name} " + " ".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if v): sample.value
        for metric in registry.collect() for sample in metric.samples
        if sample.name.startswith("qwen35_") and sample.name.endswith("_total")
    }  # fmt: skip
