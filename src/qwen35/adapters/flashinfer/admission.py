"""What tells one admitted call from another: shapes settle everything but addresses."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from qwen35.adapters._kernels.rows import IndexLaunch, ZeroLaunch
from qwen35.adapters.flashinfer.index_scratch import IndexPlaces
from qwen35.adapters.flashinfer.mends import ALIGNMENT, Mend
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.admission import CHECKS
from qwen35.ports.gdn_calls import DecodeCall, GdnPlan, RawGates, VerifyCall

StepCall = DecodeCall | VerifyCall
#: Types of a scale that can be told apart by value; of any other the check says what it is, every time.
_SCALES = frozenset({float, int, type(None)})

_PARAMETERS, _GATES = attrgetter("A_log", "dt_bias"), attrgetter("a", "b")
_TENSORS = {
    DecodeCall: attrgetter("q", "k", "v", "states", "slots", "write_slots", "out"),
    VerifyCall: attrgetter("q", "k", "v", "states", "slots", "rows", "out", "intermediates", "parents"),
}


@dataclass(frozen=True, slots=True)
class AdmittedVerify:
    """What is settled about a verify call by its shapes: the detours, the plan they were decided under, and the
    launches and index scratch that they take."""

    mend: Mend
    plan: GdnPlan
    branch: str
    scale: float
    empty: bool
    places: IndexPlaces | None
    index: IndexLaunch
    zero: ZeroLaunch


def phase_of(call: StepCall) -> Phase:
    """Decode or verify."""
    return Phase.DECODE if isinstance(call, DecodeCall) else Phase.VERIFY


def raw_gates(call: StepCall) -> RawGates:
    """The gates of a call that was checked."""
    gates = call.gates
    if not isinstance(gates, RawGates):
        raise UnsupportedError("FlashInfer", ["gates require raw, got log"])
    return gates


def look_at(call: StepCall) -> tuple[tuple[object, ...], bool]:
    """All that the checks look at, as a key, and whether an address or a scale is one that no key can settle.

    Copies are made of parameters, so their addresses do not matter. Raises what the check says where something is no
    tensor.
    """
    try:
        return _look_at(call)
    except AttributeError:
        CHECKS[type(call)](call)
        raise


def _look_at(call: StepCall) -> tuple[tuple[object, ...], bool]:
    tensors: tuple[Tensor | None, ...] = _TENSORS[type(call)](call)
    parameters: tuple[Tensor, ...] = ()
    if isinstance(call.gates, RawGates):
        tensors += _GATES(call.gates)
        parameters = _PARAMETERS(call.gates)
    known = type(call.scale) in _SCALES
    key: list[object] = [type(call), type(call.scale), call.scale if known else None]
    joined = 0
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        else:
            key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            joined |= tensor.data_ptr()
    for tensor in parameters:
        key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return tuple(key), joined % ALIGNMENT != 0 or not known
