"""What a measurement ran on: versions, device and driver, as JSON-ready values."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

import torch

from qwen35 import __version__
from qwen35.domain.platform import Platform

#: Distributions whose release changes what is measured, by the name that reports show.
_DISTRIBUTIONS = {
    "torch": "torch", "triton": "triton", "flashinfer": "flashinfer-python", "cutlass_dsl": "nvidia-cutlass-dsl",
    "sglang": "sglang", "transformers": "transformers",
}  # fmt: skip
_DRIVER = Path("/proc/driver/nvidia/version")


class DeviceFacts(TypedDict):
    """``memory_bytes`` and ``l2_bytes`` are 0 on a CPU; ``compute_capability`` is "9.0" or None."""

    device: str
    name: str
    compute_capability: str | None
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int


def versions() -> dict[str, str | None]:
    """Releases by name; None: not installed. ``cuda`` is torch's, ``driver`` the kernel module's."""
    found: dict[str, str | None] = {"qwen35": __version__, "python": platform.python_version()}
    for name, distribution in _DISTRIBUTIONS.items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    found["driver"] = _driver()
    found["system"] = f"{sys.platform} {platform.machine()}"
    return found


def device_facts(where: Platform) -> DeviceFacts:
    """The device of ``where``."""
    memory = l2 = 0
    if where.device_type == "cuda":
        properties = torch.cuda.get_device_properties(where.device)
        memory, l2 = properties.total_memory, properties.L2_cache_size
    capability = where.compute_capability
    return DeviceFacts(
        device=where.device, name=where.device_name, multiprocessors=where.multiprocessors,
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        memory_bytes=memory, l2_bytes=l2,
    )  # fmt: skip


def _driver() -> str | None:
    if not _DRIVER.is_file():
        return None
    first = _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    numbers = [word for word in first.split() if word[:1].isdigit() and "." in word]
    return numbers[0] if numbers else None
