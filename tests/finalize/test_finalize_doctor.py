"""``qwen35 doctor`` names the adapter of the fused finalize that the service would take, on pretended platforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from finalize_fakes import Meeting

from qwen35.adapters.flashinfer.finalize_entries import FINALIZE_IPC, FINALIZE_MULTICAST
from qwen35.adapters.flashinfer.finalize_ipc import FlashInferIpcFusion
from qwen35.adapters.flashinfer.finalize_multicast import FlashInferMulticastFusion
from qwen35.adapters.triton.finalize_entries import FINALIZE_FUSION
from qwen35.cli.doctor_choices import ChoiceFacts, choices
from qwen35.domain.finalize_capabilities import DeviceFacts
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.domain.geometry import public_geometry
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry
from qwen35.services.finalize_choice import FusionChoice, choose_fusion
from qwen35.services.registry import AdapterRegistry
from qwen35.settings import load_settings

pytest.importorskip("triton")
pytest.importorskip("flashinfer.comm.mnnvl_cutedsl")

MULTICAST = "multicast requires NVLink multicast, which cuda:0 does not offer or the environment disables"
PROFILE = "compiled profile requires (ranks, hidden, top_k) of (8, 8192, 10) or (16, 8192, 10), got (2, 2048, 8)"
CAPABILITY = "compute capability requires at least 10.0, got 9.0"
FOREIGN = "symmetric memory backend requires CUDA, got NVSHMEM"


def shape_of(group: object) -> tuple[int, int]:
    """Of the one group there is; a process without one cannot ask."""
    if group is None:
        raise ValueError("Default process group has not been initialized")
    return 2, 0


@dataclass(frozen=True)
class Machine:
    """A pretended one: what its device says of itself, and torch's symmetric memory backend there."""

    device: str
    facts: DeviceFacts
    backend: str | None = "CUDA"

    def registry(self) -> AdapterRegistry:
        """The adapters themselves, told these facts."""
        from qwen35.adapters.triton.finalize_fusion import TritonFinalizeFusion

        def made(entry: AdapterEntry, make: Callable[[], Any]) -> AdapterEntry:
            return replace(entry, create=lambda *_: make())

        platform = Platform(
            device=self.device, device_name="pretended", compute_capability=self.facts.compute_capability
        )
        return AdapterRegistry(platform, extra=[
            made(FINALIZE_MULTICAST, lambda: FlashInferMulticastFusion(self.facts, shape_of=shape_of)),
            made(FINALIZE_FUSION, lambda: TritonFinalizeFusion(self.facts, backend_of=lambda _: self.backend)),
            made(FINALIZE_IPC, lambda: FlashInferIpcFusion(self.facts)),
        ])  # fmt: skip


NO_CUDA = tuple(f"{what} requires a CUDA device, got cpu" for what in ("symmetric memory", "multicast"))
CPU = Machine("cpu", DeviceFacts(device="cpu", no_symmetric_memory=NO_CUDA[:1], no_multicast=NO_CUDA[1:]))
H200_FACTS = DeviceFacts(
    device="cuda:0", model="NVIDIA H200", compute_capability=(9, 0), multiprocessors=132, no_multicast=(MULTICAST,)
)
H200 = Machine("cuda:0", H200_FACTS)
FOREIGN_H200 = replace(H200, backend="NVSHMEM")
B200 = Machine("cuda:0", replace(H200_FACTS, model="NVIDIA B200", compute_capability=(10, 0), no_multicast=()))
ON_CPU = ["device requires cuda, got cpu"]


def doctors(machine: Machine, finalize: str) -> ChoiceFacts:
    found = choices(machine.registry(), load_settings(finalize=finalize, device=machine.device))
    (own,) = (choice for choice in found if choice["setting"] == "finalize")
    return own


def services(machine: Machine, finalize: str) -> FusionChoice:
    """The choice of two ranks on like devices of such a machine, with a process group."""
    geometry, meeting, group = public_geometry("35B-A3B"), Meeting(2), object()

    def choose(rank: int) -> FusionChoice:
        asked = WorkspaceSignature(
            group=group, tp_size=2, rank=rank, hidden=geometry.hidden, top_k=geometry.top_k, max_m=8192,
            device=machine.device, speculative=False,
        )  # fmt: skip
        facts = replace(machine.facts, uuid=f"GPU-{rank}")
        # Every adapter of a rank is told rank 0 of the group's shape, as the pretended one knows no other.
        return choose_fusion(machine.registry(), finalize, replace(asked, rank=0), facts, meeting.side(rank))

    first, second = meeting.run(choose)
    assert isinstance(first, FusionChoice), first
    assert first == second
    return first


@pytest.mark.row("A25")
@pytest.mark.parametrize(
    ("machine", "finalize", "adapter", "rejected"),
    [
        (CPU, "auto", "reference", {"flashinfer_multicast": ON_CPU, "triton": ON_CPU, "flashinfer_ipc": ON_CPU}),
        (H200, "auto", "triton", {"flashinfer_multicast": [CAPABILITY, MULTICAST]}),
        (FOREIGN_H200, "auto", "flashinfer_ipc",
         {"flashinfer_multicast": [CAPABILITY, MULTICAST], "triton": [FOREIGN]}),
        (B200, "auto", "triton", {"flashinfer_multicast": [PROFILE]}),
        (H200, "flashinfer_ipc", "flashinfer_ipc", {}),
        (H200, "reference", "reference", {}),
    ],
    ids=lambda given: given.facts.model or "cpu" if isinstance(given, Machine) else "",
)  # fmt: skip
def test_the_doctors_answer_and_reasons_are_the_services(
    machine: Machine, finalize: str, adapter: str, rejected: dict[str, list[str]]
) -> None:
    facts, chosen = doctors(machine, finalize), services(machine, finalize)
    assert (facts["adapter"], facts["rejected"], facts["ok"]) == (adapter, rejected, True)
    assert "35B-A3B on 2 ranks" in facts["reason"]
    fewer = "of which it serves 1024: larger steps are not fused"
    assert (fewer in facts["reason"]) is (adapter == "flashinfer_ipc")
    assert chosen.max_m == (1024 if adapter == "flashinfer_ipc" else 8192)
    assert chosen.name == adapter
    of_rank_0 = {
        name: [r.removeprefix("rank 0: ") for r in why if r.startswith("rank 0: ")]
        for name, why in chosen.rejected.items()
    }
    assert of_rank_0 == rejected


@pytest.mark.row("A23")
@pytest.mark.parametrize(
    ("finalize", "why"), [("flashinfer_multicast", [CAPABILITY, MULTICAST]), ("triton", [FOREIGN])]
)
def test_a_named_adapter_that_prepare_would_refuse_is_refused_with_its_reasons(finalize: str, why: list[str]) -> None:
    facts = doctors(FOREIGN_H200, finalize)
    assert (facts["adapter"], facts["ok"], facts["rejected"]) == (None, False, {finalize: why})
    assert facts["reason"].startswith("build() works, prepare() among ranks would fail")


def test_an_adapter_that_fails_when_asked_is_told_and_not_raised() -> None:
    def lost(_: Any) -> Any:
        raise KeyError("sm_90")

    entry = replace(FINALIZE_FUSION, create=lambda *_: broken)
    broken = FlashInferIpcFusion(H200_FACTS)
    broken.supports = lost  # type: ignore[method-assign]
    registry = AdapterRegistry(H200.registry().platform, extra=[entry])
    (facts,) = (c for c in choices(registry, load_settings(finalize="triton")) if c["setting"] == "finalize")
    assert (facts["ok"], facts["rejected"]) == (False, {"triton": ["KeyError: 'sm_90'"]})
