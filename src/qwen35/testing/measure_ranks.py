"""Timing of a call that waits for other ranks: every rank makes the same number of calls, or the rest would hang.

Inputs stay where they are from call to call, in the L2 as after the kernel that wrote them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TypeVar

import torch

from qwen35.domain.errors import Qwen35Error, UnsupportedError
from qwen35.services.finalize_agreement import Agreement
from qwen35.testing.measure import ROUND_SECONDS, WARM_UP, Method, Thunk, Timing

#: Calls that one graph holds, so that a replay's own cost and the ranks' uneven start vanish.
CALLS_PER_REPLAY = 20
ROUNDS = 2

#: How a time was taken here, for reports.
METHODS = {
    Method.GRAPH: f"CUDA graph replay of {CALLS_PER_REPLAY} calls, inputs warm",
    Method.EVENTS: "events around one eager call, inputs warm",
    Method.WALL: "wall clock on the CPU",
}

#: Errors of ours, and what a kernel package may raise where it should have refused.
_CRASHES = (
    Qwen35Error, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError,
    ImportError, OSError,
)  # fmt: skip

T = TypeVar("T")
Clock = Callable[[Thunk, int], list[float]]


def together(agreement: Agreement, step: Callable[[], T]) -> list[T]:
    """Every rank's result of ``step``, in rank order: something that can be sent.

    Raises ``UnsupportedError`` on all ranks where ``step`` failed on one.
    """
    value: T | None = None
    failure: str | None = None
    try:
        value = step()
    except _CRASHES as exc:
        failure = f"{type(exc).__name__}: {exc}"
    outcomes = agreement.exchange((failure, value))
    reasons = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text is not None]
    if reasons:
        raise UnsupportedError("the call failed", reasons)
    return [result for _, result in outcomes]


def time_together(agreement: Agreement, call: Thunk, device: str, *, captures: bool, repeats: int) -> Timing:
    """The slowest rank's time of ``call``, which every rank of ``agreement`` makes; the same on all of them.

    On a GPU by replay of a graph where ``captures`` says that the call may be in one, else by events; ``repeats``
    launches a round at most. Raises what ``together`` raises.
    """
    if not device.startswith("cuda"):
        return _rounds(agreement, _wall_clock, call, 1, repeats, Method.WALL)
    where = torch.device(device)
    clock = partial(_event_clock, where)
    if not captures:
        return _rounds(agreement, clock, call, 1, repeats, Method.EVENTS)
    graph = torch.cuda.CUDAGraph()
    try:
        together(agreement, partial(_warm_up, call, where))
        together(agreement, partial(_capture, graph, call, where))
        return _rounds(agreement, clock, graph.replay, CALLS_PER_REPLAY, repeats, Method.GRAPH)
    finally:
        graph.reset()


def _rounds(agreement: Agreement, clock: Clock, launch: Thunk, calls: int, repeats: int, method: Method) -> Timing:
    """``calls`` is how many a launch makes. The first launches warm up and tell how many a round affords."""
    first = max(taken[-1] for taken in together(agreement, partial(clock, launch, WARM_UP)))
    affordable = max(1, min(repeats, int(ROUND_SECONDS * 1e6 / max(first, 1e-3))))

    def measured() -> Timing:
        return Timing.of([[us / calls for us in clock(launch, affordable)] for _ in range(ROUNDS)], method)

    return max(together(agreement, measured), key=attrgetter("median_us"))


def _wall_clock(launch: Thunk, times: int) -> list[float]:
    """Microseconds of each launch."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        launch()
        taken.append((time.perf_counter() - start) * 1e6)
    return taken


def _event_clock(device: torch.device, launch: Thunk, times: int) -> list[float]:
    """Microseconds of each launch, all of them queued before any is waited for."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        for begin, end in marks:
            begin.record()
            launch()
            end.record()
    torch.cuda.synchronize(device)
    return [float(begin.elapsed_time(end)) * 1e3 for begin, end in marks]


def _warm_up(call: Thunk, device: torch.device) -> None:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.synchronize(device)


def _capture(graph: torch.cuda.CUDAGraph, call: Thunk, device: torch.device) -> None:
    """NCCL's own thread makes CUDA calls meanwhile, so only this thread's are watched."""
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS_PER_REPLAY):
            call()
