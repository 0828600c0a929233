"""What the profiler says that a GPU did."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

#: A process's first windows may come back empty while the profiler's device side starts up.
WINDOWS = 3


def kernels(work: Callable[[], object]) -> list[str]:
    """Names of all that the device does for ``work``, which has run once before."""
    work()
    torch.cuda.synchronize()
    names: list[str] = []
    for _ in range(WINDOWS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        names = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
        if names:
            break
    return names
