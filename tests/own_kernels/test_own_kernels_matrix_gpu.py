"""Whose kernels run on a GPU: every adapter and phase over dtypes, heads, layouts of the pool and places of the views,
eagerly and by graph replays, through the container with a fallback at hand that must not be needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

import qwen35
from device_kernels import kernels
from own_kernel_names import expected, owners
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import CaptureError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import CommitCall, GdnCall, GdnPlan, VerifyCall
from qwen35.services.gated_delta_rule import PORT
from qwen35.services.platform import detect_platform
from qwen35.services.registry import AdapterRegistry
from qwen35.testing.workload import Layout, Row, live_slots, random_call, raw_gates

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NULL, POOL, NAN = 0, 6, float("nan")
ROWS = {
    Phase.DECODE: Row(Phase.DECODE, (1, 1, 1)), Phase.EXTEND: Row(Phase.EXTEND, (65, 3, 130)),
    Phase.VERIFY: Row(Phase.VERIFY, (3, 3, 3)),
}  # fmt: skip
#: Elements between slots of a page-major pool: pages stay as aligned as every adapter asks.
GAP = 256


class Served:
    """One adapter in a container of its own, with the reference as the fallback, and calls to hand it."""

    def __init__(self, name: str, state: torch.dtype, heads: tuple[int, int]) -> None:
        usable = AdapterRegistry(detect_platform("cuda")).usable(PORT, name)
        if not usable:
            pytest.skip("; ".join(usable.reasons))
        geometry = GdnGeometry(key_heads=heads[0], value_heads=heads[1], key_width=128, value_width=128)
        self.layout = Layout(
            geometry=geometry, token_dtype=torch.bfloat16, state_dtype=state, device=torch.device("cuda", 0),
            null_slot=NULL,
        )  # fmt: skip
        self.container = qwen35.build(
            gdn_decode=name, gdn_extend=name, gdn_verify=name, gdn_fallback="reference", device="cuda"
        )
        self.rule = self.container.gated_delta_rule()
        self.rule.prepare(
            GdnPlan(
                geometry=geometry, state_dtype=state, device=self.layout.device, max_batch=4, max_tokens=300,
                max_draft=3, null_slot=NULL,
            )
        )  # fmt: skip
        self.stream = torch.cuda.Stream()

    def pool(self, paged: bool, source: torch.Generator) -> Tensor:
        """States [N, HV, V, K], the slots ``GAP`` elements apart where ``paged``, with NaN between."""
        g = self.layout.geometry
        room = torch.full((POOL, g.state_elements + GAP * paged), NAN, device="cuda", dtype=self.layout.state_dtype)
        states = room[:, : g.state_elements].unflatten(1, (g.value_heads, g.value_width, g.key_width))
        return states.copy_(0.1 * torch.randn(states.shape, generator=source, device="cuda"))

    def call(self, phase: Phase, paged: bool, off: bool, seed: int) -> GdnCall:
        """Of three rows. ``off``: all but pool and intermediates lies one element past a multiple of 32 bytes."""
        source = torch.Generator("cuda").manual_seed(seed)
        states, slots = self.pool(paged, source), live_slots(self.layout, 3, POOL, source)
        if phase is Phase.COMMIT:
            g = self.layout.geometry
            shape = (3, 3, g.value_heads, g.value_width, g.key_width)
            nodes = torch.randn(shape, generator=source, device="cuda").to(self.layout.state_dtype)
            last = torch.zeros_like(slots)
            slots, last = (moved(slots), moved(last)) if off else (slots, last)
            return CommitCall(states=states, slots=slots, intermediates=nodes, last=last)
        call = random_call(self.layout, ROWS[phase], states, slots, source)
        return _off(call) if off else call

    def serve(self, call: GdnCall) -> object:
        if isinstance(call, CommitCall):
            return self.rule.commit(call)
        serve: dict[Phase, Callable[[Any], object]] = {
            Phase.DECODE: self.rule.decode, Phase.EXTEND: self.rule.extend, Phase.VERIFY: self.rule.verify,
        }  # fmt: skip
        (phase,) = (phase for phase, row in ROWS.items() if type(call).__name__ == f"{phase.value.title()}Call")
        return serve[phase](call)

    def captured(self, call: GdnCall) -> torch.cuda.CUDAGraph:
        """A graph of ``call`` on a stream where it was served once, which compiles and makes scratch."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self.serve(call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.serve(call)
        return graph

    def count(self, name: str, **labels: str) -> int:
        return self.container.counters().total(name, **labels)


Make: TypeAlias = Callable[[str, torch.dtype, tuple[int, int]], Served]


@pytest.fixture(scope="module")
def served() -> Iterator[Make]:
    """One container for each adapter, dtype and heads, since making one compiles."""
    made: dict[tuple[object, ...], Served] = {}

    def make(name: str, state: torch.dtype, heads: tuple[int, int]) -> Served:
        if (name, state, heads) not in made:
            made[name, state, heads] = Served(name, state, heads)
        return made[name, state, heads]

    yield make
    torch.cuda.synchronize()
    for one in made.values():
        qwen35.close(one.container)


def moved(tensor: Tensor) -> Tensor:
    """Equal, one element past a multiple of 32 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    assert room.data_ptr() % 32 == 0
    return room[1:].view(tensor.shape).copy_(tensor)


def _off(call: Any) -> Any:
    gates = raw_gates(call)
    names = [name for name in ("q", "k", "v", "slots", "out", "cu_seqlens") if name in type(call).__dataclass_fields__]
    return replace(
        call, **{name: moved(getattr(call, name)) for name in names},
        gates=replace(gates, **{name: moved(getattr(gates, name)) for name in ("a", "b", "A_log", "dt_bias")}),
    )  # fmt: skip


def spoil(call: GdnCall) -> None:
    """NaN wherever ``call`` is to write and reads nothing."""
    if isinstance(call, CommitCall):
        call.states[call.slots.long()] = NAN
        return
    assert call.out is not None
    call.out.fill_(NAN)
    if isinstance(call, VerifyCall):
        call.intermediates.fill_(NAN)


def assert_written(call: GdnCall, what: str) -> None:
    if isinstance(call, CommitCall):
        assert torch.equal(call.states[call.slots.long()], call.intermediates[:, 0]), what
        return
    assert call.out is not None
    assert bool(torch.isfinite(call.out).all()), what
    if isinstance(call, VerifyCall):
        assert bool(torch.isfinite(call.intermediates).all()), what


def refused_inside_capture(one: Served, call: GdnCall) -> None:
    """As the adapter states of extend; the fallback is not asked."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=one.stream):
        with pytest.raises(CaptureError):
            one.serve(call)
        torch.zeros(1, device="cuda")


@pytest.mark.parametrize("how", ["eager", "replay"])
@pytest.mark.parametrize("off", [False, True], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "page-major"])
@pytest.mark.parametrize("phase", list(Phase), ids=str)
@pytest.mark.parametrize("heads", [(16, 32), (16, 64), (2, 8), (4, 4)], ids=lambda heads: "{}/{}".format(*heads))
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["triton", "flashinfer", "sglang"])
def test_the_adapter_itself_serves(
    served: Make, name: str, state: torch.dtype, heads: tuple[int, int], phase: Phase, paged: bool, off: bool, how: str,
    seed: int,
) -> None:  # fmt: skip
    one = served(name, state, heads)
    call = one.call(phase, paged, off, seed)
    assert call.states.is_contiguous() != paged
    assert (call.slots.data_ptr() % 32 != 0) == off
    fallbacks, others = one.count("fallbacks"), one.count("calls") - one.count("calls", adapter=name)
    before = one.count("calls", adapter=name, phase=str(phase), mode="captured" if how == "replay" else "eager")
    if how == "replay" and phase is Phase.EXTEND and not one.rule.capabilities.captures_extend:
        refused_inside_capture(one, call)
        assert one.count("fallbacks") == fallbacks
        return
    if how == "replay":
        graph = one.captured(call)
        spoil(call)
        names = kernels(graph.replay)
        del graph
        counted = one.count("calls", adapter=name, phase=str(phase), mode="captured")
        assert counted == before + 1, "the capture, and no replay"
    else:
        spoil(call)
        names = kernels(lambda: one.serve(call))
        assert one.count("calls", adapter=name, phase=str(phase), mode="eager") >= before + 2
    assert owners(names, phase) == expected(name, phase), names
    assert_written(call, f"seed {seed}")
    assert one.count("fallbacks") == fallbacks
    assert one.count("calls") - one.count("calls", adapter=name) == others, "another adapter served"
