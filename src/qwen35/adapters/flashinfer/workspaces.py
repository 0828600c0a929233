"""The workspaces of FlashInfer's prefill, which all adapters of a process share: one prefill of a GPU after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from qwen35.domain.errors import UnsupportedError
from qwen35.services.devices import Mark, Streams, streams_of


class _Turns:
    """The prefills of one GPU: the stream of the latest, a mark behind it, and whether there were others."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.lock = streams, threading.Lock()
        self.stream: int | None = None
        self.mark: Mark | None = None
        self.several = False


class PrefillWorkspaces:
    """Turns of prefills, which are the process's: FlashInfer keeps their workspaces by name and device, whatever the
    stream, and puts a larger buffer in the place of one that is too small.

    A prefill on another stream than the latest one waits for that, on the device. Buffers that several streams use are
    held for all of them: the allocator would otherwise give a replaced one to the stream that made it while another
    still works in it. Not ordered is who calls FlashInfer's prefill beside the adapters.
    """

    def __init__(self, streams: Callable[[torch.device], Streams | None] = streams_of) -> None:
        self._streams_of, self._lock = streams, threading.Lock()
        self._turns: dict[torch.device, _Turns | None] = {}

    def run(self, device: torch.device, kept: Mapping[Any, Any] | None, launch: Callable[[], object]) -> None:
        """``launch`` a prefill on the current stream of ``device``. ``kept``: FlashInfer's workspaces.

        Raises ``UnsupportedError`` where it is on another stream than the latest and nothing is known of workspaces.
        """
        turns = self._of(device)
        if turns is None:
            launch()
            return
        with turns.lock:
            streams, stream = turns.streams, turns.streams.current()
            if turns.stream not in (None, stream):
                if kept is None:
                    raise UnsupportedError("FlashInfer's prefill", [_UNKNOWN])
                turns.several = True
                streams.wait(turns.mark)
            try:
                launch()
            finally:  # some of its kernels may run where it failed
                turns.stream, turns.mark = stream, streams.mark()
                if turns.several and kept is not None:
                    for buffer in list(kept.values()):
                        if buffer.device == device:
                            streams.uses(buffer)

    def _of(self, device: torch.device) -> _Turns | None:
        """None for a CPU, which has one order."""
        with self._lock:
            if device not in self._turns:
                streams = self._streams_of(device)
                self._turns[device] = None if streams is None else _Turns(streams)
            return self._turns[device]


_UNKNOWN = (
    "extend on a second stream requires a FlashInfer whose workspaces can be held, got one without utils._cache_buf"
)

#: FlashInfer's workspaces are the process's, and so is the order of those who use them.
PROCESS = PrefillWorkspaces()
