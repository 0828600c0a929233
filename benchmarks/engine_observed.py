"""What is seen of an engine from outside: its kernels by name, and our counters on its metrics endpoint."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from engine_model import prompts, vocabulary_of


def profile(engine: Any, args: argparse.Namespace, ranks: int) -> dict[str, dict[str, dict[str, int]]]:
    """Names and launches of the kernels of a batch on each rank, those inside replayed CUDA graphs apart."""
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["GPU"])
        params = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
        engine.generate(input_ids=prompts(vocabulary_of(args.model)), sampling_params=params)
        engine.stop_profile()
        deadline = time.monotonic() + 60
        while len(traces := list(Path(folder).rglob("*.trace.json.gz"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(2)  # until the writers are done
        return {rank_of(trace.name): launches(trace) for trace in sorted(traces)}


def rank_of(trace: str) -> str:
    """ "TP-0" of a trace's file name."""
    return f"TP-{trace.partition('-TP-')[2].partition('.')[0].partition('-')[0] or '0'}"


def launches(trace: Path) -> dict[str, dict[str, int]]:
    """Kernels by name in one rank's trace, most often launched first.

    All kernels of one replay carry its correlation id, a kernel that was launched alone has one of its own.
    """
    kernels = [e for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if e.get("cat") == "kernel"]
    at_once = Counter(event["args"]["correlation"] for event in kernels)
    names: dict[str, Counter[str]] = {"graph": Counter(), "eager": Counter()}
    for event in kernels:
        names["graph" if at_once[event["args"]["correlation"]] > 1 else "eager"][event["name"]] += 1
    return {where: dict(found.most_common()) for where, found in names.items()}


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
