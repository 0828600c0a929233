"""Errors, and timing that can be trusted: warmed up, cold L2, medians, a memory ceiling measured in the same run.

On a GPU a call that may be captured is timed by graph replay, any other by events around it while the device, which
slept until all of it was queued, never waits for the host; on a CPU by the wall clock. Each timing is taken twice: a
difference smaller than ``Timing.spread_us`` is noise.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial

import torch
from torch import Tensor

from qwen35.domain.errors import CaptureError

#: Bytes moved between two uses of a line, in L2 sizes, for the second to come from memory. A state that is read and
#: written counts twice, so half of this is distinct.
COLD_FACTOR = 8
FLUSH_FACTOR = 2
MIN_CALLS_PER_REPLAY = 10
MAX_SETS = 256
WARM_UP = 3
#: A slow adapter (the reference, the interpreter) gets fewer repeats rather than minutes.
ROUND_SECONDS = 0.5
#: Cycles that a device sleeps while a call is queued, about 1 ms on an H200, and how often they are doubled at most.
SLEEP_CYCLES = 2_000_000
DOUBLINGS = 5
#: Bytes copied to find the memory ceiling: far more than any L2, and little enough for a CPU test.
GPU_COPY_BYTES = 2 * 2**30
CPU_COPY_BYTES = 64 * 2**20

Thunk = Callable[[], object]


class Method(StrEnum):
    """How a time was taken."""

    GRAPH = "CUDA graph replay, rotating inputs and slots"
    QUEUED = "events around one eager call, all of it queued before the device begins, L2 flushed before it"
    EVENTS = "events around one eager call, which waits for the device, L2 flushed before it"
    WALL = "wall clock on the CPU"


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: the median of ``samples``, their quartiles, and how far two runs were apart."""

    median_us: float
    low_us: float
    high_us: float
    spread_us: float
    samples: int
    method: Method

    @staticmethod
    def of(rounds: Sequence[Sequence[float]], method: Method) -> Timing:
        """From the samples of each round, in microseconds."""
        everything = sorted(sample for samples in rounds for sample in samples)
        medians = [statistics.median(samples) for samples in rounds]
        low, _, high = statistics.quantiles(everything, n=4) if len(everything) > 1 else (everything[0],) * 3
        return Timing(statistics.median(everything), low, high, max(medians) - min(medians), len(everything), method)


def cold_sets(device: torch.device, bytes_per_call: int) -> int:
    """How many distinct sets of inputs and slots calls must rotate over, so that each one finds the L2 cold."""
    if device.type != "cuda":
        return 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_SETS, max(1, -(-COLD_FACTOR * l2 // max(1, bytes_per_call))))


def time_graph(calls: Sequence[Thunk], device: torch.device, replays: int = 20, rounds: int = 2) -> Timing:
    """Microseconds of one of ``calls``, captured one after another into one graph and replayed.

    Short lists are repeated up to ``MIN_CALLS_PER_REPLAY`` launches a replay, so that the replay's own cost
    vanishes. Raises ``CaptureError`` where a call cannot be captured.
    """
    repeats = -(-MIN_CALLS_PER_REPLAY // len(calls))
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in (*[calls[0]] * WARM_UP, *calls[1:]):  # each has parameters of its own to be copied
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                for call in calls:
                    call()
    except RuntimeError as exc:
        raise CaptureError(f"the call cannot be captured into a CUDA graph: {exc}") from exc
    launches = repeats * len(calls)
    with torch.cuda.device(device):
        for _ in range(WARM_UP):
            graph.replay()
        taken = [[_between_events(graph.replay) / launches for _ in range(replays)] for _ in range(rounds)]
    graph.reset()
    return Timing.of(taken, Method.GRAPH)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all measurements on ``device``: adapters keep scratch for every stream that was captured."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def time_events(calls: Sequence[Thunk], device: torch.device, repeats: int = 20, rounds: int = 2) -> Timing:
    """Microseconds between events around single eager calls, with the L2 flushed before each.

    The device sleeps until a call is queued whole, so that what is measured is the device's part, as a graph replay
    measures it. Of a call that waits for the device itself no sleep is long enough: its time holds the host's part.
    """
    flush = _flusher(device)
    with torch.cuda.device(device):
        calls[0]()
        repeats = _affordable(repeats, _between_events(calls[0]))
        for _ in range(min(WARM_UP, repeats)):
            calls[0]()
        cycles = _sleep_for(calls)
        taken = [
            [_between_events(calls[i % len(calls)], partial(_flush_and_sleep, flush, cycles)) for i in range(repeats)]
            for _ in range(rounds)
        ]
    return Timing.of(taken, Method.QUEUED if cycles else Method.EVENTS)


def _sleep_for(calls: Sequence[Thunk]) -> int:
    """Cycles in which each of ``calls`` can be queued twice over; 0 where one waits for the device."""
    cycles = SLEEP_CYCLES
    for _ in range(DOUBLINGS + 1):
        if all(_is_queued(call, cycles) for call in calls):
            return 2 * cycles
        cycles *= 2
    return 0


def _is_queued(call: Thunk, cycles: int) -> bool:
    """Whether the device still sleeps when all of ``call`` is queued behind it."""
    awake = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    awake.record()
    call()
    asleep = not bool(awake.query())  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return asleep


def _flush_and_sleep(flush: Thunk, cycles: int) -> None:
    flush()
    if cycles:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def time_wall(calls: Sequence[Thunk], repeats: int = 20, rounds: int = 2) -> Timing:
    """Microseconds of single calls on the CPU, after one that warms up."""
    repeats = _affordable(repeats, _on_the_wall(calls[0]))
    taken = [[_on_the_wall(calls[i % len(calls)]) for i in range(repeats)] for _ in range(rounds)]
    return Timing.of(taken, Method.WALL)


def copy_bandwidth(device: torch.device) -> float:
    """The memory ceiling: bytes a second of a large copy on the device, read and written bytes both counted.

    On a GPU the copy is launched eagerly: as a node of a graph it went to the copy engine, at two thirds of what a
    kernel reaches (2.77 against 4.26 TB/s on an H200).
    """
    size = GPU_COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> Tensor:
        return target.copy_(source)

    timing = time_events([copy], device) if device.type == "cuda" else time_wall([copy])
    return 2 * size / (timing.median_us * 1e-6)


def relative_error(got: Tensor, want: Tensor, terms: Tensor | None = None) -> float:
    """``||got - want|| / max(||want||, ||terms||)``, Frobenius, in float64; infinite where a value is not finite, and
    where the divisor is 0 and the difference is not. ``terms`` (None: nothing cancels) are of the shape of ``want``:
    see ``Kit.out_terms``. Compared where ``got`` lies.

    Why the terms: let ``want = sum_i t_i``, and let each t_i be computed with a relative error d_i, ``|d_i| <= u``. The
    error is ``sum_i t_i d_i``. What the d_i share (that of a gate or of a norm) scales the sum and costs at most
    ``u |want|``. What they do not share adds up like a random walk, to ``u sqrt(sum_i t_i**2)``, however much of the
    terms cancels in ``want``. So an adapter that rounds as its bound says keeps it against the larger of the two, and
    may miss it against ``want`` alone, by any factor. Where little cancels the two are alike, and for terms of one sign
    ``want`` is the larger; so only outputs that cancel are judged otherwise than by themselves.
    """
    reference = want.to(got.device, torch.float64)
    difference = float((got.to(torch.float64) - reference).norm())
    size = max(float(reference.norm()), 0.0 if terms is None else float(terms.norm()))
    if difference == 0.0:
        return 0.0
    return difference / size if math.isfinite(difference) and size > 0.0 else math.inf


def _affordable(repeats: int, microseconds: float) -> int:
    """``repeats``, or as many calls of this length as a round may last; at least one."""
    return max(1, min(repeats, int(ROUND_SECONDS * 1e6 / max(microseconds, 1e-3))))


def _on_the_wall(call: Thunk) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _between_events(call: Thunk, before: Thunk | None = None) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    if before is not None:
        before()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _flusher(device: torch.device) -> Thunk:
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.empty(FLUSH_FACTOR * l2, dtype=torch.uint8, device=device)
    return buffer.zero_
