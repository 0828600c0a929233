"""Kernels of a trace: those of a replay share its correlation id."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from engine_observed import APART_S, GAP_US, PREFILLS, forwards, launches, replays, steps_of


def kernel(name: str, correlation: int, start: float, microseconds: float) -> dict[str, Any]:
    return {"name": name, "args": {"correlation": correlation}, "ts": start, "dur": microseconds}


def trace() -> list[dict[str, Any]]:
    """A prefill's two kernels, three replays of a step of three kernels, and one of another graph."""
    found = [kernel("prefill", 1, 0.0, 50.0), kernel("conv", 2, 60.0, 5.0)]
    for step, idle in enumerate((1.0, 2.0, 30.0)):
        start = 100.0 * (step + 1)
        found += [
            kernel("conv", 10 + step, start, 5.0), kernel("gdn", 10 + step, start + 5.0, 20.0),
            kernel("gdn", 10 + step, start + 25.0 + idle, 10.0 * (step + 1)),
        ]  # fmt: skip
    return [*found, kernel("draft", 20, 900.0, 1.0), kernel("draft", 20, 902.0, 1.0)]


def test_kernels_are_counted_apart_inside_replays() -> None:
    assert launches(trace()) == {"graph": {"gdn": 6, "conv": 3, "draft": 2}, "eager": {"prefill": 1, "conv": 1}}


def test_a_step_is_the_median_of_the_replays_of_the_commonest_graph() -> None:
    found = replays(trace())
    assert found == {
        "replays": 3, "kernels": 3, "span_us": 47.0, "kernels_us": 45.0, "by_name": {"gdn": 40.0, "conv": 5.0},
    }  # fmt: skip


def test_a_trace_without_replays_says_so() -> None:
    assert replays([kernel("prefill", 1, 0.0, 50.0)]) == {"replays": 0}


def prefills(*, graphs: bool = False) -> list[dict[str, Any]]:
    """Three forwards of two kernels far apart, the host late by 10, 20 and 60 us between them; and an idle engine's."""
    found = [kernel("idle", 90 + i, GAP_US * (4 * i + 2.5), 1.0) for i in range(5)]
    for i, idle in enumerate((10.0, 20.0, 60.0)):
        start, launch = GAP_US * 4 * (i + 1), 10 * i
        found += [
            kernel("gdn", launch, start, 30.0), kernel("norm", launch + (not graphs), start + 30.0 + idle, 5.0 + i),
        ]  # fmt: skip
    return found[::-1]


def test_a_prefill_is_the_median_of_forwards_that_were_kept_apart() -> None:
    assert APART_S * 1e6 > GAP_US
    assert forwards([]) == {"forwards": 0}
    for found in (forwards(prefills()), forwards(prefills(graphs=True))):
        assert found == {
            "forwards": 3, "kernels": 2, "span_us": 56.0, "kernels_us": 36.0, "by_name": {"gdn": 30.0, "norm": 6.0},
        }  # fmt: skip


class Engine:
    """SGLang's engine where it is profiled: a trace of one prefill and, of ``new`` tokens, as many replays."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], int, bool]] = []
        self.folder = ""
        self.kernels: list[dict[str, Any]] = []

    def start_profile(self, output_dir: str, activities: list[str]) -> None:
        assert activities == ["GPU"]
        self.folder, self.kernels = output_dir, []

    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> None:
        new = sampling_params["max_new_tokens"]
        start = 4 * GAP_US * len(self.asked)
        self.asked.append((input_ids, new, bool(self.folder)))
        self.kernels.append(kernel("prefill", 1000 + len(self.asked), start, 40.0))
        for step in range(new):
            self.kernels += [kernel("step", step, start + 100.0 * step, 5.0), kernel("step", step, start + 9.0, 5.0)]

    def stop_profile(self) -> None:
        events = [event | {"cat": "kernel"} for event in self.kernels]
        with gzip.open(Path(self.folder) / "1-TP-0.trace.json.gz", "wt") as trace:
            json.dump({"traceEvents": [*events, {"cat": "cuda_runtime", "name": "launch"}]}, trace)
        self.folder = ""


def test_of_no_new_tokens_prefills_of_other_prompts_are_traced_after_one_that_compiles(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    engine = Engine()
    device = steps_of(engine, argparse.Namespace(model=str(tmp_path)))
    found = device(batch=1, length=6, new=0, seed=0)
    assert (found["forwards"], found["kernels_us"]) == (PREFILLS, 40.0)
    assert [traced for *_, traced in engine.asked] == [False] + PREFILLS * [True]
    assert {new for _, new, _ in engine.asked} == {0}, "of one token SGLang begins a decode step"
    assert len({str(ids) for ids, *_ in engine.asked}) == PREFILLS + 1
    assert {len(one) for ids, *_ in engine.asked for one in ids} == {6}
    engine.asked.clear()
    found = device(batch=2, length=6, new=4, seed=0)
    assert (found["replays"], found["kernels"], found["kernels_us"]) == (4, 2, 10.0)
    assert [(len(ids), new) for ids, new, _ in engine.asked] == [(2, 4)]
