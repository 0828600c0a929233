"""The ranks of a command that torchrun started: ``torchrun --nproc-per-node 2 -m qwen35 generate ...``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qwen35.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from qwen35.model import TensorParallel
    from qwen35.settings import Settings


@contextmanager
def joined(settings: Settings) -> Iterator[tuple[Settings, TensorParallel]]:
    """The settings of this rank and its place among the others; one process by itself is a rank alone.

    The process group is NCCL where the settings' device is a GPU, a GPU a rank of its host, and gloo on the CPU; it
    is destroyed at the end. Raises ``ConfigurationError`` for a device that ranks cannot share.
    """
    from qwen35.model import TensorParallel
    from qwen35.settings import launch_environment, load_settings

    launch = launch_environment()
    if launch.world_size == 1:
        yield settings, TensorParallel()
        return
    import torch
    import torch.distributed as dist

    from qwen35.services.assembly import make_platform
    from qwen35.services.platform import detect_platform

    if settings.device.startswith("cuda:"):
        raise ConfigurationError(
            f"device must be cuda where {launch.world_size} ranks run (each takes a GPU of its own), "
            f"got {settings.device}"
        )
    on_gpu = make_platform(settings).device_type == "cuda"
    device = f"cuda:{launch.local_rank}" if on_gpu else "cpu"
    detect_platform(device)  # a rank without a GPU is refused before it joins
    if on_gpu:
        torch.cuda.set_device(launch.local_rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", rank=launch.rank, world_size=launch.world_size,
        device_id=torch.device(device) if on_gpu else None,
    )  # fmt: skip
    try:
        ranks = TensorParallel(group=dist.group.WORLD, size=launch.world_size, rank=launch.rank)
        yield load_settings(settings, device=device), ranks
    finally:
        dist.destroy_process_group()
