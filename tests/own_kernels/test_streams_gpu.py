"""Two streams in one container, eager and in graphs, and calls whose tensors lie on a GPU that is not current."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import qwen35
from conv_problems import ConvProblem
from qwen35.container import Container
from qwen35.domain.capabilities import Phase
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import CommitCall, DecodeCall, ExtendCall, GdnPlan, VerifyCall
from qwen35.ports.short_convolution import ConvPlan
from qwen35.services.gated_delta_rule import PORT
from qwen35.services.platform import detect_platform
from qwen35.services.registry import AdapterRegistry
from qwen35.testing.workload import Layout, Row, live_slots, random_call, random_pool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

F32, BF16 = torch.float32, torch.bfloat16
ADAPTERS = ("triton", "flashinfer", "sglang")
GEOMETRY = GdnGeometry(key_heads=2, value_heads=8, key_width=128, value_width=128)
NULL = 0
#: Large enough that kernels of two streams overlap, small enough that both fit the device.
ROWS = {
    Phase.DECODE: Row(Phase.DECODE, (1,) * 48), Phase.VERIFY: Row(Phase.VERIFY, (3,) * 24),
    Phase.EXTEND: Row(Phase.EXTEND, (700, 65, 300)),
}  # fmt: skip
POOL, CALLS = 64, 20
Call = DecodeCall | ExtendCall | VerifyCall


class Served:
    """One adapter in a container, prepared on ``device``, and calls to hand it."""

    def __init__(
        self, name: str, state: torch.dtype, seed: int, device: str = "cuda:0", split: str = "auto", tokens: int = 1100
    ) -> None:
        usable = AdapterRegistry(detect_platform("cuda")).usable(PORT, name)
        if not usable:
            pytest.skip("; ".join(usable.reasons))
        self.layout = Layout(
            geometry=GEOMETRY, token_dtype=BF16, state_dtype=state, device=torch.device(device), null_slot=NULL
        )
        self.source = torch.Generator(device).manual_seed(seed)
        self.container: Container = qwen35.build(
            gdn_decode=name, gdn_extend=name, gdn_verify=name, device="cuda", prefill_split=split
        )
        self.rule = self.container.gated_delta_rule()
        self.rule.prepare(
            GdnPlan(
                geometry=GEOMETRY, state_dtype=state, device=self.layout.device, max_batch=48, max_tokens=tokens,
                max_draft=3, null_slot=NULL,
            )
        )  # fmt: skip

    def prompts(self, lengths: tuple[int, ...]) -> ExtendCall:
        states = random_pool(self.layout, len(lengths) + 1, self.source)
        slots = live_slots(self.layout, len(lengths), len(lengths) + 1, self.source)
        call = random_call(self.layout, Row(Phase.EXTEND, lengths), states, slots, self.source)
        assert isinstance(call, ExtendCall)
        return call

    def call(self, phase: Phase) -> Call:
        states = random_pool(self.layout, POOL, self.source)
        slots = live_slots(self.layout, ROWS[phase].batch, POOL, self.source)
        slots[1] = -1
        call = random_call(self.layout, ROWS[phase], states, slots, self.source)
        if isinstance(call, VerifyCall):  # in other rows, so that FlashInfer's nodes pass through scratch
            rows = torch.arange(ROWS[phase].batch, dtype=torch.int32, device=states.device).flip(0).contiguous()
            return replace(call, rows=rows, intermediates=call.intermediates.nan_to_num(0.0))
        return call

    def serve(self, call: Call) -> Tensor:
        if isinstance(call, ExtendCall):
            return self.rule.extend(call).out
        return self.rule.decode(call) if isinstance(call, DecodeCall) else self.rule.verify(call)

    def held(self) -> tuple[float, int]:
        """Bytes of scratch by the gauge, and the bound."""
        (held,) = [value for (name, _), value in self.container.counters().gauges().items() if name == "scratch_bytes"]
        adapter = self.rule.adapters[Phase.DECODE][1]
        return held, adapter.scratch_bound  # type: ignore[attr-defined]


@pytest.fixture
def containers() -> Iterator[list[Container]]:
    made: list[Container] = []
    yield made
    torch.cuda.synchronize()
    for container in made:
        qwen35.close(container)


def copied(call: Call) -> Call:
    """``call`` over memory of its own for all that it writes."""
    changes = {"states": call.states.clone(), "out": torch.full_like(call.v, float("nan"))}
    if isinstance(call, VerifyCall):
        changes["intermediates"] = call.intermediates.clone()
    return replace(call, **changes)


def results(call: Call) -> tuple[Tensor, ...]:
    """What ``call`` wrote, without the null slot."""
    assert call.out is not None
    written = (call.out, call.states[NULL + 1 :])
    return (*written, call.intermediates) if isinstance(call, VerifyCall) else written


def same(got: Call, want: Call, what: str) -> None:
    for index, (a, b) in enumerate(zip(results(got), results(want), strict=True)):
        assert torch.equal(a, b), f"{what}, result {index}"


def twice(served: Served, phase: Phase) -> tuple[list[Call], list[Call]]:
    """Two calls that were served ``CALLS`` times on the default stream, eagerly, and the same two as they were before.

    That compiles, and makes the scratch that lies ready.
    """
    calls = [served.call(phase) for _ in range(2)]
    alone, at_once = ([copied(call) for call in calls] for _ in range(2))
    for call in alone:
        for _ in range(CALLS):
            served.serve(call)
    torch.cuda.synchronize()
    return alone, at_once


def busy(stream: torch.cuda.Stream) -> None:
    """Milliseconds of work, so that what is queued behind it on two streams then runs at once."""
    with torch.cuda.stream(stream):
        a = torch.zeros(8192, 8192, dtype=BF16, device="cuda")
        for _ in range(20):
            a = a @ a


@pytest.mark.parametrize("state", [F32, BF16])
@pytest.mark.parametrize("phase", list(ROWS))
@pytest.mark.parametrize("name", ADAPTERS)
def test_calls_on_two_streams_at_once_give_what_each_gives_alone(
    containers: list[Container], name: str, phase: Phase, state: torch.dtype, seed: int
) -> None:
    served = Served(name, state, seed)
    containers.append(served.container)
    alone, at_once = twice(served, phase)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        busy(stream)
    for _ in range(CALLS):
        for stream, call in zip(streams, at_once, strict=True):
            with torch.cuda.stream(stream):
                served.serve(call)
    torch.cuda.synchronize()
    for got, want in zip(at_once, alone, strict=True):
        same(got, want, f"{name} {phase}, seed {seed}")
    held, bound = served.held()
    assert 0 <= held <= bound


@pytest.mark.parametrize("adapters", [1, 2], ids=["one adapter", "two adapters"])
@pytest.mark.parametrize("split", ["on", "off"], ids=["sequence split", "one pass"])
def test_prefills_on_two_streams_share_the_workspaces_that_flashinfer_keeps(
    containers: list[Container], split: str, adapters: int, seed: int
) -> None:
    """They are the process's and grow: a prefill replaces what one on the other stream may still be at work in, and the
    allocator gives what was replaced to the next that asks. So every call is longer than those before it, and what the
    streams leave free is overwritten at once."""
    served = [Served("flashinfer", F32, seed + i, split=split, tokens=12_000) for i in range(adapters)]
    containers += [one.container for one in served]
    users = served * (2 // adapters)
    served[0].serve(served[0].prompts((1024,)))  # compiles
    at_once = [
        [user.prompts((1024 + 600 * turn + 300 * i, 1024 + 100 * turn)) for turn in range(8)]
        for i, user in enumerate(users)
    ]
    alone = [[copied(call) for call in calls] for calls in at_once]
    streams = [torch.cuda.Stream() for _ in users]
    torch.cuda.synchronize()
    for stream in streams:
        busy(stream)
    for turn in range(8):
        for stream, user, calls in zip(streams, users, at_once, strict=True):
            with torch.cuda.stream(stream):
                user.serve(calls[turn])
                for size in (1 << 14, 1 << 18, 1 << 21, 1 << 23, 1 << 25):
                    torch.full((size,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    for user, calls, wants in zip(users, at_once, alone, strict=True):
        for got, want in zip(calls, wants, strict=True):
            user.serve(want)
            torch.cuda.synchronize()
            same(got, want, f"prefill of {got.v.shape[0]} tokens, seed {seed}")


@pytest.mark.parametrize("warm", [False, True], ids=["first seen inside capture", "warmed up"])
@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.VERIFY])
@pytest.mark.parametrize("name", ADAPTERS)
def test_graphs_captured_on_two_streams_replay_at_once(
    containers: list[Container], name: str, phase: Phase, warm: bool, seed: int
) -> None:
    """Without a warm-up one of the streams finds scratch that lies ready; the other has to be warmed up."""
    served = Served(name, BF16, seed)
    containers.append(served.container)
    alone, at_once = twice(served, phase)
    streams, graphs = [torch.cuda.Stream() for _ in range(2)], [torch.cuda.CUDAGraph() for _ in range(2)]
    for index, (stream, graph, call) in enumerate(zip(streams, graphs, at_once, strict=True)):
        if warm or index:
            with torch.cuda.stream(stream):
                served.serve(copied(call))
            torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            served.serve(call)
    torch.cuda.synchronize()
    for stream in streams:
        busy(stream)
    for _ in range(CALLS):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(at_once, alone, strict=True):
        same(got, want, f"{name} {phase}, seed {seed}")


@pytest.mark.parametrize("name", ADAPTERS)
def test_calls_on_another_gpu_than_the_current_one(containers: list[Container], name: str, seed: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    served = Served(name, F32, seed, "cuda:1")
    containers.append(served.container)
    for phase in ROWS:
        call = served.call(phase)
        here, there = copied(call), copied(call)
        assert torch.cuda.current_device() == 0
        served.serve(here)
        with torch.cuda.device(1):
            served.serve(there)
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(1)
        same(here, there, f"{name} {phase}, seed {seed}")
        if isinstance(here, VerifyCall) and isinstance(there, VerifyCall):
            last = torch.ones_like(here.slots)
            for commit in (here, there):
                served.rule.commit(
                    CommitCall(
                        states=commit.states, slots=commit.slots, intermediates=commit.intermediates, last=last,
                        rows=commit.rows,
                    )
                )  # fmt: skip
            torch.cuda.synchronize(1)
            same(here, there, f"{name} commit, seed {seed}")
            assert not torch.equal(here.states, call.states)


def test_a_convolution_on_another_gpu_than_the_current_one(containers: list[Container], seed: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    containers.append(qwen35.build(device="cuda", conv="triton"))
    conv, drawn = containers[0].short_convolution(), ConvProblem(seed=seed, device="cuda:1")
    conv.prepare(
        ConvPlan(channels=24, width=4, window_dtype=F32, device=torch.device("cuda:1"), max_batch=4, max_tokens=9,
                 token_dtype=F32)
    )  # fmt: skip
    call = drawn.decode([1, -1, 5])
    there = replace(call, windows=call.windows.clone(), out=None)
    assert torch.cuda.current_device() == 0
    got = conv.decode(call)
    with torch.cuda.device(1):
        want = conv.decode(there)
    torch.cuda.synchronize(1)
    assert torch.equal(got, want), f"seed {seed}"
    live = [1, 5]
    assert torch.equal(call.windows[live], there.windows[live]), f"seed {seed}"
