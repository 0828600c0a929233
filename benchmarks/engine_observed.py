"""What is seen of an engine from outside: its kernels by name and time, and our counters on its metrics endpoint."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from engine_model import prompts, vocabulary_of

Row = dict[str, Any]
#: How long a trace may take to be written.
TRACE_S = 40.0


def profile(engine: Any, args: argparse.Namespace, ranks: int) -> dict[str, dict[str, dict[str, int]]]:
    """Names and launches of the kernels of a batch on each rank, those inside replayed CUDA graphs apart."""
    found = traced(engine, prompts(vocabulary_of(args.model)), 24, ranks)
    return {rank: launches(kernels) for rank, kernels in found.items()}


def steps_of(engine: Any, args: argparse.Namespace) -> Callable[..., Row]:
    """What the first rank's device does in a decode step of a batch; see ``replays``."""
    vocabulary = vocabulary_of(args.model)

    def device(batch: int, length: int, new: int, seed: int) -> Row:
        found = traced(engine, prompts(vocabulary, (length,) * batch, seed), new, ranks=1)
        return replays(next(iter(found.values()), []))

    return device


def traced(engine: Any, ids: list[list[int]], new: int, ranks: int) -> dict[str, list[Row]]:
    """The kernels of one generation, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["GPU"])
        engine.generate(input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True})
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
    """The replayed graphs of one size, as decode steps of one batch are: microseconds, each the median over them.

    ``span_us`` from the first kernel's start to the last one's end, ``kernels_us`` the sum of the kernels' own times,
    and that sum by name, the largest ten.
    """
    graphs = [launch for launch in by_launch(kernels) if len(launch) > 1]
    sizes = Counter(map(len, graphs))
    if not sizes:
        return {"replays": 0}
    size = sizes.most_common(1)[0][0]
    steps = [graph for graph in graphs if len(graph) == size]
    by_name = [Counter[str]() for _ in steps]
    for names, step in zip(by_name, steps, strict=True):
        for event in step:
            names[event["name"]] += event["dur"]
    medians = Counter({name: median(names[name] for names in by_name) for name in set().union(*by_name)})
    return {
        "replays": len(steps), "kernels": size,
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
