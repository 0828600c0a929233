"""The alignment rules around one adapter of the gated delta rule, itself an implementation of the port."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from qwen35.domain.alignment import Remedy, Role, misalignment, remedy
from qwen35.domain.capabilities import Capabilities, Phase, Support
from qwen35.domain.errors import UnsupportedError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.adapter import HoldsScratch, SaysBranches
from qwen35.ports.admission import CHECKS, Admission, DecodesKnown
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    GatedDeltaRule,
    GdnCall,
    GdnPlan,
    LogGates,
    RawGates,
    VerifyCall,
)
from qwen35.services.counters import Counters, mode
from qwen35.services.devices import capturing
from qwen35.services.parameter_copies import ParameterCopies
from qwen35.services.scratch import Scratch

_Call = TypeVar("_Call", DecodeCall, ExtendCall, VerifyCall, CommitCall)
_Step = TypeVar("_Step", DecodeCall, VerifyCall)

#: The tensors of each kind of call but those of its gates and of a checkpoint plan.
_NAMES: Mapping[type, tuple[str, ...]] = {
    DecodeCall: ("states", "q", "k", "v", "slots", "write_slots", "out"),
    ExtendCall: ("states", "q", "k", "v", "slots", "cu_seqlens", "fresh", "write_slots", "out"),
    VerifyCall: ("states", "intermediates", "q", "k", "v", "slots", "rows", "parents", "out"),
    CommitCall: ("states", "intermediates", "slots", "rows", "last"),
}
_TENSORS: Mapping[type, Callable[[Any], tuple[Tensor | None, ...]]] = {
    kind: attrgetter(*names) for kind, names in _NAMES.items()
}
_RAW_NAMES, _LOG_NAMES = ("a", "b", "A_log", "dt_bias"), ("g", "beta")
_RAW, _LOG = attrgetter(*_RAW_NAMES), attrgetter(*_LOG_NAMES)
#: What is no read-only input, in whatever call. Intermediates are as large as a pool, where commit only reads them too.
_ROLES: Mapping[str, Role] = {
    "states": Role.MUTABLE, "intermediates": Role.MUTABLE, "out": Role.OUTPUT,
    "A_log": Role.PARAMETER, "dt_bias": Role.PARAMETER,
}  # fmt: skip
#: Bytes of the smallest element that a tensor with more than one dimension may have.
_LEAST_ITEM = 2
#: Layouts that are remembered; a serving engine has a few dozen.
MAX_STRIDES = 4096
#: Streams first seen inside capture that find copies' room ready.
SPARE = 2


def scratch_sizes(geometry: GdnGeometry, itemsize: int, rows: int, batch: int) -> dict[str, int]:
    """Bytes that each argument of a call of ``rows`` tokens in ``batch`` sequences takes at most."""
    keys = rows * geometry.key_heads * geometry.key_width * itemsize
    values = rows * geometry.value_heads * geometry.value_width * itemsize
    gates = rows * geometry.value_heads * 4
    index = (batch + 1) * 8
    return {
        "q": keys, "k": keys, "v": values, "out": values, "a": gates, "b": gates, "g": gates, "beta": gates,
        "slots": index, "write_slots": index, "rows": index, "last": index, "cu_seqlens": index, "starts": index,
        "fresh": index, "parents": rows * 8,
    }  # fmt: skip


class _Misaligned(NamedTuple):
    """A tensor of a call that is ``off`` bytes off, and what is done about it."""

    name: str
    tensor: Tensor
    off: int
    role: Role
    remedy: Remedy


def _stand_in(tensor: Tensor) -> Tensor:
    """An aligned tensor of the same shape, dtype and place, for questions only."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _admits(_call: object) -> Support:
    """For an admission that asks for the contract alone."""
    return Support.of()


def _decode_nothing(_call: DecodeCall) -> Tensor | None:
    """For adapters that leave the looking to the guard."""
    return None


class AlignmentGuard:
    """Hands ``adapter`` aligned tensors only, by the rules of ``qwen35.domain.alignment``.

    Where everything is aligned, the adapter gets the very call that came. A misaligned state pool or intermediate
    buffer is an ``UnsupportedError``, which a configured fallback answers with the original tensors. An adapter that
    ``DecodesKnown`` is asked first, and the guard looks only at what it leaves.
    """

    def __init__(self, name: str, adapter: GatedDeltaRule, counters: Counters) -> None:
        self._name, self._adapter, self._counters = name, adapter, counters
        self._alignment = adapter.capabilities.byte_alignment
        #: Phases that may be captured, and extends, whose copies are larger and are not made ready.
        self._small, self._large = Scratch(self._alignment, SPARE), Scratch(self._alignment, spare=0)
        self._inner = adapter if isinstance(adapter, HoldsScratch) else None
        self._parameters = ParameterCopies(self._alignment)
        self._aligned_strides: set[tuple[int, ...]] = set()
        #: Shapes and strides that fit though rows are no multiple of the alignment: they have no gaps.
        self._dense: set[tuple[torch.Size, tuple[int, ...]]] = set()
        #: Before the first copy: a call that is off in more than its addresses leaves nothing behind.
        self._admit = Admission(name, _admits)
        self._saying = adapter if isinstance(adapter, SaysBranches) else None
        self._decode_known = adapter.decode_known if isinstance(adapter, DecodesKnown) else _decode_nothing
        counters.watch("scratch_bytes", lambda: self.scratch_bytes, adapter=name)
        counters.watch("scratch_bound_bytes", lambda: self.scratch_bound, adapter=name)
        counters.watch("parameter_bytes", lambda: self.parameter_bytes, adapter=name)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the adapter; ``byte_alignment`` still says what the kernel itself needs."""
        return self._adapter.capabilities

    @property
    def branches(self) -> Mapping[Phase, str]:
        """Those that the adapter says it took."""
        return {} if self._saying is None else self._saying.branches

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch held now, the adapter's own among them."""
        own = self._small.bytes + self._large.bytes
        return own if self._inner is None else own + self._inner.scratch_bytes

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameter copies held now."""
        return self._parameters.bytes

    @property
    def scratch_bound(self) -> int:
        """Bytes of scratch that are never exceeded under the current plan, the adapter's own among them."""
        own = self._small.bound + self._large.bound
        return own if self._inner is None else own + self._inner.scratch_bound

    def prepare(self, plan: GdnPlan) -> None:
        """Prepare the adapter, and lay out scratch for ``plan``."""
        self._adapter.prepare(plan)
        self._lay_out(plan)

    def supports(self, call: GdnCall) -> Support:
        """What the adapter says of the call with aligned inputs, and whether every mutable tensor is aligned."""
        found = self._misaligned(call)
        stand_ins = {one.name: _stand_in(one.tensor) for one in found if one.remedy is not Remedy.REFUSE}
        support = self._adapter.supports(_replaced(call, stand_ins) if stand_ins else call)
        return Support.of(*support.reasons, *self._refusals(found))

    def decode(self, call: DecodeCall) -> Tensor:
        """See the port."""
        served = self._decode_known(call)
        return self._with_out(call, self._adapter.decode) if served is None else served

    def extend(self, call: ExtendCall) -> ExtendResult:
        """See the port."""
        aligned = self._aligned(call)
        result = self._adapter.extend(aligned)
        if aligned.out is call.out or call.out is None:
            return result
        return replace(result, out=call.out.copy_(result.out))

    def verify(self, call: VerifyCall) -> Tensor:
        """See the port."""
        return self._with_out(call, self._adapter.verify)

    def commit(self, call: CommitCall) -> None:
        """See the port."""
        self._adapter.commit(self._aligned(call))

    def refresh_parameters(self) -> int:
        """Refresh the guard's copies in place, and the adapter's; returns how many there are."""
        count = self._parameters.refresh() + self._adapter.refresh_parameters()
        self._counters.add("refreshes", adapter=self._name)
        return count

    def close(self) -> None:
        """Free scratch and copies, and close the adapter."""
        self._small.close()
        self._large.close()
        self._parameters.close()
        self._adapter.close()

    def _with_out(self, call: _Step, serve: Callable[[_Step], Tensor]) -> Tensor:
        aligned = self._aligned(call)
        result = serve(aligned)
        if aligned is call or call.out is None or result is call.out:
            return result
        return call.out.copy_(result)

    def _off(self, tensor: Tensor) -> int:
        strides = tensor.stride()
        if tensor.data_ptr() % self._alignment == 0 and strides in self._aligned_strides:
            return 0  # the usual case, cheaply
        return misalignment(tensor, tensor.element_size(), self._alignment)

    def _aligned(self, call: _Call) -> _Call:
        try:
            return self._realigned(call)
        except AttributeError:  # something is no tensor: the check names it
            CHECKS[type(call)](call)
            raise

    def _plainly_aligned(self, call: GdnCall) -> bool:
        """Whether addresses and strides say at a glance that nothing is to be done, as they nearly always do."""
        tensors = _TENSORS[type(call)](call)
        if not isinstance(call, CommitCall):
            tensors += _RAW(call.gates) if isinstance(call.gates, RawGates) else _LOG(call.gates)
        joined = 0
        for tensor in tensors:
            if tensor is not None:
                joined |= tensor.data_ptr()
                strides = tensor.stride()
                if strides not in self._aligned_strides and not self._rows_fit(tensor, strides):
                    return False
        return not joined & (self._alignment - 1)

    def _rows_fit(self, tensor: Tensor, strides: tuple[int, ...]) -> bool:
        """Whether rows are aligned whatever the dtype, or have no gaps; layouts that fit are remembered."""
        if (tensor.shape, strides) in self._dense:
            return True
        fits = not any(stride * _LEAST_ITEM % self._alignment for stride in strides[:-1])
        if not fits and not tensor.is_contiguous():
            return False
        if len(self._aligned_strides) + len(self._dense) >= MAX_STRIDES:
            self._aligned_strides.clear()
            self._dense.clear()
        if fits:
            self._aligned_strides.add(strides)
        else:
            self._dense.add((tensor.shape, strides))
        return True

    def _realigned(self, call: _Call) -> _Call:
        if self._plainly_aligned(call) and (not isinstance(call, ExtendCall) or call.checkpoints is None):
            return call
        found = self._misaligned(call)
        if not found:
            return call
        self._admit(call, type(call))
        reasons = self._refusals(found)
        if reasons:
            raise UnsupportedError(f"{type(call).__name__} for {self._name}", reasons)
        inside = capturing()
        scratch = self._large if isinstance(call, ExtendCall) else self._small
        aligned: _Call = _replaced(call, {one.name: self._aligned_copy(one, scratch, inside) for one in found})
        return aligned

    def _misaligned(self, call: GdnCall) -> list[_Misaligned]:
        """Every tensor of ``call`` about which something is to be done, by the rules of ``qwen35.domain.alignment``."""
        found = []
        for name, tensor in _named_tensors(call):
            if tensor is not None:
                role, off = _ROLES.get(name, Role.INPUT), self._off(tensor)
                what = remedy(role, off)
                if what is not Remedy.NONE:
                    found.append(_Misaligned(name, tensor, off, role, what))
        return found

    def _refusals(self, found: list[_Misaligned]) -> list[str]:
        return [
            f"{one.name} requires {self._alignment}-byte alignment, got {one.off} bytes off"
            for one in found
            if one.remedy is Remedy.REFUSE
        ]

    def _aligned_copy(self, one: _Misaligned, scratch: Scratch, inside: bool) -> Tensor:
        tensor = one.tensor
        if one.remedy is Remedy.COPY:
            return self._parameters.take(tensor, inside)
        copy = scratch.take(one.name, tuple(tensor.shape), tensor.dtype, tensor.device)
        self._counters.add("scratch_copies", adapter=self._name, argument=one.name, mode=mode(inside))
        return copy if one.role is Role.OUTPUT else copy.copy_(tensor)

    def _lay_out(self, plan: GdnPlan) -> None:
        itemsize, rows = plan.token_dtype.itemsize, plan.max_batch * max(1, plan.max_draft)
        self._small.reserve(scratch_sizes(plan.geometry, itemsize, rows, plan.max_batch), plan.device)
        self._large.reserve(scratch_sizes(plan.geometry, itemsize, plan.max_tokens, plan.max_batch), plan.device)
        self._parameters.reserve(plan.geometry.value_heads * 4, plan.device)


def _named_tensors(call: GdnCall) -> Iterator[tuple[str, Tensor | None]]:
    """Every tensor of a call by its name, which is one in the call, its gates and its checkpoint plan together."""
    kind = type(call)
    yield from zip(_NAMES[kind], _TENSORS[kind](call), strict=True)
    if not isinstance(call, CommitCall):
        names = _LOG_NAMES if isinstance(call.gates, LogGates) else _RAW_NAMES
        for name in names:
            yield name, getattr(call.gates, name)
    if isinstance(call, ExtendCall) and call.checkpoints is not None:
        yield "starts", call.checkpoints.starts


def _replaced(call: Any, by: Mapping[str, Tensor]) -> Any:
    """``call`` with the tensors ``by`` name in place of its own."""
    changes: dict[str, Any] = {name: by[name] for name in _NAMES[type(call)] if name in by}
    if not isinstance(call, CommitCall):
        names = _LOG_NAMES if isinstance(call.gates, LogGates) else _RAW_NAMES
        gates: dict[str, Any] = {name: by[name] for name in names if name in by}
        if gates:
            changes["gates"] = replace(call.gates, **gates)
    if isinstance(call, ExtendCall) and call.checkpoints is not None and "starts" in by:
        changes["checkpoints"] = replace(call.checkpoints, starts=by["starts"])
    return replace(call, **changes)
