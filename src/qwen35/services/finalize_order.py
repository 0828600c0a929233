"""One workspace takes one call at a time, whoever makes it and on whichever stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from qwen35.services.devices import capturing


class Stream(Protocol):
    """As much of a stream as the order of calls needs."""

    def wait_stream(self, stream: Any) -> None: ...


def current_stream(device: str) -> Stream | None:
    """The stream that work on ``device`` goes to now; None on the CPU."""
    return torch.cuda.current_stream(device) if device.startswith("cuda") else None


class CallOrder:
    """Serialises the calls of threads, and lets one that comes on another stream wait for the call before it.

    Inside CUDA graph capture the engine orders its graphs.
    """

    def __init__(
        self, stream_of: Callable[[str], Stream | None] = current_stream, is_capturing: Callable[[], bool] = capturing
    ) -> None:
        self._stream_of, self._capturing = stream_of, is_capturing
        self._lock = threading.RLock()
        self._last: Stream | None = None

    @contextmanager
    def turn(self, device: str) -> Iterator[None]:
        """Hold the workspace for one launch on ``device``'s current stream."""
        with self._lock:
            if not self._capturing():
                self._follow(self._stream_of(device))
            yield

    def forget(self) -> None:
        """The workspace is gone, and with it the call that the next one would wait for."""
        with self._lock:
            self._last = None

    def _follow(self, current: Stream | None) -> None:
        if current is not None and self._last is not None and current != self._last:
            current.wait_stream(self._last)
        self._last = current
