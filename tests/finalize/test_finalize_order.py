"""One workspace, one call at a time: of threads, of services, and of streams."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from finalize_fakes import FakeFusion, FakeWorkspace, Meeting, signature
from finalize_services import case, service
from torch import Tensor

from qwen35.services.finalize_order import CallOrder
from qwen35.services.finalize_registry import WorkspaceRegistry


class Jealous(FakeWorkspace):
    """Notices a second call before the first has ended."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inside, self.most = 0, 0

    def all_reduce(self, local: Tensor, residual: Tensor, gamma: Tensor, out: Any = None) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.002)
        self.inside -= 1
        return super().all_reduce(local, residual, gamma, out)


class JealousFusion(FakeFusion):
    def prepare(self, asked: Any) -> FakeWorkspace:
        self.made.append(Jealous(asked, self.name))
        return self.made[-1]


@pytest.mark.row("A14")
def test_calls_of_threads_and_of_two_services_never_overlap() -> None:
    workspaces, fusion, c = WorkspaceRegistry(), JealousFusion(), case()
    services = [service(fusion, workspaces=workspaces) for _ in range(2)]
    for each in services:
        each.prepare(signature())
    out = Meeting(16).run(lambda i: services[i % 2].all_reduce(c.local(0), c.residual(), c.gamma()))
    assert not [e for e in out if isinstance(e, Exception)], out
    (workspace,) = fusion.made
    assert isinstance(workspace, Jealous)
    assert (len(workspace.calls), workspace.most) == (16, 1)


class Stream:
    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, stream: Stream) -> None:
        self.waited.append(stream)


@pytest.mark.row("A14")
def test_a_call_on_another_stream_waits_for_the_one_before_it() -> None:
    one, two, inside = Stream(), Stream(), False
    current = one
    order = CallOrder(stream_of=lambda _: current, is_capturing=lambda: inside)
    workspaces = WorkspaceRegistry(order=order)
    each, c = service(FakeFusion(), workspaces=workspaces), case()
    each.prepare(signature())

    def call() -> tuple[int, int]:
        each.all_reduce(c.local(0), c.residual(), c.gamma())
        return len(one.waited), len(two.waited)

    assert call() == (0, 0)
    assert call() == (0, 0), "one stream orders its own calls"
    current = two
    assert call() == (0, 1)
    assert two.waited == [one]
    assert call() == (0, 1)
    current, inside = one, True
    assert call() == (0, 1), "inside capture the engine orders its graphs"
    inside = False
    assert call() == (1, 1)
    each.close()
    each.prepare(signature())
    current = two
    assert call() == (1, 1), "a new workspace has had no call to wait for"


@pytest.mark.row("A14")
def test_a_call_that_fails_gives_its_turn_back() -> None:
    order, entered = CallOrder(), threading.Event()
    with pytest.raises(ValueError, match="a kernel's own"), order.turn("cpu"):
        raise ValueError("a kernel's own")

    def other() -> None:
        with order.turn("cpu"):
            entered.set()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(5)
    assert entered.is_set()
