"""What a measurement ran on: versions, device and driver, as JSON-ready values."""

from __future__ import annotations

import platform
import sys
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

import torch

import qwen35
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
    """Releases by name; None: not installed. ``cuda`` is torch's, ``driver`` the kernel module's.

    ``qwen35_source`` is the digest of our own code as it lay there when this was first asked (see ``source_digest``): a
    result belongs to the commit whose ``src/qwen35`` has the same one.
    """
    found: dict[str, str | None] = {
        "qwen35": qwen35.__version__, "qwen35_source": _own_digest(), "python": platform.python_version(),
    }  # fmt: skip
    for name, distribution in _DISTRIBUTIONS.items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    found["driver"] = _driver()
    found["system"] = f"{sys.platform} {platform.machine()}"
    return found


def source_digest(package: Path) -> str:
    """Twelve hex digits of SHA-256 over the ``.py`` files below ``package``, in the order of their paths: of each its
    path below ``package``, its length and its bytes."""
    digest = sha256()
    for name, path in sorted((path.relative_to(package).as_posix(), path) for path in package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


@cache
def _own_digest() -> str:
    """Once a process: an experiment writes its document after every cell."""
    return source_digest(Path(qwen35.__file__).parent)


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
