"""What a rank sees of its own device: every answer of CUDA comes into its own field."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qwen35.domain.finalize_capabilities import DeviceFacts
from qwen35.services.finalize_facts import TorchDevices, device_facts


class Host:
    """Four devices that reach those of ``reached``; ``asked`` is what was asked of which index."""

    def __init__(self, nccl: bool = True, multicast: bool = True, reached: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        self._nccl, self._multicast, self._reached = nccl, multicast, reached
        self.asked: list[tuple[str, int]] = []

    def properties(self, index: int) -> Any:
        return SimpleNamespace(
            uuid=f"GPU-{index}", name=f"NVIDIA H{index}", major=9, minor=index, multi_processor_count=100 + index
        )

    def count(self) -> int:
        return 4

    def reaches(self, index: int, other: int) -> bool:
        self.asked.append(("reaches", index))
        assert other != index, "torch refuses to be asked whether a device reaches itself"
        return other in self._reached

    def nccl(self) -> bool:
        return self._nccl

    def multicast(self, index: int) -> bool:
        self.asked.append(("multicast", index))
        return self._multicast


def test_a_device_that_lacks_nothing_has_nothing_against_it() -> None:
    host = Host()
    assert device_facts("cuda:2", host) == DeviceFacts(
        device="cuda:2", host=socket.gethostname(), uuid="GPU-2", model="NVIDIA H2", compute_capability=(9, 2),
        multiprocessors=102,
    )  # fmt: skip
    assert {index for _, index in host.asked} == {2}


@pytest.mark.row("A25")
def test_multicast_and_symmetric_memory_are_told_apart() -> None:
    facts = device_facts("cuda:1", Host(multicast=False))
    (reason,) = facts.no_multicast
    assert reason.startswith("multicast requires NVLink multicast, which cuda:1 does not offer")
    assert facts.no_symmetric_memory == ()
    facts = device_facts("cuda:1", Host(nccl=False))
    assert facts.no_symmetric_memory == ("symmetric memory requires torch.distributed with NCCL",)
    assert facts.no_multicast == ()


@pytest.mark.row("A25")
def test_devices_that_cannot_be_reached_are_named_by_their_id() -> None:
    assert device_facts("cuda:1", Host(reached=(3,))).closed_peers == ("GPU-0", "GPU-2")


def test_a_cpu_has_neither_and_is_asked_nothing() -> None:
    host = Host()
    facts = device_facts("cpu", host)
    assert facts.no_symmetric_memory == ("symmetric memory requires a CUDA device, got cpu",)
    assert facts.no_multicast == ("multicast requires a CUDA device, got cpu",)
    assert (facts.uuid, facts.compute_capability, host.asked) == ("", None, [])


@pytest.mark.gpu
@pytest.mark.row("A25")
def test_torch_answers_every_question_of_a_real_device() -> None:
    torch_says, facts = TorchDevices(), device_facts("cuda:0")
    assert facts.compute_capability == torch.cuda.get_device_capability(0)
    assert (facts.model, facts.multiprocessors > 0) == (torch.cuda.get_device_name(0), True)
    assert len(facts.uuid) > 30
    assert facts.closed_peers == tuple(
        str(torch.cuda.get_device_properties(i).uuid)
        for i in range(1, torch_says.count()) if not torch_says.reaches(0, i)
    )  # fmt: skip
    assert bool(facts.no_multicast) is not torch_says.multicast(0)
