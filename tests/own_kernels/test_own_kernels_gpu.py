"""What a GPU does for calls through the container, with a fallback at hand: its kernels, and the memory it adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import qwen35
from device_kernels import kernels
from own_kernel_names import owners
from qwen35.container import Container
from qwen35.domain.capabilities import Phase
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, GdnPlan, VerifyCall
from qwen35.services.gated_delta_rule import PORT
from qwen35.services.platform import detect_platform
from qwen35.services.registry import AdapterRegistry
from qwen35.testing.workload import Layout, Row, live_slots, random_call, random_pool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

F32, BF16 = torch.float32, torch.bfloat16
ADAPTERS = ("triton", "flashinfer", "sglang")
GEOMETRY = GdnGeometry(key_heads=2, value_heads=8, key_width=128, value_width=128)
NULL = 0
LENGTHS = {Phase.DECODE: (1, 1, 1), Phase.EXTEND: (65, 3, 130), Phase.VERIFY: (3, 3, 3)}


class Served:
    """One adapter in a container of its own, with the reference as the fallback, and calls to hand it."""

    def __init__(self, name: str, state: torch.dtype, seed: int) -> None:
        usable = AdapterRegistry(detect_platform("cuda")).usable(PORT, name)
        if not usable:
            pytest.skip("; ".join(usable.reasons))
        self.name, self.device = name, torch.device("cuda")
        self.layout = Layout(geometry=GEOMETRY, token_dtype=BF16, state_dtype=state, device=self.device, null_slot=NULL)
        self.source = torch.Generator(self.device).manual_seed(seed)
        self.container: Container = qwen35.build(
            gdn_decode=name, gdn_extend=name, gdn_verify=name, gdn_fallback="reference", device="cuda"
        )
        self.rule = self.container.gated_delta_rule()
        self.plan(batch=4)

    def plan(self, batch: int) -> None:
        self.rule.prepare(
            GdnPlan(
                geometry=GEOMETRY, state_dtype=self.layout.state_dtype, device=self.device, max_batch=batch,
                max_tokens=300, max_draft=3, null_slot=NULL,
            )
        )  # fmt: skip

    def call(self, phase: Phase, pool: int = 6) -> DecodeCall | ExtendCall | VerifyCall:
        states = random_pool(self.layout, pool, self.source)
        slots = live_slots(self.layout, 3, pool, self.source)
        return random_call(self.layout, Row(phase, LENGTHS[phase]), states, slots, self.source)

    def count(self, name: str, **labels: str) -> int:
        return self.container.counters().total(name, **labels)


@pytest.fixture
def serve(seed: int) -> Iterator[Callable[[str, torch.dtype], Served]]:
    made: list[Served] = []

    def make(name: str, state: torch.dtype = F32) -> Served:
        made.append(Served(name, state, seed))
        return made[-1]

    yield make
    for served in made:
        served.rule.close()


Make = Callable[..., Served]


def test_a_call_that_falls_back_shows_neither_the_kernel_nor_a_clean_count(serve: Make) -> None:
    served = serve("flashinfer")
    call = served.call(Phase.DECODE)
    room = torch.zeros(call.states.numel() + 1, device="cuda")
    off = room[1:].view(call.states.shape)
    moved = DecodeCall(q=call.q, k=call.k, v=call.v, gates=call.gates, states=off, slots=call.slots, out=call.out)
    assert owners(kernels(lambda: served.rule.decode(moved)), Phase.DECODE) == set()
    assert served.count("fallbacks", adapter="reference") == 2
    assert served.count("calls", adapter="flashinfer") == 0


@pytest.mark.parametrize("state", [F32, BF16])
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_padded_decode_over_4000_slots_adds_less_than_two_slots_of_memory(
    serve: Make, name: str, state: torch.dtype
) -> None:
    served = serve(name, state)
    g = GEOMETRY
    pool = torch.zeros(4000, g.value_heads, g.value_width, g.key_width, dtype=state, device="cuda")
    slots = torch.tensor([7, -1, 3999, -1], dtype=torch.int32, device="cuda")
    call = random_call(served.layout, Row(Phase.DECODE, (1,) * 4), pool, slots, served.source)
    assert isinstance(call, DecodeCall)
    slot = g.state_elements * state.itemsize
    for turn in ("first", "second"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        served.rule.decode(call)
        torch.cuda.synchronize()
        added = torch.cuda.max_memory_allocated() - held
        assert added < 2 * slot, f"the {turn} call added {added} bytes, a slot is {slot}"
    assert served.count("fallbacks") == 0


def test_a_thousand_batch_sizes_on_three_streams_stay_under_the_bound_of_the_plan(serve: Make) -> None:
    """Everything but the pool is one element past a multiple of 32 bytes."""
    served = serve("flashinfer")
    served.plan(batch=1000)
    guard = served.rule.adapters[Phase.DECODE][1]
    bound = guard.scratch_bound
    pool = random_pool(served.layout, 1001, served.source)
    slots = live_slots(served.layout, 1000, 1001, served.source)
    whole = random_call(served.layout, Row(Phase.DECODE, (1,) * 1000), pool, slots, served.source)
    assert isinstance(whole, DecodeCall)

    def off(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        return room[1:].view(tensor.shape).copy_(tensor)

    gates = type(whole.gates)(**{n: off(getattr(whole.gates, n)) for n in ("a", "b", "A_log", "dt_bias")})
    q, k, v, slots, out = (off(t) for t in (whole.q, whole.k, whole.v, whole.slots, whole.v))
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for batch in range(1, 1001):
        cut = type(gates)(a=gates.a[:batch], b=gates.b[:batch], A_log=gates.A_log, dt_bias=gates.dt_bias)
        call = DecodeCall(
            q=q[:batch], k=k[:batch], v=v[:batch], gates=cut, states=pool, slots=slots[:batch], out=out[:batch]
        )
        for stream in streams:
            with torch.cuda.stream(stream):
                served.rule.decode(call)
        assert guard.scratch_bytes <= bound == guard.scratch_bound, f"batch {batch}"
    torch.cuda.synchronize()
    assert served.count("fallbacks") == 0
    assert served.count("scratch_copies", argument="q") == 3000
