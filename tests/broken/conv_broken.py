"""Short convolutions that are broken as real kernels once were. ``breaks`` is the clause, ``caught_by`` the law."""

from __future__ import annotations

from dataclasses import replace

import torch
from delegate import Conv, clear_empty_fresh
from torch import Tensor

from qwen35.domain.capabilities import Clause
from qwen35.ports.short_convolution import ConvCommitCall, ConvDecodeCall, ConvExtendCall, ConvVerifyCall

_PADDING = "padded rows are zero and touch no slot"


class LastSlotWrap(Conv):
    """Reads -1 as Python does: the last slot's window is overwritten."""

    breaks = Clause.PADDING
    caught_by = f"decode: {_PADDING}"

    def decode(self, call: ConvDecodeCall) -> Tensor:
        out = super().decode(call)
        last = call.windows.shape[0] - 1
        if bool((call.slots < 0).any()) and last not in call.slots.tolist():
            call.windows[-1] = 0
        return out


class PassesPaddingThrough(Conv):
    """Hands the input of a padded row on as its output."""

    breaks = Clause.PADDING
    caught_by = f"extend: {_PADDING}"

    def extend(self, call: ConvExtendCall) -> Tensor:
        out = super().extend(call)
        for s, slot in enumerate(call.slots.tolist()):
            if slot < 0:
                part = slice(int(call.cu_seqlens[s]), int(call.cu_seqlens[s + 1]))
                out[part] = call.x[part]
        return out


class WritesWhereItReads(Conv):
    """Ignores write slots."""

    breaks = Clause.WRITE_SLOTS
    caught_by = "decode: states go to the write slots only"

    def decode(self, call: ConvDecodeCall) -> Tensor:
        if call.write_slots is None or len(set(call.slots.tolist())) < len(call.slots):
            return super().decode(call)
        return super().decode(replace(call, write_slots=None))


class ActivatesInPlace(Conv):
    """Applies the activation to the caller's x."""

    breaks = Clause.ISOLATION
    caught_by = "decode: nothing else is written"

    def decode(self, call: ConvDecodeCall) -> Tensor:
        out = super().decode(call)
        call.x.copy_(torch.nn.functional.silu(call.x))
        return out


class SortsBySlot(Conv):
    """Sorts the batch by slot and forgets to sort back."""

    breaks = Clause.ORDER
    caught_by = "decode: outputs and states follow the sequences"

    def decode(self, call: ConvDecodeCall) -> Tensor:
        out = super().decode(call)
        out.copy_(out[call.slots.argsort()])
        return out


class ReversedWindow(Conv):
    """Prefill leaves the newest input first, decode expects it last."""

    breaks = Clause.COMPOSITION
    caught_by = "extend, decode: steps are the prompt"

    def extend(self, call: ConvExtendCall) -> Tensor:
        out = super().extend(call)
        for slot, length in zip(call.slots.tolist(), call.cu_seqlens.diff().tolist(), strict=True):
            if slot >= 0 and length:
                call.windows[slot] = call.windows[slot].flip(-1)
        return out


class UnshiftedShortSequence(Conv):
    """A sequence shorter than the window leaves zeros where older inputs should have moved to."""

    breaks = Clause.COMPOSITION
    caught_by = "extend: a split prompt is the whole prompt"

    def extend(self, call: ConvExtendCall) -> Tensor:
        out = super().extend(call)
        kept = call.windows.shape[-1]
        for slot, length in zip(call.slots.tolist(), call.cu_seqlens.diff().tolist(), strict=True):
            if slot >= 0 and 0 < length < kept:
                call.windows[slot, :, : kept - length] = 0
        return out


class VerifyShiftsPool(Conv):
    """Verify moves the window of the pool along."""

    breaks = Clause.VERIFY
    caught_by = "verify: nodes of a chain, states untouched"

    def verify(self, call: ConvVerifyCall) -> Tensor:
        out = super().verify(call)
        for slot in call.slots.tolist():
            if slot >= 0:
                call.windows[slot] = call.windows[slot].roll(-1, -1)
        return out


class TreeAsChain(Conv):
    """Takes a draft tree and computes a chain."""

    breaks = Clause.VERIFY
    caught_by = "verify: nodes of a tree continue from their parents"

    def verify(self, call: ConvVerifyCall) -> Tensor:
        return super().verify(replace(call, parents=None))


class CommitsNothingAsLast(Conv):
    """Takes an accepted node of -1 for the last one."""

    breaks = Clause.VERIFY
    caught_by = "commit: the accepted node is copied"

    def commit(self, call: ConvCommitCall) -> None:
        last = torch.where(call.last < 0, torch.full_like(call.last, call.intermediates.shape[1] - 1), call.last)
        super().commit(replace(call, last=last))


class ClearsEmptySequences(Conv):
    """Clears the window of a sequence without tokens."""

    breaks = Clause.EMPTY
    caught_by = "extend: sequences without tokens leave their state alone"

    def extend(self, call: ConvExtendCall) -> Tensor:
        out = super().extend(call)
        for slot, length in zip(call.slots.tolist(), call.cu_seqlens.diff().tolist(), strict=True):
            if slot >= 0 and length == 0:
                call.windows[slot] = 0
        return out


class IgnoresFresh(Conv):
    """Starts from whatever the window holds."""

    breaks = Clause.FRESH
    caught_by = "extend: fresh sequences start from zero"

    def extend(self, call: ConvExtendCall) -> Tensor:
        return super().extend(replace(call, fresh=None))


class OffsetsInInt32(Conv):
    """Computes slot * stride in 32 bits."""

    breaks = Clause.SIZE
    caught_by = "decode: slots past 2**31 elements"

    def decode(self, call: ConvDecodeCall) -> Tensor:
        offsets = call.slots.long() * call.windows.stride(0)
        if len(offsets) and int(offsets.max()) >= 2**31:
            return super().decode(replace(call, slots=torch.arange(len(call.slots), dtype=torch.int32)))
        return super().decode(call)


class WriteOffsetsInInt32(Conv):
    """Computes write slot * stride in 32 bits, and drops what is past 2**31 elements."""

    breaks = Clause.SIZE
    caught_by = "extend: write slots past 2**31 elements"

    def extend(self, call: ConvExtendCall) -> Tensor:
        if call.write_slots is None:
            return super().extend(call)
        far = call.write_slots.long() * call.windows.stride(0) >= 2**31
        return super().extend(replace(call, write_slots=call.write_slots.masked_fill(far, -1)))


class NodeOffsetsInInt32(Conv):
    """Computes row * stride of the intermediates in 32 bits, and writes elsewhere past 2**31 elements."""

    breaks = Clause.SIZE
    caught_by = "verify: intermediates past 2**31 elements"

    def verify(self, call: ConvVerifyCall) -> Tensor:
        far = call.rows is not None and int(call.rows.max()) * call.intermediates.stride(0) >= 2**31
        return super().verify(replace(call, rows=None) if far else call)


class NaiveSilu(Conv):
    """x * exp(x) / (1 + exp(x)): infinity over infinity for large x."""

    breaks = Clause.FINITE
    caught_by = "decode: extreme inputs give finite results"

    def decode(self, call: ConvDecodeCall) -> Tensor:
        out = super().decode(replace(call, activation=None))
        if call.activation == "silu":
            grown = out.float().exp()
            out.copy_(out.float() * grown / (1 + grown))
        return out


class RoundsProducts(Conv):
    """Rounds the weight to bfloat16."""

    breaks = Clause.PRECISION
    caught_by = "extend: within the stated bound of the oracle"

    def extend(self, call: ConvExtendCall) -> Tensor:
        return super().extend(replace(call, weight=call.weight.bfloat16().to(call.weight.dtype)))


class StaleWeight(Conv):
    """Keeps the first copy of a weight that it saw at an address."""

    breaks = Clause.PRECISION
    caught_by = "decode: parameters are those of now, of this layer"

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[tuple[int, torch.Size], Tensor] = {}

    def decode(self, call: ConvDecodeCall) -> Tensor:
        key = (call.weight.data_ptr(), call.weight.shape)
        return super().decode(replace(call, weight=self._copies.setdefault(key, call.weight.clone())))


class DenseTokens(Conv):
    """Takes x for dense and ignores the stride of its rows."""

    breaks = Clause.STRIDES
    caught_by = "decode: views serve as dense tensors do"

    def decode(self, call: ConvDecodeCall) -> Tensor:
        dense = call.x.as_strided(call.x.shape, (call.x.shape[1], 1), call.x.storage_offset())
        return super().decode(replace(call, x=dense))


class OutputAtTokenRows(Conv):
    """Writes the output by the stride of x."""

    breaks = Clause.STRIDES
    caught_by = "extend: each tensor has rows of its own length"

    def extend(self, call: ConvExtendCall) -> Tensor:
        if call.out is None:
            return super().extend(call)
        made = super().extend(replace(call, out=None))
        call.out.as_strided(call.out.shape, call.x.stride(), call.out.storage_offset()).copy_(made)
        return call.out


class DenseWeight(Conv):
    """Takes the weight for dense."""

    breaks = Clause.STRIDES
    caught_by = "decode: each tensor has rows of its own length"

    def decode(self, call: ConvDecodeCall) -> Tensor:
        weight = call.weight
        dense = weight.as_strided(weight.shape, (weight.shape[1], 1), weight.storage_offset())
        return super().decode(replace(call, weight=dense))


class NodesAtRows(Conv):
    """Takes the draft tokens of a row for one another's neighbours, whatever lies between rows."""

    breaks = Clause.STRIDES
    caught_by = "verify: each tensor has strides of its own"

    def verify(self, call: ConvVerifyCall) -> Tensor:
        step = call.x.stride(1)
        x = call.x.as_strided(call.x.shape, (call.x.shape[1] * step, step, 1), call.x.storage_offset())
        return super().verify(replace(call, x=x))


class ClearsEmptyFreshSequences(Conv):
    """Writes the zeros that a fresh sequence begins with, though it has no tokens."""

    breaks = Clause.EMPTY
    caught_by = "extend: sequences without tokens leave their state alone"

    def extend(self, call: ConvExtendCall) -> Tensor:
        out = super().extend(call)
        clear_empty_fresh(call, call.windows)
        return out


class AcceptsActivations(Conv):
    """Takes any name for an activation."""

    breaks = Clause.REFUSAL
    caught_by = "decode: bad inputs raise and write nothing"

    def decode(self, call: ConvDecodeCall) -> Tensor:
        return super().decode(replace(call, activation="silu" if call.activation else None))


CONV_BROKEN = (
    LastSlotWrap, PassesPaddingThrough, WritesWhereItReads, ActivatesInPlace, SortsBySlot, ReversedWindow,
    UnshiftedShortSequence, VerifyShiftsPool, TreeAsChain, CommitsNothingAsLast, ClearsEmptySequences, IgnoresFresh,
    ClearsEmptyFreshSequences, OffsetsInInt32, WriteOffsetsInInt32, NodeOffsetsInInt32, NaiveSilu,
    RoundsProducts, StaleWeight, DenseTokens, OutputAtTokenRows, DenseWeight, NodesAtRows, AcceptsActivations,
)  # fmt: skip
