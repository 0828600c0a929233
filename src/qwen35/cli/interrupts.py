"""Ctrl-C while a framework is imported. Torch's own start clears it, or turns it into an error of NumPy's."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C inside the block is a ``KeyboardInterrupt`` at its end, whatever else comes of the block.

    A second one is raised at once. Nothing is changed outside the main thread, nor where somebody else handles or
    ignores the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = 0

    def note(signum: int, frame: Any) -> None:
        nonlocal came
        came += 1
        if came > 1:
            signal.default_int_handler(signum, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
