"""One name for one GPU."""

from __future__ import annotations

import torch

_ANY_GPU = torch.device("cuda")


def with_index(device: torch.device) -> torch.device:
    """``device``, where "cuda" names no GPU the current one, as the tensors made on it would say."""
    if device == _ANY_GPU and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
