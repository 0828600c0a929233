"""A call of the gated delta rule on copies of everything that it names, and how far two results are apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from qwen35.ports.admission import CHECKS
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    Gates,
    GdnCall,
    LogGates,
    RawGates,
    VerifyCall,
)

_Call = TypeVar("_Call", DecodeCall, ExtendCall, VerifyCall)

#: The slot of a pool of copies that is nobody's, for kernels that need one for padding.
NULL_PLACE = 0


@dataclass(frozen=True, slots=True)
class CallCopy:
    """``call`` is ``original`` on copies: slot ``used[i]`` of the pool is slot i + 1, row ``there[i]`` of the
    intermediates row ``here[i]``. Parameters (A_log, dt_bias) are not copied: adapters know them by address."""

    original: GdnCall
    call: GdnCall
    used: Tensor
    here: Tensor
    there: Tensor

    def states(self) -> Tensor:
        """The slots that the call names, as the copy has them now: [n, HV, V, K]."""
        return self.call.states[NULL_PLACE + 1 :]

    def served_states(self) -> Tensor:
        """The same slots in the pool itself."""
        return self.original.states[self.used]

    def nodes(self) -> Tensor | None:
        """What verify wrote for live rows, [n, T, HV, V, K]; None for other calls."""
        return _nodes(self.call, self.here)

    def served_nodes(self) -> Tensor | None:
        """The same nodes of the intermediates themselves."""
        return _nodes(self.original, self.there)


def copy_call(call: GdnCall) -> CallCopy:
    """Copies of the slots and rows that ``call`` names and of its tokens, gates and indices; ``call`` is not touched.

    Reads index tensors, so it waits for the device. Outputs and the intermediates of verify are NaN until written.
    Raises ``ContractError`` for a call that does not meet the contract.
    """
    CHECKS[type(call)](call, values=True)
    targets = call.write_slots if isinstance(call, DecodeCall | ExtendCall) else None
    named = torch.unique(torch.cat([slots.to(torch.int64) for slots in (call.slots, targets) if slots is not None]))
    used = named[named >= 0]
    pool = call.states.new_zeros(len(used) + 1, *call.states.shape[1:])
    pool[NULL_PLACE + 1 :] = call.states[used]
    slots, write_slots = _moved(call.slots, used), None if targets is None else _moved(targets, used)
    here = there = used[:0]
    copied: GdnCall
    if isinstance(call, CommitCall | VerifyCall):
        rows, here, there, size = _rows(call)
        shape = (size, *call.intermediates.shape[1:])
        if isinstance(call, CommitCall):
            kept = call.intermediates.new_zeros(shape)
            kept[here] = call.intermediates[there]
            copied = replace(call, states=pool, slots=slots, intermediates=kept, rows=rows, last=call.last.clone())
        else:
            kept = call.intermediates.new_full(shape, torch.nan)
            copied = replace(_tokens(call), states=pool, slots=slots, intermediates=kept, rows=rows)
    elif isinstance(call, ExtendCall):
        copied = replace(_tokens(call), states=pool, slots=slots, write_slots=write_slots)
    else:
        copied = replace(_tokens(call), states=pool, slots=slots, write_slots=write_slots)
    return CallCopy(call, copied, used, here, there)


def largest_error(got: Tensor | None, want: Tensor | None, lead: int) -> float:
    """The largest ``||got - want|| / ||want||`` (Frobenius) over the first ``lead`` dimensions; waits for the device.

    Equal values differ by nothing, NaN and infinite ones included. Infinite where only one is there, where shapes
    differ, where ``got`` alone has a NaN, and where ``want`` is zero and ``got`` is not.
    """
    if got is None or want is None or got.shape != want.shape:
        return 0.0 if got is want else torch.inf
    if not want.numel():
        return 0.0
    wide = torch.promote_types(torch.promote_types(got.dtype, want.dtype), torch.float32)
    groups = want.shape[:lead].numel()
    a, b = (x.to(wide).reshape(groups, -1) for x in (got, want))
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.linalg.vector_norm((a - b).masked_fill_(same, 0.0), dim=1, dtype=torch.float64)
    size = torch.linalg.vector_norm(b.nan_to_num(0.0, 0.0, 0.0), dim=1, dtype=torch.float64)
    errors = torch.where(apart == 0.0, 0.0, apart / size)
    return float(errors.nan_to_num(torch.inf, torch.inf).max())


def _nodes(call: GdnCall, rows: Tensor) -> Tensor | None:
    return call.intermediates[rows, : call.q.shape[1]] if isinstance(call, VerifyCall) else None


def _moved(slots: Tensor, used: Tensor) -> Tensor:
    place = torch.searchsorted(used, slots.to(torch.int64)) + NULL_PLACE + 1
    return torch.where(slots < 0, -1, place).to(slots.dtype)


def _rows(call: VerifyCall | CommitCall) -> tuple[Tensor | None, Tensor, Tensor, int]:
    """Rows of the copy's call; live rows of the copy and of the original; rows that the copy has, at least one."""
    live = call.slots >= 0
    batch = call.slots.shape[0]
    if call.rows is None:
        at = live.nonzero()[:, 0]
        return None, at, at, max(1, batch)
    given = call.rows.to(torch.int64)
    there = torch.unique(given[live])
    # Rows of padding may be any number; theirs may be shared, so the first will do.
    place = torch.where(live, torch.searchsorted(there, given), 0).to(call.rows.dtype)
    return place, torch.arange(len(there), device=given.device), there, max(1, len(there))


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _optional(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _dense(tensor)


def _gates(gates: Gates) -> Gates:
    if isinstance(gates, LogGates):
        return LogGates(g=_dense(gates.g), beta=_dense(gates.beta))
    return RawGates(a=_dense(gates.a), b=_dense(gates.b), A_log=gates.A_log, dt_bias=gates.dt_bias)


def _tokens(call: _Call) -> _Call:
    """``call`` with copies of whatever it reads besides the pool, and with an output of its own."""
    out = None if call.out is None else call.out.new_full(call.out.shape, torch.nan)
    copied = replace(call, q=_dense(call.q), k=_dense(call.k), v=_dense(call.v), gates=_gates(call.gates), out=out)
    if isinstance(copied, VerifyCall):
        return replace(copied, parents=_optional(copied.parents))
    if isinstance(copied, ExtendCall):
        plan = copied.checkpoints
        return replace(
            copied, cu_seqlens=_dense(copied.cu_seqlens), fresh=_optional(copied.fresh),
            checkpoints=None if plan is None else replace(plan, starts=_dense(plan.starts)),
        )  # fmt: skip
    return copied
