"""Which stream work goes to now, and events by which one stream waits for another. The host never waits here."""

from __future__ import annotations

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


class CudaStreams:
    """The streams of a CUDA ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index

    def current(self) -> int:
        """See ``Streams``; no stream object is made, since this is asked on hot paths."""
        return torch._C._cuda_getCurrentRawStream(self._index)

    def capturing(self) -> bool:
        """See ``Streams``."""
        return torch.cuda.is_current_stream_capturing()

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
