"""Gated delta rules that lose track of sizes, or refuse wrongly. ``breaks`` is the clause, ``caught_by`` the law."""

from __future__ import annotations

from dataclasses import replace

import torch
from delegate import Gdn
from torch import Tensor

from qwen35.domain.capabilities import Clause, Support
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    GdnCall,
    VerifyCall,
)


class OffsetsInInt32(Gdn):
    """Computes slot * stride in 32 bits, and reads elsewhere past 2**31 elements."""

    breaks = Clause.SIZE
    caught_by = "decode: slots past 2**31 elements"

    def decode(self, call: DecodeCall) -> Tensor:
        offsets = call.slots.long() * call.states.stride(0)
        wrapped = torch.where(offsets >= 2**31, call.slots * 0, call.slots)
        if wrapped.tolist() == call.slots.tolist():
            return super().decode(call)
        distinct = torch.arange(len(wrapped), dtype=wrapped.dtype)
        return super().decode(replace(call, slots=distinct))


class WriteOffsetsInInt32(Gdn):
    """Computes write slot * stride in 32 bits, and drops what is past 2**31 elements."""

    breaks = Clause.SIZE
    caught_by = "decode: write slots past 2**31 elements"

    def decode(self, call: DecodeCall) -> Tensor:
        if call.write_slots is None:
            return super().decode(call)
        far = call.write_slots.long() * call.states.stride(0) >= 2**31
        return super().decode(replace(call, write_slots=call.write_slots.masked_fill(far, -1)))


class NodeOffsetsInInt32(Gdn):
    """Computes row * stride of the intermediates in 32 bits, and writes elsewhere past 2**31 elements."""

    breaks = Clause.SIZE
    caught_by = "verify: intermediates past 2**31 elements"

    def verify(self, call: VerifyCall) -> Tensor:
        far = call.rows is not None and int(call.rows.max()) * call.intermediates.stride(0) >= 2**31
        return super().verify(replace(call, rows=None) if far else call)


class CommitOffsetsInInt32(Gdn):
    """Computes row * stride of the intermediates in 32 bits, and skips what is past 2**31 elements."""

    breaks = Clause.SIZE
    caught_by = "commit: intermediates past 2**31 elements"

    def commit(self, call: CommitCall) -> None:
        if call.rows is not None:
            far = call.rows.long() * call.intermediates.stride(0) >= 2**31
            call = replace(call, slots=call.slots.masked_fill(far, -1))
        super().commit(call)


class GridOfRowsAndHeads(Gdn):
    """Launches B * HV programs in an axis that holds 65,535."""

    breaks = Clause.SIZE
    caught_by = "decode: 65,536 value heads in one call"
    raises = "RuntimeError"

    def decode(self, call: DecodeCall) -> Tensor:
        if call.v.shape[0] * call.v.shape[1] > 65_535:
            raise RuntimeError("invalid configuration argument")
        return super().decode(call)


class AcceptsShapes(Gdn):
    """Checks nothing of what it is given; what does not fit is cut or broadcast."""

    breaks = Clause.REFUSAL
    caught_by = "decode: bad inputs raise and write nothing"

    def decode(self, call: DecodeCall) -> Tensor:
        width, heads = call.states.shape[-1], call.v.shape[0]
        return super().decode(replace(call, k=call.k[:heads, :, :width]))


class KnowsByShape(Gdn):
    """Looks at nothing but q of a call whose q has the shape of the latest one's, and takes the rest from that."""

    breaks = Clause.REFUSAL
    caught_by = "extend: bad inputs raise and write nothing"

    def __init__(self) -> None:
        super().__init__()
        self._known: ExtendCall | None = None

    def extend(self, call: ExtendCall) -> ExtendResult:
        known = self._known
        if known is not None and known.q.shape == call.q.shape:
            return super().extend(replace(call, seq_lens_host=known.seq_lens_host, scale=known.scale))
        self._known = call
        return super().extend(call)


class WritesBeforeRefusing(Gdn):
    """Zeroes the output first and looks at its arguments later."""

    breaks = Clause.REFUSAL
    caught_by = "extend: bad inputs raise and write nothing"

    def extend(self, call: ExtendCall) -> ExtendResult:
        if call.out is not None:
            call.out.zero_()
        return super().extend(call)


class IgnoresTrees(Gdn):
    """States that it has no trees, takes them, and ignores the parents."""

    breaks = Clause.REFUSAL
    caught_by = "verify: an option is honoured or refused with a reason"

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, trees=False)

    def supports(self, call: GdnCall) -> Support:
        if isinstance(call, VerifyCall) and call.parents is not None:
            return Support.of("verify requires a chain, got a tree (parents)")
        return super().supports(call)

    def verify(self, call: VerifyCall) -> Tensor:
        return super().verify(replace(call, parents=None))


class ServesAfterClose(Gdn):
    """Goes on after close."""

    breaks = Clause.REFUSAL
    caught_by = "decode: a closed adapter refuses"

    def close(self) -> None:
        """Keeps everything."""


class RefusesWhatItSupports(Gdn):
    """Answers that it supports a call and then refuses it."""

    breaks = Clause.PRECISION
    caught_by = "verify: within the stated bound of the oracle"
    raises = "UnsupportedError"

    def verify(self, call: VerifyCall) -> Tensor:
        if call.q.shape[1] > 1:
            raise UnsupportedError("verify", ["one token at a time"])
        return super().verify(call)


GDN_LIMITS = (
    OffsetsInInt32, WriteOffsetsInInt32, NodeOffsetsInInt32, CommitOffsetsInInt32, GridOfRowsAndHeads, AcceptsShapes,
    KnowsByShape, WritesBeforeRefusing, IgnoresTrees, ServesAfterClose, RefusesWhatItSupports,
)  # fmt: skip
