"""Our Triton kernels, made so that they break the capture clause. They are made on a GPU only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from delegate import Delegate
from torch import Tensor

import qwen35
from qwen35.domain.capabilities import Clause


class Copies:
    """Copies by address: made anew outside capture, taken as they are inside."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.Size], Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.shape)
        if not torch.cuda.is_current_stream_capturing():
            self._made[key] = tensor.clone()
        return self._made[key]


class OnTriton(Delegate):
    """Our Triton kernels, which keep the clause."""

    port = "gated_delta_rule"
    breaks = Clause.CAPTURE

    def __init__(self) -> None:
        super().__init__(qwen35.adapter(self.port, "triton", device="cuda"))
        self.copies = Copies()


class WaitsForSlots(OnTriton):
    """Looks at the slots on the host before each decode."""

    caught_by = "decode: nothing waits for the device"
    raises = "RuntimeError"  # torch's, which the law asks it for

    def decode(self, call: Any) -> Tensor:
        call.slots.tolist()
        return super().decode(call)


class CapturesConstants(OnTriton):
    """Verifies from copies of the slots that only eager calls make anew."""

    caught_by = "verify: replays see new values"

    def verify(self, call: Any) -> Tensor:
        return super().verify(replace(call, slots=self.copies.of(call.slots)))


class CommitsWhatWasAccepted(OnTriton):
    """Commits by copies of the accepted nodes that only eager calls make anew."""

    caught_by = "commit: replays see new values"

    def commit(self, call: Any) -> None:
        super().commit(replace(call, last=self.copies.of(call.last)))


class ScratchFromThePool(OnTriton):
    """Takes new scratch for every decode that is captured."""

    caught_by = "decode: scratch is made before capture"

    def __init__(self) -> None:
        super().__init__()
        self._room: list[Tensor] = []

    @property
    def scratch_bytes(self) -> int:
        return sum(room.nbytes for room in self._room)

    @property
    def scratch_bound(self) -> int:
        return self.scratch_bytes

    def decode(self, call: Any) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            self._room.append(torch.empty(4096, device=call.q.device))
        return super().decode(call)


class ConvOnTriton(OnTriton):
    """The convolution's kernels."""

    port = "short_convolution"


class ConvWaitsForSlots(ConvOnTriton):
    """Looks at the slots on the host before each decode."""

    caught_by = "decode: nothing waits for the device"
    raises = "RuntimeError"

    def decode(self, call: Any) -> Tensor:
        call.slots.tolist()
        return super().decode(call)


class ConvCapturesWeights(ConvOnTriton):
    """Decodes by a copy of the weight that only eager calls make anew."""

    caught_by = "decode: replays see new values"

    def decode(self, call: Any) -> Tensor:
        return super().decode(replace(call, weight=self.copies.of(call.weight)))


class ConvCommitsWhatWasAccepted(ConvOnTriton):
    """Commits by copies of the accepted nodes that only eager calls make anew."""

    caught_by = "commit: replays see new values"

    def commit(self, call: Any) -> None:
        super().commit(replace(call, last=self.copies.of(call.last)))


CAPTURE_BROKEN = (
    WaitsForSlots, CapturesConstants, CommitsWhatWasAccepted, ScratchFromThePool, ConvWaitsForSlots,
    ConvCapturesWeights, ConvCommitsWhatWasAccepted,
)  # fmt: skip
