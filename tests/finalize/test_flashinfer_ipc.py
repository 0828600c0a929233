"""FlashInfer's IPC finalize on a machine without a GPU: what its workspace is made with, and when it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from finalize_fakes import FakeFusion, FullDevice, Meeting, Twin
from finalize_services import CPU
from test_finalize_flashinfer import HOPPER, Native, signature
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen35.adapters._kernels.expert_sum import ExpertSum
from qwen35.adapters.flashinfer.finalize_ipc import FlashInferIpcFusion
from qwen35.adapters.flashinfer.finalize_names import FusionNames
from qwen35.domain.capabilities import Support
from qwen35.domain.errors import CreationError, UnsupportedError
from qwen35.domain.finalize_capabilities import DeviceFacts
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.adapter import AdapterEntry
from qwen35.services.finalize_agreement import Agreements
from qwen35.services.finalize_choice import choose_fusion
from qwen35.services.registry import AdapterRegistry


def no_sum(*_: Any) -> None:
    """For a workspace that serves no call."""


class Ipc:
    """The adapter over a FlashInfer that notes what its workspace was made with, and when."""

    def __init__(self, expert_sum: ExpertSum = no_sum, agreement: Any = None) -> None:
        self.given: dict[str, Any] = {}
        self.devices: list[str] = []
        self._sum, self._agreement = expert_sum, agreement or Twin()
        #: What happened, in order: sums by their tensors, and "made".
        self.events: list[Any] = []

    def prepare(self, asked: WorkspaceSignature) -> Any:
        names = FusionNames(self._make, lambda **_: None, "finalize", "all-reduce")
        agreements = Agreements(lambda _: self._agreement)
        ipc = FlashInferIpcFusion(HOPPER, lambda: names, agreements, self._on_device, lambda: self._expert_sum)
        with FakeTensorMode():
            return ipc.prepare(asked)

    def _make(self, **arguments: Any) -> Native:
        class Handles(Native):
            ipc_handles = ((11, 12), (21, 22))

        self.given.update(arguments)
        self.events.append("made")
        return Handles(**arguments)

    def _on_device(self, device: str) -> Any:
        self.devices.append(device)
        return nullcontext()

    def _expert_sum(self, *tensors: Any) -> None:
        self.events.append(tensors)
        self._sum(*tensors)


@pytest.mark.row("A04")
def test_what_the_ipc_workspace_is_made_with() -> None:
    asked = signature(hidden=2048, top_k=8, tp_size=2, rank=1, max_m=48, device="cuda:5")
    ipc = Ipc()
    workspace, given = ipc.prepare(asked), ipc.given
    assert given == {
        "tp_size": 2, "tp_rank": 1, "max_token_num": 48, "hidden_dim": 2048, "dtype": torch.bfloat16,
        "group": asked.group,
    }  # fmt: skip
    assert given["group"] is asked.group, "left out, it would be the whole world"
    assert ipc.devices == ["cuda:5"]
    assert (workspace.adapter, workspace.signature, workspace.addresses) == ("flashinfer_ipc", asked, (11, 12, 21, 22))


@pytest.mark.parametrize("shared", [False, True])
def test_prepare_launches_every_kernel_that_a_finalize_can_ask_for(shared: bool) -> None:
    """Of each dtype of weights, before this rank waits for others, into a share as calls have one."""
    ipc = Ipc()
    ipc.prepare(signature(hidden=2048, top_k=8, tp_size=2, rank=1, max_m=48, shared_expert=shared))
    *launched, made = ipc.events
    assert made == "made"
    assert {weights.dtype for _, weights, *_ in launched} == {torch.bfloat16, torch.float32}
    for routed, weights, indices, own, share in launched:
        assert (own is not None) == shared
        assert {t.shape for t in (routed, share, *([own] if shared else ()))} == {(1, 2048)}
        assert {t.dtype for t in (routed, share, *([own] if shared else ()))} == {torch.bfloat16}
        assert weights.shape == indices.shape == (1, 8)
        assert indices.dtype == torch.int32
        assert {str(t.device) for t in (routed, weights, indices, share)} == {"cuda:0"}


def does_not_compile(*_: Any) -> None:
    raise RuntimeError("no kernel for sm_90")


@pytest.mark.parametrize("why", ["OutOfMemoryError: no room for (48, 2048)", "RuntimeError: no kernel for sm_90"])
@pytest.mark.parametrize("on", [0, 1])
def test_where_one_rank_has_no_share_nobody_opens_flashinfers_memory(on: int, why: str) -> None:
    """Once it is open, an error would leave it so; and the other would wait in FlashInfer's own rendezvous."""
    meeting = Meeting(2)
    full = "OutOfMemory" in why

    def prepare(rank: int) -> Any:
        fails = rank == on
        each.append(Ipc(does_not_compile if fails and not full else no_sum, meeting.side(rank)))
        with FullDevice(48, 2048) if fails and full else nullcontext():
            return each[-1].prepare(signature(hidden=2048, top_k=8, tp_size=2, rank=rank, max_m=48))

    each: list[Ipc] = []
    out = meeting.run(prepare)
    assert all(isinstance(e, CreationError) for e in out), out
    assert {str(e) for e in out} == {f"flashinfer_ipc workspace: rank {on}: {why}"}
    assert not any("made" in ipc.events for ipc in each)


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp_size": 16}, "tensor parallel size requires 2 or 4 or 8, got 16"),
        ({"hidden": 100}, "hidden requires a multiple of 8, got 100"),
    ],
)  # fmt: skip
def test_what_its_calls_could_not_serve_is_refused(changes: dict[str, Any], said: str) -> None:
    ipc = Ipc()
    asked = signature(**({"hidden": 2048, "device": "cuda:0"} | changes))
    with pytest.raises(UnsupportedError, match=said):
        ipc.prepare(asked)
    assert ipc.events == []
