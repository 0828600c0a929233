"""Which GPU and which stream a call's work goes to, asked as cheaply as torch allows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA ``device`` is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """A number for the stream that work on ``device`` goes to now; 0 on the CPU.

    Asked as Triton's launcher asks: the public function makes an object each time, which takes several times as long.
    """
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def on(device: object) -> AbstractContextManager[object]:
    """Inside, the GPU ``device`` is the current one; nothing is done where it is, and for what is no GPU."""
    if not isinstance(device, torch.device) or device.type != "cuda":
        return nullcontext()
    here: bool = torch.cuda.is_initialized() or torch.cuda.is_available()  # type: ignore[no-untyped-call]
    if not here or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)
