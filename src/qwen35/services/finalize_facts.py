"""Looks at a rank's device once, for what ranks can share: peer memory, and apart from it, multicast."""

from __future__ import annotations

import socket
from typing import Any, Protocol

import torch
import torch.distributed as dist

from qwen35.domain.finalize_capabilities import DeviceFacts


class Devices(Protocol):
    """The questions that are asked of a process's CUDA devices, by index."""

    def properties(self, index: int) -> Any:
        """``uuid``, ``name``, ``major``, ``minor`` and ``multi_processor_count``."""

    def count(self) -> int: ...

    def reaches(self, index: int, other: int) -> bool:
        """Whether device ``index`` can access the memory of ``other``."""

    def nccl(self) -> bool:
        """Whether torch.distributed has NCCL."""

    def multicast(self, index: int) -> bool:
        """Whether NVLink multicast is offered and not switched off."""


class TorchDevices:
    """As torch answers them. Queries only: allocates and opens nothing."""

    def properties(self, index: int) -> Any:
        return torch.cuda.get_device_properties(index)

    def count(self) -> int:
        return torch.cuda.device_count()

    def reaches(self, index: int, other: int) -> bool:
        return torch.cuda.can_device_access_peer(index, other)

    def nccl(self) -> bool:
        return dist.is_available() and dist.is_nccl_available()

    def multicast(self, index: int) -> bool:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory

        return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, index))


def device_facts(device: str, devices: Devices | None = None) -> DeviceFacts:
    """What this process sees of ``device`` ("cpu", "cuda:0"); of CUDA what ``devices`` answer, torch's by default."""
    host = socket.gethostname()
    if not device.startswith("cuda"):
        no_memory, no_multicast = (f"{what} requires a CUDA device, got {device}" for what in _WHAT)
        return DeviceFacts(device=device, host=host, no_symmetric_memory=(no_memory,), no_multicast=(no_multicast,))
    ask, index = devices or TorchDevices(), torch.device(device).index
    own = ask.properties(index)
    closed = [i for i in range(ask.count()) if i != index and not ask.reaches(index, i)]
    no_multicast = f"multicast requires NVLink multicast, which cuda:{index} does not offer or the environment disables"
    return DeviceFacts(
        device=device, host=host, uuid=str(own.uuid), model=str(own.name),
        compute_capability=(own.major, own.minor), multiprocessors=own.multi_processor_count,
        no_symmetric_memory=() if ask.nccl() else ("symmetric memory requires torch.distributed with NCCL",),
        no_multicast=() if ask.multicast(index) else (no_multicast,),
        closed_peers=tuple(str(ask.properties(i).uuid) for i in closed),
    )  # fmt: skip


_WHAT = ("symmetric memory", "multicast")
