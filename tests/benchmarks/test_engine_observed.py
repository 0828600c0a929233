"""Kernels of a trace: those of a replay share its correlation id."""

from __future__ import annotations

from typing import Any

from engine_observed import launches, replays


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
