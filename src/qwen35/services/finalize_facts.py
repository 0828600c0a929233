"""Looks at a rank's device once, for what ranks can share: peer memory, and apart from it, multicast."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from qwen35.domain.finalize_capabilities import DeviceFacts


def device_facts(device: str) -> DeviceFacts:
    """What this process sees of ``device`` ("cpu", "cuda:0"). Queries only: allocates and opens nothing."""
    host = socket.gethostname()
    if not device.startswith("cuda"):
        no_memory, no_multicast = (f"{what} requires a CUDA device, got {device}" for what in _WHAT)
        return DeviceFacts(device=device, host=host, no_symmetric_memory=(no_memory,), no_multicast=(no_multicast,))
    index = torch.device(device).index
    properties = torch.cuda.get_device_properties(index)
    others = [i for i in range(torch.cuda.device_count()) if i != index]
    closed = [i for i in others if not torch.cuda.can_device_access_peer(index, i)]
    nccl = dist.is_available() and dist.is_nccl_available()
    return DeviceFacts(
        device=device, host=host, uuid=str(properties.uuid),
        compute_capability=(properties.major, properties.minor), multiprocessors=properties.multi_processor_count,
        no_symmetric_memory=() if nccl else ("symmetric memory requires torch.distributed with NCCL",),
        no_multicast=_against_multicast(index),
        closed_peers=tuple(str(torch.cuda.get_device_properties(i).uuid) for i in closed),
    )  # fmt: skip


_WHAT = ("symmetric memory", "multicast")


def _against_multicast(index: int) -> tuple[str, ...]:
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, index):
        return ()
    return (f"multicast requires NVLink multicast, which cuda:{index} does not offer or the environment disables",)
