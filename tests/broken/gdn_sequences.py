"""Gated delta rules that lose track of sequences or drafts. ``breaks`` is the clause, ``caught_by`` the law."""

from __future__ import annotations

from dataclasses import replace

import torch
from delegate import Gdn, clear_empty_fresh
from torch import Tensor

from qwen35.domain.capabilities import Clause
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    Gates,
    LogGates,
    VerifyCall,
)


def _transpose(states: Tensor, slots: Tensor) -> None:
    for slot in slots.tolist():
        if slot >= 0:
            heads, width, depth = states.shape[1:]
            states[slot] = states[slot].transpose(1, 2).reshape(heads, width, depth)


class TransposedBetweenPhases(Gdn):
    """Prefill keeps its states as [K, V], decode reads [V, K]."""

    breaks = Clause.COMPOSITION
    caught_by = "extend: a split prompt is the whole prompt"

    def extend(self, call: ExtendCall) -> ExtendResult:
        result = super().extend(call)
        _transpose(call.states, call.slots if call.write_slots is None else call.write_slots)
        return result


class SkipsTailChunk(Gdn):
    """Prefill of more than a chunk of 64 leaves the last, partial chunk out of the state."""

    breaks = Clause.COMPOSITION
    caught_by = "extend: a split prompt is the whole prompt"

    def extend(self, call: ExtendCall) -> ExtendResult:
        before = call.states.clone()
        result = super().extend(call)
        written = call.slots if call.write_slots is None else call.write_slots
        for s, (read, write) in enumerate(zip(call.slots.tolist(), written.tolist(), strict=True)):
            start, end = call.cu_seqlens[s : s + 2].tolist()
            whole = start + (end - start) // 64 * 64
            if read < 0 or write < 0 or whole in (start, end):
                continue
            call.states[write] = before[write]
            part = slice(start, whole)
            gates = _cut(call, part)
            super().extend(replace(
                call, q=call.q[part], k=call.k[part], v=call.v[part], gates=gates, slots=call.slots[s : s + 1],
                write_slots=None if call.write_slots is None else call.write_slots[s : s + 1], out=None,
                cu_seqlens=torch.tensor([0, whole - start], dtype=torch.int32), seq_lens_host=None, checkpoints=None,
                fresh=None if call.fresh is None else call.fresh[s : s + 1],
            ))  # fmt: skip
        return result


def _cut(call: ExtendCall, part: slice) -> Gates:
    gates = call.gates
    if isinstance(gates, LogGates):
        return replace(gates, g=gates.g[part], beta=gates.beta[part])
    return replace(gates, a=gates.a[part], b=gates.b[part])


class VerifyWritesPool(Gdn):
    """Verify updates the state as it goes."""

    breaks = Clause.VERIFY
    caught_by = "verify: nodes of a chain, states untouched"

    def verify(self, call: VerifyCall) -> Tensor:
        out = super().verify(call)
        rows = range(len(call.slots)) if call.rows is None else call.rows.tolist()
        for slot, row in zip(call.slots.tolist(), rows, strict=True):
            if slot >= 0:
                call.states[slot] = call.intermediates[row, call.q.shape[1] - 1]
        return out


class TreeAsChain(Gdn):
    """Takes a draft tree and computes a chain."""

    breaks = Clause.VERIFY
    caught_by = "verify: nodes of a tree continue from their parents"

    def verify(self, call: VerifyCall) -> Tensor:
        return super().verify(replace(call, parents=None))


class NodesBySlot(Gdn):
    """Indexes the intermediates by batch row although rows are given."""

    breaks = Clause.VERIFY
    caught_by = "verify: nodes of a chain, states untouched"

    def verify(self, call: VerifyCall) -> Tensor:
        fits = call.intermediates.shape[0] >= len(call.slots)
        return super().verify(replace(call, rows=None) if fits else call)


class CommitsNothingAsLast(Gdn):
    """Takes an accepted node of -1 for the last one."""

    breaks = Clause.VERIFY
    caught_by = "commit: the accepted node is copied"

    def commit(self, call: CommitCall) -> None:
        last = torch.where(call.last < 0, torch.full_like(call.last, call.intermediates.shape[1] - 1), call.last)
        super().commit(replace(call, last=last))


class ClearsEmptySequences(Gdn):
    """Writes the zero state of a sequence without tokens."""

    breaks = Clause.EMPTY
    caught_by = "extend: sequences without tokens leave their state alone"

    def extend(self, call: ExtendCall) -> ExtendResult:
        result = super().extend(call)
        for slot, length in zip(call.slots.tolist(), call.cu_seqlens.diff().tolist(), strict=True):
            if slot >= 0 and length == 0:
                call.states[slot] = 0
        return result


class ClearsEmptyFreshSequences(Gdn):
    """Writes the zero state that a fresh sequence begins with, though it has no tokens."""

    breaks = Clause.EMPTY
    caught_by = "extend: sequences without tokens leave their state alone"

    def extend(self, call: ExtendCall) -> ExtendResult:
        result = super().extend(call)
        clear_empty_fresh(call, call.states)
        return result


class MovesEmptySequences(Gdn):
    """Copies the state of a sequence without tokens to its write slot."""

    breaks = Clause.EMPTY
    caught_by = "extend: sequences without tokens leave their write slot alone"

    def extend(self, call: ExtendCall) -> ExtendResult:
        before = call.states.clone()
        result = super().extend(call)
        if call.write_slots is not None and len(call.q):
            empty = (call.cu_seqlens.diff() == 0) & (call.slots >= 0) & (call.write_slots >= 0)
            call.states[call.write_slots[empty].long()] = before[call.slots[empty].long()]
        return result


class NeedsASequence(Gdn):
    """Cannot launch an empty grid."""

    breaks = Clause.EMPTY
    caught_by = "decode: no sequences at all"
    raises = "RuntimeError"

    def decode(self, call: DecodeCall) -> Tensor:
        if not len(call.slots):
            raise RuntimeError("invalid configuration argument")
        return super().decode(call)


class IgnoresFresh(Gdn):
    """Continues from whatever the slot holds."""

    breaks = Clause.FRESH
    caught_by = "extend: fresh sequences start from zero"

    def extend(self, call: ExtendCall) -> ExtendResult:
        return super().extend(replace(call, fresh=None))


class ClearsByMultiplying(Gdn):
    """Multiplies the state of a fresh sequence by zero: NaN stays NaN."""

    breaks = Clause.FRESH
    caught_by = "extend: fresh sequences start from zero"

    def extend(self, call: ExtendCall) -> ExtendResult:
        if call.fresh is None:
            return super().extend(call)
        keep, states = call.states.clone(), call.states
        for slot, flag, length in zip(
            call.slots.tolist(), call.fresh.tolist(), call.cu_seqlens.diff().tolist(), strict=True
        ):
            if flag and slot >= 0 and length:
                states[slot] *= 0
        result = super().extend(replace(call, fresh=None))
        written = call.slots if call.write_slots is None else call.write_slots
        for slot in set(call.slots.tolist()) - set(written.tolist()) - {-1}:
            states[slot] = keep[slot]
        return result


GDN_SEQUENCES = (
    TransposedBetweenPhases, SkipsTailChunk, VerifyWritesPool, TreeAsChain, NodesBySlot, CommitsNothingAsLast,
    ClearsEmptySequences, ClearsEmptyFreshSequences, MovesEmptySequences, NeedsASequence, IgnoresFresh,
    ClearsByMultiplying,
)  # fmt: skip
