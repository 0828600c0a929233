"""FlashInfer's prefill on several streams: its workspaces are the process's, so one prefill waits for another."""

from __future__ import annotations

import inspect
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from flashinfer_bed import F32, HOPPER, Bed
from qwen35.adapters.flashinfer.gated_delta_rule import FlashInferGatedDeltaRule
from qwen35.adapters.flashinfer.workspaces import PROCESS, PrefillWorkspaces
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.adapter import AdapterOptions
from qwen35.services.devices import Mark

CPU = torch.device("cpu")


class TwoOrders:
    """Streams of the CPU that stand for a GPU's. ``done``: what was issued, by stream; a mark is the length of that."""

    def __init__(self) -> None:
        self.stream = 0
        self.done: list[tuple[object, ...]] = []
        self.held: list[tuple[Tensor, int]] = []

    def of(self, _: torch.device) -> TwoOrders:
        return self

    def current(self) -> int:
        return self.stream

    def capturing(self) -> bool:
        return False

    def mark(self) -> Mark:
        self.done.append(("mark", self.stream))
        return len(self.done)

    def wait(self, mark: Mark) -> None:
        self.done.append(("wait", self.stream, mark))

    def uses(self, tensor: Tensor) -> None:
        self.held.append((tensor, self.stream))

    def held_for(self, tensor: Tensor) -> set[int]:
        return {stream for held, stream in self.held if held is tensor}


class Prefills(Bed):
    """Its adapter shares ``workspaces``, and its prefill makes a larger buffer each time, as for more tokens."""

    def __init__(self, orders: TwoOrders, workspaces: PrefillWorkspaces, kept: dict[Any, Tensor] | None) -> None:
        super().__init__(F32, prepared=False)
        self.orders, self.kept = orders, kept
        self.adapter = FlashInferGatedDeltaRule(
            self.fake.kernels(prefill=self.prefill, workspaces=kept), self.rows, HOPPER, AdapterOptions(),
            workspaces=workspaces,
        )  # fmt: skip
        self.adapter.prepare(self.plan)

    def prefill(self, **arguments: Any) -> None:
        self.orders.done.append(("prefill", self.orders.stream))
        if self.kept is not None:
            before = self.kept.get(("gdn_cp_prefill_tensormaps", CPU))
            self.kept["gdn_cp_prefill_tensormaps", CPU] = torch.empty(1 if before is None else before.numel() + 1)
        self.fake.prefill(**arguments)

    def serve(self, stream: int) -> None:
        self.orders.stream = stream
        self.adapter.extend(self.extend([3, 2], [1, 4]))


@pytest.mark.row("D03")
def test_a_prefill_on_another_stream_waits_for_the_latest_of_any_adapter() -> None:
    orders = TwoOrders()
    shared, kept = PrefillWorkspaces(orders.of), {}
    one, other = Prefills(orders, shared, kept), Prefills(orders, shared, kept)
    for bed, stream in ((one, 0), (one, 0), (other, 1), (one, 1), (one, 0)):
        bed.serve(stream)
    on_0, on_1 = ([("prefill", stream), ("mark", stream)] for stream in (0, 1))
    assert orders.done == [*on_0, *on_0, ("wait", 1, 4), *on_1, *on_1, ("wait", 0, 9), *on_0]


def test_adapters_share_the_process_s_order_unless_told() -> None:
    assert inspect.signature(FlashInferGatedDeltaRule).parameters["workspaces"].default is PROCESS


def test_of_one_stream_nothing_waits_and_nothing_is_held() -> None:
    orders = TwoOrders()
    bed = Prefills(orders, PrefillWorkspaces(orders.of), {})
    for _ in range(3):
        bed.serve(5)
    assert "wait" not in {step[0] for step in orders.done}
    assert not orders.held


def test_workspaces_are_held_for_every_stream_that_worked_in_them_before_they_are_replaced() -> None:
    """Memory that is freed goes back to the stream that made it, while another may still be at work in it."""
    orders, elsewhere = TwoOrders(), torch.empty(1, device="meta")
    kept: dict[Any, Tensor] = {("another", elsewhere.device): elsewhere}
    shared = PrefillWorkspaces(orders.of)
    bed = Prefills(orders, shared, kept)
    bed.serve(0)
    for stream in (1, 1, 0, 2):
        bed.serve(stream)
        (buffer,) = [t for t in kept.values() if t is not elsewhere]
        assert stream in orders.held_for(buffer)
    assert not orders.held_for(elsewhere)


def test_a_prefill_that_failed_is_waited_for_too() -> None:
    orders = TwoOrders()
    shared = PrefillWorkspaces(orders.of)

    def fails() -> None:
        raise RuntimeError("launched one kernel of three")

    with pytest.raises(RuntimeError, match="one kernel"):
        shared.run(CPU, {}, fails)
    orders.stream = 1
    shared.run(CPU, {}, lambda: None)
    assert ("wait", 1, 1) in orders.done


def test_where_workspaces_are_not_known_a_second_stream_is_refused_and_the_first_goes_on() -> None:
    orders = TwoOrders()
    bed = Prefills(orders, PrefillWorkspaces(orders.of), None)
    bed.serve(3)
    before = len(orders.done)
    orders.stream = 4
    call = bed.extend([3, 2], [1, 4])
    states = call.states.clone()
    with pytest.raises(UnsupportedError, match="extend on a second stream"):
        bed.adapter.extend(call)
    assert len(orders.done) == before, "nothing was launched"
    assert torch.equal(call.states, states)
    bed.serve(3)


def test_threads_take_turns() -> None:
    orders = TwoOrders()
    shared, inside, most = PrefillWorkspaces(orders.of), [0], [0]

    def launch() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)  # where threads are not kept apart, the other comes in now
        inside[0] -= 1

    threads = [threading.Thread(target=shared.run, args=(CPU, {}, launch)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
