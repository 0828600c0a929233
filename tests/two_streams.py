"""Two streams in one adapter of fake kernels: a kernel of stream 0 starts late, after a whole call of stream 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, GatedDeltaRule, VerifyCall

Call = DecodeCall | ExtendCall | VerifyCall


class Streams:
    """What an adapter is told of the current ``stream``. ``between`` is served on stream 1 before the next kernel."""

    def __init__(self) -> None:
        self.stream = 0
        self.between: Callable[[], object] | None = None

    def of(self, _: torch.device) -> int:
        return self.stream

    def late(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def launch(**arguments: Any) -> Any:
            between, self.between = self.between, None
            if between is not None:
                self.stream = 1
                between()
                self.stream = 0
            return kernel(**arguments)

        return launch


def serve(adapter: GatedDeltaRule, call: Call) -> Tensor:
    if isinstance(call, ExtendCall):
        return adapter.extend(call).out
    return adapter.decode(call) if isinstance(call, DecodeCall) else adapter.verify(call)


def assert_left_alone(
    streams: Streams, adapter: GatedDeltaRule, calls: tuple[Call, Call], want: Sequence[tuple[Tensor, Tensor]],
    written: Callable[[Call], Tensor], seed: int,
) -> None:  # fmt: skip
    """Serve both ``calls``, the second before the first's kernel: outputs and what is ``written`` are as ``want``."""
    first, second = calls
    outs: list[Tensor] = []
    streams.between = lambda: outs.append(serve(adapter, second))
    outs.append(serve(adapter, first))
    for call, out, (expected, left) in zip((second, first), outs, reversed(want), strict=True):
        assert torch.equal(out, expected), f"seed {seed}"
        assert torch.equal(written(call), left), f"seed {seed}"
