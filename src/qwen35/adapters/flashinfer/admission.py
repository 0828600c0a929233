"""What tells one admitted call from another: shapes settle everything but addresses."""

from __future__ import annotations

from operator import attrgetter

from torch import Tensor

from qwen35.adapters.flashinfer.mends import ALIGNMENT
from qwen35.ports.gdn_calls import DecodeCall, RawGates, VerifyCall

StepCall = DecodeCall | VerifyCall

_GATES = attrgetter("a", "b", "A_log", "dt_bias")
_TENSORS = {
    DecodeCall: attrgetter("q", "k", "v", "states", "slots", "write_slots", "out"),
    VerifyCall: attrgetter("q", "k", "v", "states", "slots", "rows", "out", "intermediates", "parents"),
}


def tensors_of(call: StepCall) -> tuple[Tensor | None, ...]:
    """Every tensor of the call; the parameters, of which copies are made, come last."""
    gates = _GATES(call.gates) if isinstance(call.gates, RawGates) else ()
    return (*_TENSORS[type(call)](call), *gates)


def key_of(call: StepCall, tensors: tuple[Tensor | None, ...]) -> tuple[object, ...]:
    return (
        type(call), call.scale,
        *[None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors],
    )  # fmt: skip


def misaligned(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether an address is off, which no set of shapes can settle."""
    joined = 0
    for tensor in tensors[:-2]:
        if tensor is not None:
            joined |= tensor.data_ptr()
    return joined % ALIGNMENT != 0
