"""Two streams in one FlashInfer adapter: neither sees the other's scratch, whatever the device does first."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_flashinfer_known import known, laid_out
from torch import Tensor

from flashinfer_bed import BF16, F32, HOPPER, Bed
from qwen35.adapters.flashinfer.gated_delta_rule import FlashInferGatedDeltaRule
from qwen35.adapters.flashinfer.index_scratch import IndexPlaces, IndexScratch
from qwen35.ports.adapter import AdapterOptions, HoldsScratch
from qwen35.ports.gated_delta_rule import DecodeCall, VerifyCall
from qwen35.services.scratch import Scratch
from two_streams import Call, Streams, assert_left_alone, serve


class TwoStreams(Bed):
    """Its adapter asks ``streams`` which one is current."""

    def __init__(self, state: torch.dtype) -> None:
        super().__init__(state, null=0, prepared=False)
        self.streams = Streams()
        late = ("decode", "mtp", "mtp_bf16", "prefill")
        kernels = {name: self.streams.late(getattr(self.fake, name)) for name in late}
        self.adapter = FlashInferGatedDeltaRule(
            self.fake.kernels(**kernels), self.rows, HOPPER, AdapterOptions(), stream_of=self.streams.of
        )
        self.adapter.prepare(self.plan)
        self.fake.calls.clear()


def alone(bed: Bed, call: Call) -> tuple[Tensor, Tensor]:
    """Output, and what is written, of ``call`` by an adapter that serves nothing else."""
    changes = {"intermediates": call.intermediates.clone()} if isinstance(call, VerifyCall) else {}
    apart = replace(call, states=call.states.clone(), **changes)
    return serve(Bed(bed.state, null=0).adapter, apart), written(apart)


def written(call: Call) -> Tensor:
    """What ``call`` writes besides its output, without the null slot; where nothing is written it is 9."""
    kept = call.intermediates if isinstance(call, VerifyCall) else call.states[1:]
    return kept.nan_to_num(9.0)


MAKE: dict[str, Callable[[Bed], tuple[Call, Call]]] = {
    "decode, padding and clamped gates": lambda bed: (bed.decode([4, -1, 2]), bed.decode([1, 5, -1])),
    "decode, long slots": lambda bed: tuple(
        replace(c, slots=c.slots.long()) for c in (bed.decode([4, 2]), bed.decode([1, 5]))
    ),
    "verify through scratch": lambda bed: (bed.verify([4, 2], nodes=4), bed.verify([1, -1], nodes=4)),
    "extend": lambda bed: (bed.extend([3, 4], [4, 2]), bed.extend([5, 2], [1, 3])),
}


@pytest.mark.row("D03")
@pytest.mark.parametrize("state", [F32, BF16])
@pytest.mark.parametrize("what", list(MAKE))
def test_a_call_on_another_stream_leaves_scratch_of_this_one_alone(what: str, state: torch.dtype) -> None:
    bed = TwoStreams(state)
    calls = MAKE[what](bed)
    want = [alone(bed, call) for call in calls]
    assert_left_alone(bed.streams, bed.adapter, calls, want, written, bed.seed)


def test_a_known_layout_finds_the_scratch_of_each_stream_at_its_address() -> None:
    bed = TwoStreams(BF16)
    known(bed, [4, -1])
    addresses: dict[int, set[tuple[int, int]]] = {0: set(), 1: set()}
    for _ in range(2):
        for bed.streams.stream in (0, 1):
            assert bed.adapter.decode_known(laid_out(bed.decode([3, 1]))) is not None
            seen = bed.fake.latest("decode")
            addresses[bed.streams.stream].add((seen["initial_state_indices"].data_ptr(), seen["a"].data_ptr()))
    assert all(len(found) == 1 for found in addresses.values())
    assert addresses[0].isdisjoint(addresses[1])


@pytest.mark.row("D03")
@pytest.mark.parametrize("seen", [False, True], ids=["first seen inside capture", "seen before"])
def test_index_scratch_that_a_graph_holds_outlives_a_larger_plan(monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    """A graph's replays write it, whatever a later plan puts in its place for eager calls."""
    inside = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: inside[0])
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    scratch = Scratch(stream_of=lambda _: 7, inside=lambda _: inside[0])
    scratch.reserve({"read": 16, "write": 16}, cpu)

    def make(_: DecodeCall | VerifyCall) -> IndexScratch:
        read, write = (scratch.take(name, (4,), torch.int32, cpu) for name in ("read", "write"))
        return IndexScratch(read, write, None)

    call, places = Bed().decode([1]), IndexPlaces(make, gpu)
    if seen:
        places(call, 7)
    inside[0] = True
    place = places(call, 7)
    captured = [weakref.ref(t.untyped_storage()) for t in (place.read, place.write)]
    inside[0] = False
    del place, places
    scratch.reserve({"read": 4096, "write": 4096}, cpu)
    gc.collect()
    assert all(storage() is not None for storage in captured)
    scratch.close()
    gc.collect()
    assert not any(storage() is not None for storage in captured), "nothing else kept them"


def test_scratch_is_counted_and_bounded_by_the_plan_and_a_second_stream_adds_its_own() -> None:
    bed = TwoStreams(BF16)
    assert isinstance(bed.adapter, HoldsScratch)
    call = bed.verify([2, 3])
    held = [bed.adapter.scratch_bytes]
    for bed.streams.stream in (0, 1, 0, 1):
        serve(bed.adapter, call)
        held.append(bed.adapter.scratch_bytes)
        assert held[-1] <= bed.adapter.scratch_bound
    nodes = bed.plan.max_batch * bed.plan.max_draft * call.states[0].numel() * BF16.itemsize
    assert held[1] - held[0] >= 2 * nodes, "its own, and one that lies ready"
    assert nodes <= held[2] - held[1] < 2 * nodes
    assert held[2] == held[3] == held[4]
    bed.adapter.close()
    assert bed.adapter.scratch_bytes == 0
