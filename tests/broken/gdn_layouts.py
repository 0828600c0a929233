"""Gated delta rules that take one layout for another. ``breaks`` is the clause, ``caught_by`` the law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from delegate import Gdn
from gdn_numbers import log_gates
from torch import Tensor

from qwen35.domain.capabilities import Clause
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, ExtendResult, Gates, LogGates, VerifyCall

_ROWS = "each tensor has rows of its own length"
_ALL = "each tensor has strides of its own"


def _by(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``tensor`` read by other strides from where it starts."""
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


def _beta_by_gate(gates: Gates) -> Gates:
    """The second gate by the strides of the first."""
    if isinstance(gates, LogGates):
        return replace(gates, beta=_by(gates.beta, gates.g.stride()))
    return replace(gates, b=_by(gates.b, gates.a.stride()))


class Strided(Gdn):
    """Keeps the clause, until a subclass takes a stride for another."""

    breaks = Clause.STRIDES


class KeysAtQueryRows(Strided):
    """Walks the rows of k by the stride of q's."""

    caught_by = f"decode: {_ROWS}"

    def decode(self, call: DecodeCall) -> Tensor:
        return super().decode(replace(call, k=_by(call.k, (call.q.stride(0), *call.k.stride()[1:]))))


class QueryHeadsAtKeyHeads(Strided):
    """Walks the heads of q by the stride of k's."""

    caught_by = f"extend: {_ALL}"

    def extend(self, call: ExtendCall) -> ExtendResult:
        return super().extend(replace(call, q=_by(call.q, (call.q.stride(0), *call.k.stride()[1:]))))


class DecodesBetaAtGateStride(Strided):
    """One stride for both gates in decode."""

    caught_by = f"decode: {_ROWS}"

    def decode(self, call: DecodeCall) -> Tensor:
        return super().decode(replace(call, gates=_beta_by_gate(call.gates)))


class ExtendsBetaAtGateStride(Strided):
    """One stride for both gates in extend."""

    caught_by = f"extend: {_ROWS}"

    def extend(self, call: ExtendCall) -> ExtendResult:
        return super().extend(replace(call, gates=_beta_by_gate(call.gates)))


class VerifiesBetaAtGateStride(Strided):
    """One stride of steps and one of rows for both gates in verify."""

    caught_by = f"verify: {_ROWS}"

    def verify(self, call: VerifyCall) -> Tensor:
        return super().verify(replace(call, gates=_beta_by_gate(call.gates)))


class RowsOfWholeDrafts(Strided):
    """Takes a row of v for T steps without a gap behind them."""

    caught_by = f"verify: {_ALL}"

    def verify(self, call: VerifyCall) -> Tensor:
        step = call.v.stride(1)
        return super().verify(replace(call, v=_by(call.v, (call.v.shape[1] * step, *call.v.stride()[1:]))))


class OutputAtValueRows(Strided):
    """Writes the output by the strides of v."""

    caught_by = f"extend: {_ROWS}"

    def extend(self, call: ExtendCall) -> ExtendResult:
        if call.out is None:
            return super().extend(call)
        result = super().extend(replace(call, out=None))
        _by(call.out, call.v.stride()).copy_(result.out)
        return replace(result, out=call.out)


class WritesPastCheckpoints(Gdn):
    """Writes a checkpoint for a last chunk that is not full, one past those that there are."""

    breaks = Clause.ISOLATION
    caught_by = "extend: nothing is written past the checkpoints"
    said = "past the end"

    def extend(self, call: ExtendCall) -> ExtendResult:
        result = super().extend(call)
        plan, kept = call.checkpoints, result.checkpoints
        if plan is None or kept is None:
            return result
        room = call.states.new_empty(kept.shape)
        room.copy_(kept)
        if int(call.cu_seqlens[-1] - call.cu_seqlens[-2]) % plan.every:
            size = kept[0].numel() if plan.count else call.states[0].numel()
            room.as_strided((size,), (1,), room.storage_offset() + room.numel()).zero_()
        return replace(result, checkpoints=room)


def clamped(gates: Any) -> LogGates:
    """Both kinds as log gates, where softplus ends at 20 instead of going on as a line."""
    return log_gates(gates, most=20.0)


class DecodesClampedSoftplus(Gdn):
    """Clamps the input of softplus at 20 in decode."""

    breaks = Clause.PRECISION
    caught_by = "decode: softplus is linear past 20"

    def decode(self, call: DecodeCall) -> Tensor:
        return super().decode(replace(call, gates=clamped(call.gates)))


class ExtendsClampedSoftplus(Gdn):
    """Clamps the input of softplus at 20 in extend."""

    breaks = Clause.PRECISION
    caught_by = "extend: softplus is linear past 20"

    def extend(self, call: ExtendCall) -> ExtendResult:
        return super().extend(replace(call, gates=clamped(call.gates)))


class VerifiesClampedSoftplus(Gdn):
    """Clamps the input of softplus at 20 in verify."""

    breaks = Clause.PRECISION
    caught_by = "verify: softplus is linear past 20"

    def verify(self, call: VerifyCall) -> Tensor:
        return super().verify(replace(call, gates=clamped(call.gates)))


GDN_LAYOUTS = (
    KeysAtQueryRows, QueryHeadsAtKeyHeads, DecodesBetaAtGateStride, ExtendsBetaAtGateStride, VerifiesBetaAtGateStride,
    RowsOfWholeDrafts, OutputAtValueRows, WritesPastCheckpoints, DecodesClampedSoftplus, ExtendsClampedSoftplus,
    VerifiesClampedSoftplus,
)  # fmt: skip
