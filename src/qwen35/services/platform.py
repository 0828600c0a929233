"""Looks at the machine once, when the container is built."""

from __future__ import annotations

import torch

from qwen35.domain.errors import ConfigurationError
from qwen35.domain.platform import Platform


def detect_platform(device: str = "auto") -> Platform:
    """The machine as ``device`` ("auto", "cpu", "cuda", "cuda:N") selects it.

    Raises ``ConfigurationError`` for a device that is not there.
    """
    has_gpu = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigurationError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if kind == "cpu":
        return Platform(device="cpu", device_name="CPU")
    if not has_gpu or int(index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"device {device!r} is not there: torch sees {torch.cuda.device_count()} GPUs")
    device = f"cuda:{index or torch.cuda.current_device()}"
    properties = torch.cuda.get_device_properties(device)
    return Platform(
        device=device, device_name=properties.name, multiprocessors=properties.multi_processor_count,
        compute_capability=(properties.major, properties.minor),
    )  # fmt: skip
