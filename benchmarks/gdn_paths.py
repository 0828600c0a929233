"""The ways to run one GDN decode that gdn_integration.py compares, and how it times them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType

from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import Qwen35Error
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import DecodeCall, GdnPlan, RawGates
from qwen35.services.scratch import empty_aligned
from qwen35.testing.measure import cold_sets
from qwen35.testing.workload import Layout, Row, live_slots, random_call, random_pool, raw_gates

#: Reserved, as serving engines do: bfloat16 decode of FlashInfer is refused without one where rows may pad.
NULL_SLOT = 0
ALIGNMENT = 32
STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: What a part may raise where it should have refused, here or in a kernel package: it becomes a row with a reason.
CRASHES = (Qwen35Error, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ImportError)
#: About 15 ms on an H200: longer than the host needs to queue ``LAUNCHES`` calls.
SLEEP_CYCLES = 30_000_000
LAUNCHES = 60
ATTEMPTS = 5

Thunk = Callable[[], object]


def layout_of(geometry: GdnGeometry, state: torch.dtype) -> Layout:
    return Layout(
        geometry=geometry, token_dtype=torch.bfloat16, state_dtype=state, device=torch.device("cuda"),
        null_slot=NULL_SLOT,
    )  # fmt: skip


def plan_of(geometry: GdnGeometry, state: torch.dtype, batch: int, tokens: int = 0) -> GdnPlan:
    return GdnPlan(
        geometry=geometry, state_dtype=state, device=torch.device("cuda"), max_batch=batch, max_tokens=tokens,
        max_draft=0, null_slot=NULL_SLOT,
    )  # fmt: skip


def decode_calls(geometry: GdnGeometry, state: torch.dtype, batch: int, seed: int) -> list[DecodeCall]:
    """Calls of one layer (they share A_log and dt_bias) over one pool, so many that each finds the L2 cold."""
    layout, row = layout_of(geometry, state), Row(Phase.DECODE, (1,) * batch)
    generator = torch.Generator(layout.device).manual_seed(seed)
    sets = cold_sets(layout.device, layout.bytes_moved(row))
    pool = random_pool(layout, sets * batch + 1, generator)
    slots = live_slots(layout, sets * batch, pool.shape[0], generator)
    calls: list[DecodeCall] = []
    for i in range(sets):
        call = random_call(layout, row, pool, slots[i * batch : (i + 1) * batch].clone(), generator)
        assert isinstance(call, DecodeCall)
        if calls:
            first = raw_gates(calls[0])
            call = replace(call, gates=replace(raw_gates(call), A_log=first.A_log, dt_bias=first.dt_bias))
        calls.append(call)
    return calls


def misaligned(call: DecodeCall) -> DecodeCall:
    """``call`` with every tensor but the pool one element past a multiple of 32 bytes; the parameters are shared."""
    gates = raw_gates(call)
    return replace(
        call, q=_off(call.q), k=_off(call.k), v=_off(call.v), slots=_off(call.slots),
        out=None if call.out is None else _off(call.out), gates=replace(gates, a=_off(gates.a), b=_off(gates.b)),
    )  # fmt: skip


def misaligned_parameters(gates: RawGates) -> RawGates:
    return replace(gates, A_log=_off(gates.A_log), dt_bias=_off(gates.dt_bias))


def _off(tensor: Tensor) -> Tensor:
    room = empty_aligned((tensor.numel() + ALIGNMENT,), tensor.dtype, tensor.device, ALIGNMENT)
    return room[1 : tensor.numel() + 1].view(tensor.shape).copy_(tensor)


@dataclass(frozen=True, slots=True)
class FlashInferDirect:
    """FlashInfer's public decode function on tensors in its own shapes and dtypes."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    states: Tensor
    slots: Tensor
    out: Tensor

    @staticmethod
    def of(call: DecodeCall) -> FlashInferDirect:
        from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

        gates = raw_gates(call)
        arguments = {
            "q": call.q.unsqueeze(1), "k": call.k.unsqueeze(1), "v": call.v.unsqueeze(1), "a": gates.a.unsqueeze(1),
            "b": gates.b.unsqueeze(1), "A_log": gates.A_log.float(), "dt_bias": gates.dt_bias.float(), "scale": None,
            "use_qk_l2norm": True,
        }  # fmt: skip
        out = torch.empty_like(call.v).unsqueeze(1)
        return FlashInferDirect(gated_delta_rule_decode_pretranspose, arguments, call.states, call.slots, out)

    def by_index(self) -> Thunk:
        """Over the pool, which FlashInfer updates in place."""
        return partial(
            self.function, **self.arguments, state=None, initial_state=self.states, initial_state_indices=self.slots,
            output=self.out,
        )  # fmt: skip

    def gathered(self) -> Tensor:
        """What the reference integration does on Hopper: copy the states out, run the kernel, copy them back."""
        taken = self.states[self.slots]
        out, new = self.function(**self.arguments, state=taken, output=None)
        self.states[self.slots] = new
        attended: Tensor = out.squeeze(1)
        return attended


def queue_full(calls: Sequence[Thunk], launches: int = LAUNCHES) -> float | None:
    """Device microseconds of one eager call, the device never waiting for the host: it sleeps until all are queued.

    None where a call waits for the device, so that no sleep is long enough.
    """
    cycles = SLEEP_CYCLES
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(ATTEMPTS):
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        for i in range(launches):
            calls[i % len(calls)]()
        end.record()
        asleep = not start.query()
        end.synchronize()
        if asleep:
            return float(start.elapsed_time(end)) * 1e3 / launches
        cycles *= 2
    return None


def queue_full_medians(
    ways: Mapping[str, Sequence[Thunk]], rounds: int = 7, launches: int = LAUNCHES
) -> dict[str, Any]:
    """``queue_full`` of each way, one after another in every round, so that a drift of the clocks meets all alike."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for calls in ways.values():
        for call in calls:
            call()
    for _ in range(rounds):
        for name, calls in ways.items():
            found = queue_full(calls, launches)
            if found is not None:
                taken[name].append(found)
    return {name: statistics.median(found) if found else None for name, found in taken.items()}


def host_medians(ways: Mapping[str, Thunk], count: int = 3000, block: int = 100) -> dict[str, float]:
    """Host microseconds of one call, in blocks that take turns; nothing waits for the device inside a block."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for thunk in ways.values():
        for _ in range(block):
            thunk()
    gc.collect()
    gc.disable()
    try:
        for _ in range(-(-count // block)):
            for name, thunk in ways.items():
                torch.cuda.synchronize()
                for _ in range(block):
                    before = time.perf_counter_ns()
                    thunk()
                    taken[name].append((time.perf_counter_ns() - before) / 1e3)
    finally:
        gc.enable()
        torch.cuda.synchronize()
    return {name: statistics.median(found) for name, found in taken.items()}


def replayed_kernels(call: Thunk) -> list[str]:
    """Names of all that the device does in one replay of a graph of ``call``."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        call()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    graph.reset()
    return [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
