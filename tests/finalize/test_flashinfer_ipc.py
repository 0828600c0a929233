"""FlashInfer's IPC finalize on a machine without a GPU: what its workspace is made with, and when it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from finalize_fakes import FakeFusion, Meeting, Twin
from finalize_services import CPU
from test_finalize_flashinfer import HOPPER, Native, signature
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen35.adapters.flashinfer.finalize_ipc import FlashInferIpcFusion
from qwen35.adapters.flashinfer.finalize_names import FusionNames
from qwen35.domain.capabilities import Support
from qwen35.domain.finalize_capabilities import DeviceFacts
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.adapter import AdapterEntry
from qwen35.services.finalize_agreement import Agreements
from qwen35.services.finalize_choice import choose_fusion
from qwen35.services.registry import AdapterRegistry


def no_sum(*_: Any) -> None:
    """For a workspace that serves no call."""


def ipc_workspace(asked: WorkspaceSignature) -> tuple[Any, dict[str, Any], list[str]]:
    """A workspace of IPC's, what FlashInfer's own was made with, and on which device."""
    given: dict[str, Any] = {}
    devices: list[str] = []

    def on_device(device: str) -> Any:
        devices.append(device)
        return nullcontext()

    class Handles(Native):
        ipc_handles = ((11, 12), (21, 22))

    def make(**arguments: Any) -> Native:
        given.update(arguments)
        return Handles(**arguments)

    names = FusionNames(make, lambda **_: None, "finalize", "all-reduce")
    ipc = FlashInferIpcFusion(HOPPER, lambda: names, Agreements(lambda _: Twin()), on_device, lambda: no_sum)
    with FakeTensorMode():
        return ipc.prepare(asked), given, devices


@pytest.mark.row("A04")
def test_what_the_ipc_workspace_is_made_with() -> None:
    asked = signature(hidden=2048, top_k=8, tp_size=2, rank=1, max_m=48, device="cuda:5")
    workspace, given, devices = ipc_workspace(asked)
    assert given == {
        "tp_size": 2, "tp_rank": 1, "max_token_num": 48, "hidden_dim": 2048, "dtype": torch.bfloat16,
        "group": asked.group,
    }  # fmt: skip
    assert given["group"] is asked.group, "left out, it would be the whole world"
    assert devices == ["cuda:5"]
    assert (workspace.adapter, workspace.signature, workspace.addresses) == ("flashinfer_ipc", asked, (11, 12, 21, 22))


def chosen_by_two(facts: Sequence[DeviceFacts], requested: str, max_m: int, *others: FakeFusion) -> list[Any]:
    """What two ranks with these devices choose among FlashInfer's IPC, as it is, and ``others``."""
    meeting = Meeting(2)

    def choose(rank: int) -> Any:
        ipc = AdapterEntry(
            port="finalize_fusion", name="flashinfer_ipc", rank=20, summary="", probe=lambda _: Support.of(),
            create=lambda *_: FlashInferIpcFusion(facts[rank]),
        )  # fmt: skip
        registry = AdapterRegistry(CPU, extra=[ipc, *(other.entry(rank=10) for other in others)])
        asked = signature(tp_size=2, rank=rank, max_m=max_m, device=f"cuda:{rank}")
        return choose_fusion(registry, requested, asked, facts[rank], meeting.side(rank))

    return meeting.run(choose)


def test_ipc_is_taken_for_more_tokens_than_it_serves_and_serves_those_that_it_can() -> None:
    for max_m in (1023, 1024, 1025, 8192):
        for choice in chosen_by_two([HOPPER, HOPPER], "flashinfer_ipc", max_m):
            assert (choice.name, choice.max_m) == ("flashinfer_ipc", min(max_m, 1024))
    can = FlashInferIpcFusion(HOPPER).capabilities
    assert [can.within(signature(max_m=m)).max_m for m in (1023, 1024, 1025, 8192)] == [1023, 1024, 1024, 1024]


@pytest.mark.row("A25")
def test_ipc_reaches_into_peers_and_so_asks_for_one_host_and_memory_between_them() -> None:
    here, there = replace(HOPPER, host="a", uuid="u0"), replace(HOPPER, host="b", uuid="u1")
    closed = replace(there, host="a", no_symmetric_memory=("symmetric memory requires NCCL",))
    for facts, why in (
        ([here, there], "peers require one host, got rank 0 on a and rank 1 on b"),
        ([here, closed], "rank 1: symmetric memory requires NCCL"),
        ([here, replace(here)], "peers require a device each, got rank 0 and rank 1 on u0"),
    ):
        out = chosen_by_two(facts, "auto", 64, FakeFusion("plain"))
        assert {choice.name for choice in out} == {"plain"}, out
        assert all(choice.rejected["flashinfer_ipc"] == (why,) for choice in out), out


@pytest.mark.row("A25")
def test_the_ipc_backend_needs_no_multicast_and_says_what_it_needs() -> None:
    ipc = FlashInferIpcFusion(HOPPER)
    assert ipc.supports(signature(hidden=2048, top_k=8, tp_size=2, rank=0, max_m=64))
    bad = {
        "tensor parallel size": {"tp_size": 3, "rank": 0},
        "dtype": {"dtype": "float32"},
        "max_m requires at most 1024": {"max_m": 1025},
        "device": {"device": "cpu"},
    }
    for reason, change in bad.items():
        reasons = ipc.supports(signature(**{"max_m": 64} | change)).reasons
        assert len(reasons) == 1, reasons
        assert reasons[0].startswith(reason)
