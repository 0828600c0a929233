"""Which GPU and which stream a call's work goes to, asked as cheaply as torch allows, and events by which one stream
waits for another. The host never waits here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

#: An event of ``Streams.mark``, for its ``wait`` alone.
Mark: TypeAlias = object


class Streams(Protocol):
    """The streams of one device, as seen by the thread that calls."""

    def current(self) -> int:
        """A number for the stream that is current; 0 is the default stream, which is never captured."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        ...

    def mark(self) -> Mark:
        """An event behind everything that was issued on the current stream. Not inside capture."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is issued on the current stream from now on runs behind ``mark``. Not inside capture."""
        ...

    def uses(self, tensor: Tensor) -> None:
        """The memory of ``tensor``, once freed, is not handed out before the current stream is done with it."""
        ...


def capturing(device: torch.device | None = None) -> bool:
    """Whether the current stream of a CUDA ``device`` is being captured into a CUDA graph; where none is named, of the
    current one, and never where CUDA has not been used."""
    if device is not None:
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


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


class CudaStreams:
    """The streams of a CUDA ``device``."""

    capturing = staticmethod(torch.cuda.is_current_stream_capturing)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        #: As ``current_stream`` asks, of a device that is known: every decode asks, for each parameter.
        self.current: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, index)

    def mark(self) -> torch.cuda.Event:
        """See ``Streams``."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def wait(self, mark: Mark) -> None:
        """See ``Streams``."""
        if isinstance(mark, torch.cuda.Event):
            torch.cuda.current_stream(self._device).wait_event(mark)

    def uses(self, tensor: Tensor) -> None:
        """See ``Streams``."""
        tensor.record_stream(torch.cuda.current_stream(self._device))


def streams_of(device: torch.device) -> Streams | None:
    """The streams of ``device``; None for the CPU, which has one order."""
    return CudaStreams(device) if device.type == "cuda" else None
