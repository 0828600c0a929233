"""Decode beside kernels that say early that those behind them may begin: it waits until they have ended.

``late_copy`` says so first, then spins, then copies. What begins without waiting reads what was there before the copy,
or overwrites what the copy is to read; the deliberately hasty kernel shows that such a fault is seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from test_gdn_triton_gpu import Calls
from torch import Tensor

from qwen35.adapters.triton.gated_delta_rule import TritonGatedDeltaRule
from qwen35.ports.gated_delta_rule import DecodeCall

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter launches one kernel after another"),
]

BLOCK = 1024
#: Nanoseconds; a launch takes a hundredth of it.
SPIN = 300_000
TURNS = 5


@triton.jit
def late_copy(source, target, count, SPIN: tl.constexpr, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    begun = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - begun < SPIN:
        pass
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def hasty_copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def late(source: Tensor, target: Tensor) -> None:
    late_copy[(triton.cdiv(source.numel(), BLOCK),)](source, target, source.numel(), SPIN, BLOCK)


def hasty(source: Tensor, target: Tensor) -> None:
    hasty_copy[(triton.cdiv(source.numel(), BLOCK),)](source, target, source.numel(), BLOCK, launch_pdl=True)


def replayed(work: Callable[[], object]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()


def eager(work: Callable[[], object]) -> None:
    work()


BOTH_WAYS = pytest.mark.parametrize("run", [eager, replayed])


@pytest.fixture
def calls(seed: int) -> Calls:
    return Calls(seed)


@pytest.fixture
def adapter(calls: Calls) -> TritonGatedDeltaRule:
    made = TritonGatedDeltaRule()
    made.prepare(calls.plan)
    return made


def warm(call: DecodeCall, adapter: TritonGatedDeltaRule) -> None:
    """Compile all that a test launches."""
    late(call.v, torch.empty_like(call.v))
    hasty(call.v, torch.empty_like(call.v))
    adapter.decode(replace(call, states=call.states.clone()))
    torch.cuda.synchronize()


@BOTH_WAYS
def test_decode_reads_what_the_kernel_ahead_writes_last(
    adapter: TritonGatedDeltaRule, calls: Calls, run: Callable[..., None], seed: int
) -> None:
    call = calls.decode()
    warm(call, adapter)
    for turn in range(TURNS):
        fresh, states = calls.randn(*call.v.shape), call.states.clone()
        want = adapter.decode(replace(call, v=fresh, states=states))
        call.v.fill_(float("nan"))
        torch.cuda.synchronize()
        got = torch.empty_like(want)

        def work(fresh: Tensor = fresh, got: Tensor = got) -> None:
            late(fresh, call.v)
            adapter.decode(replace(call, out=got))

        run(work)
        torch.cuda.synchronize()
        assert torch.equal(got, want), f"seed {seed}, turn {turn}"
        assert torch.equal(call.states, states), f"seed {seed}, turn {turn}"


@BOTH_WAYS
def test_decode_writes_after_the_kernel_ahead_has_read(
    adapter: TritonGatedDeltaRule, calls: Calls, run: Callable[..., None], seed: int
) -> None:
    call = calls.decode()
    warm(call, adapter)
    for turn in range(TURNS):
        before, read = call.states.clone(), torch.empty_like(call.states[:1])
        torch.cuda.synchronize()

        def work(read: Tensor = read) -> None:
            late(call.states[:1], read)
            adapter.decode(call)

        run(work)
        torch.cuda.synchronize()
        assert torch.equal(read, before[:1]), f"seed {seed}, turn {turn}"
        assert not torch.equal(call.states, before)


@BOTH_WAYS
def test_a_kernel_that_does_not_wait_is_seen(calls: Calls, run: Callable[..., None]) -> None:
    fresh = calls.randn(BLOCK)
    between, got = torch.zeros_like(fresh), torch.zeros_like(fresh)
    late(fresh, torch.empty_like(fresh))
    hasty(fresh, torch.empty_like(fresh))
    torch.cuda.synchronize()

    def work() -> None:
        late(fresh, between)
        hasty(between, got)

    run(work)
    torch.cuda.synchronize()
    assert torch.equal(between, fresh)
    assert not got.any(), "the kernel behind began after the one ahead had ended: these tests see nothing"


