"""Gated delta rules that handle slots as real kernels once did. ``breaks`` is the clause, ``caught_by`` the law."""

from __future__ import annotations

from dataclasses import replace

import torch
from delegate import Gdn
from torch import Tensor

from qwen35.domain.capabilities import Clause
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    VerifyCall,
)


def _clamped(slots: Tensor, to: int) -> Tensor:
    """Padding as slot ``to``, kept distinct: one padded row is enough to do harm."""
    out = slots.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot < 0 and to not in out.tolist():
            out[i] = to
    return out


def _finite(call: DecodeCall) -> DecodeCall:
    """NaN tokens of padded rows as zeros, as kernels that clamp see whatever was there before."""
    return replace(call, q=call.q.nan_to_num(), k=call.k.nan_to_num(), v=call.v.nan_to_num())


class LastSlotWrap(Gdn):
    """Reads -1 as Python does: the last slot is overwritten."""

    breaks = Clause.PADDING
    caught_by = "decode: padded rows are zero and touch no slot"

    def decode(self, call: DecodeCall) -> Tensor:
        slots = _clamped(call.slots, call.states.shape[0] - 1)
        out = super().decode(replace(_finite(call), slots=slots))
        out[call.slots < 0] = 0
        return out


class FirstSlotClamp(Gdn):
    """Clamps -1 to slot 0 on prefill, and writes there."""

    breaks = Clause.PADDING
    caught_by = "extend: padded rows are zero and touch no slot"

    def extend(self, call: ExtendCall) -> ExtendResult:
        result = super().extend(replace(call, slots=_clamped(call.slots, 0)))
        for s, slot in enumerate(call.slots.tolist()):
            if slot < 0:
                result.out[call.cu_seqlens[s] : call.cu_seqlens[s + 1]] = 0
        return result


class UnwrittenPaddedRow(Gdn):
    """Leaves the output of a padded row as it was."""

    breaks = Clause.PADDING
    caught_by = "decode: padded rows are zero and touch no slot"

    def decode(self, call: DecodeCall) -> Tensor:
        before = torch.empty_like(call.v) if call.out is None else call.out.clone()
        out = super().decode(call)
        out[call.slots < 0] = before[call.slots < 0]
        return out


class ComputedPaddedRow(Gdn):
    """Multiplies the padded row by zero instead of selecting: NaN times 0 is NaN."""

    breaks = Clause.PADDING
    caught_by = "verify: padded rows are zero and touch no slot"

    def verify(self, call: VerifyCall) -> Tensor:
        out = super().verify(call)
        padded = call.slots < 0
        out[padded] = call.v[padded] * 0
        return out


class PaddedRowWritesNodes(Gdn):
    """A padded row of verify writes its intermediates row."""

    breaks = Clause.PADDING
    caught_by = "verify: padded rows are zero and touch no slot"

    def verify(self, call: VerifyCall) -> Tensor:
        out = super().verify(call)
        rows = range(len(call.slots)) if call.rows is None else call.rows.tolist()
        for slot, row in zip(call.slots.tolist(), rows, strict=True):
            if slot < 0:
                call.intermediates[row] = 0
        return out


class IgnoresWriteSlots(Gdn):
    """Writes the state where it was read."""

    breaks = Clause.WRITE_SLOTS
    caught_by = "decode: states go to the write slots only"

    def decode(self, call: DecodeCall) -> Tensor:
        saved = None if call.write_slots is None else call.states.clone()
        out = super().decode(call)
        if saved is not None and call.write_slots is not None:
            for read, write in zip(call.slots.tolist(), call.write_slots.tolist(), strict=True):
                if read >= 0 and write >= 0:
                    state = call.states[write].clone()
                    call.states[write] = saved[write]
                    call.states[read] = state
        return out


class WritesSlotZero(Gdn):
    """Write slot -1 with a live read slot writes slot 0."""

    breaks = Clause.WRITE_SLOTS
    caught_by = "extend: states go to the write slots only"

    def extend(self, call: ExtendCall) -> ExtendResult:
        result = super().extend(call)
        if call.write_slots is not None and bool(((call.write_slots < 0) & (call.slots >= 0)).any()):
            call.states[0] = 0
        return result


class NormalisesInPlace(Gdn):
    """Normalises the keys of the caller where they are."""

    breaks = Clause.ISOLATION
    caught_by = "decode: nothing else is written"

    def decode(self, call: DecodeCall) -> Tensor:
        out = super().decode(call)
        call.k.mul_(torch.rsqrt((call.k * call.k).sum(-1, keepdim=True) + 1e-6))
        return out


class WritesBetweenSlots(Gdn):
    """Takes the slot stride for dense and writes past the slot of a paged pool."""

    breaks = Clause.ISOLATION
    caught_by = "commit: nothing else is written"

    def commit(self, call: CommitCall) -> None:
        super().commit(call)
        gap = call.states.stride(0) - call.states[0].numel()
        if gap and len(call.slots) and int(call.slots.max()) >= 0 and int(call.last.max()) >= 0:
            end = call.states.storage_offset() + call.states[0].numel()
            call.states.as_strided((1,), (1,), end).zero_()


class SlotsAsInt32(Gdn):
    """Reads int64 slots as twice as many int32."""

    breaks = Clause.ISOLATION
    caught_by = "decode: nothing else is written"

    def decode(self, call: DecodeCall) -> Tensor:
        if call.slots.dtype is not torch.int64:
            return super().decode(call)
        halves = call.slots.contiguous().view(torch.int32)[: len(call.slots)].clone()
        seen: set[int] = set()
        for i, slot in enumerate(halves.tolist()):
            halves[i] = -1 if slot in seen else slot
            seen.add(slot)
        return super().decode(replace(call, slots=halves, write_slots=None))


class SortsBySlot(Gdn):
    """Sorts the batch by slot for locality and forgets to sort back."""

    breaks = Clause.ORDER
    caught_by = "decode: outputs and states follow the sequences"

    def decode(self, call: DecodeCall) -> Tensor:
        out = super().decode(call)
        out.copy_(out[call.slots.argsort()])
        return out


class FirstRowWins(Gdn):
    """The first row of a batch runs a differently rounded path."""

    breaks = Clause.ORDER
    caught_by = "verify: outputs and states follow the sequences"

    def verify(self, call: VerifyCall) -> Tensor:
        out = super().verify(call)
        if len(out):
            out[0] = out[0] * (1 + 2.0**-7)
        return out


GDN_SLOTS = (
    LastSlotWrap, FirstSlotClamp, UnwrittenPaddedRow, ComputedPaddedRow, PaddedRowWritesNodes, IgnoresWriteSlots,
    WritesSlotZero, NormalisesInPlace, WritesBetweenSlots, SlotsAsInt32, SortsBySlot, FirstRowWins,
)  # fmt: skip
