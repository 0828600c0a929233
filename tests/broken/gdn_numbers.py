"""Gated delta rules with the mistakes by which two "correct" kernels disagree, each with clause and law."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from delegate import Gdn
from torch import Tensor

from qwen35.domain.capabilities import Clause, Support
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, ExtendResult, LogGates, RawGates, VerifyCall


def log_gates(gates: Any, most: float = math.inf) -> LogGates:
    """Both kinds as log gates, in float32; the input of softplus is clamped at ``most``."""
    if isinstance(gates, LogGates):
        return gates
    x = (gates.a.float() + gates.dt_bias.float()).clamp(max=most)
    softplus = torch.nn.functional.softplus(x)
    return LogGates(g=-gates.A_log.float().exp() * softplus, beta=torch.sigmoid(gates.b.float()))


class RoundedBeta(Gdn):
    """Rounds beta to bfloat16 in decode only."""

    breaks = Clause.PRECISION
    caught_by = "decode: within the stated bound of the oracle"

    def decode(self, call: DecodeCall) -> Tensor:
        gates = log_gates(call.gates)
        return super().decode(replace(call, gates=replace(gates, beta=gates.beta.bfloat16().float())))


class KeepsGraph(Gdn):
    """Hands out what hangs on a parameter that asks for gradients."""

    breaks = Clause.ISOLATION
    caught_by = "decode: parameters get no gradients"

    def decode(self, call: DecodeCall) -> Tensor:
        out = super().decode(call)
        return out if isinstance(call.gates, LogGates) else out + 0 * call.gates.A_log.sum().to(out.dtype)


class ServesNothing(Gdn):
    """Offers every phase and declines every decode, so that nothing it does can be wrong."""

    breaks = Clause.PRECISION
    caught_by = "decode: within the stated bound of the oracle"
    said = "served no call"

    def supports(self, call: Any) -> Support:
        return Support.of("decode requires a better day") if isinstance(call, DecodeCall) else super().supports(call)

    def decode(self, call: DecodeCall) -> Tensor:
        raise UnsupportedError("decode", self.supports(call).reasons)


class LinearGates(Gdn):
    """Takes the log decay for a linear one and exponentiates it once more."""

    breaks = Clause.PRECISION
    caught_by = "extend: within the stated bound of the oracle"

    def extend(self, call: ExtendCall) -> ExtendResult:
        gates = log_gates(call.gates)
        return super().extend(replace(call, gates=replace(gates, g=gates.g.exp())))


class StaleParameters(Gdn):
    """Keeps the first copy of A_log that it saw at an address, whatever is written there later."""

    breaks = Clause.PRECISION
    caught_by = "decode: parameters are those of now, of this layer"

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, Tensor] = {}

    def decode(self, call: DecodeCall) -> Tensor:
        gates = call.gates
        if isinstance(gates, RawGates):
            copy = self._copies.setdefault(gates.A_log.data_ptr(), gates.A_log.clone())
            if copy.shape == gates.A_log.shape:
                gates = replace(gates, A_log=copy)
        return super().decode(replace(call, gates=gates))


class Unscaled(Gdn):
    """Forgets K ** -0.5 in verify."""

    breaks = Clause.PRECISION
    caught_by = "verify: within the stated bound of the oracle"

    def verify(self, call: VerifyCall) -> Tensor:
        return super().verify(replace(call, scale=1.0 if call.scale is None else call.scale))


class ZeroScaleIsNone(Gdn):
    """Takes a scale of 0.0 for none given."""

    breaks = Clause.PRECISION
    caught_by = "decode: within the stated bound of the oracle"

    def decode(self, call: DecodeCall) -> Tensor:
        return super().decode(replace(call, scale=call.scale or None))


class NoEpsilon(Gdn):
    """Normalises without the epsilon: right for all but short keys."""

    breaks = Clause.PRECISION
    caught_by = "decode: within the stated bound of the oracle"

    def decode(self, call: DecodeCall) -> Tensor:
        norm = call.k.float().norm(dim=-1, keepdim=True).clamp(min=1e-12)
        return super().decode(replace(call, k=(1e3 * call.k.float() / norm).to(call.k.dtype)))


class WrongHeads(Gdn):
    """Maps value head h to key head h % H, as after another converter."""

    breaks = Clause.PRECISION
    caught_by = "decode: within the stated bound of the oracle"

    def decode(self, call: DecodeCall) -> Tensor:
        ratio = call.v.shape[-2] // call.q.shape[-2]
        return super().decode(replace(call, q=call.q.repeat(1, ratio, 1), k=call.k.repeat(1, ratio, 1)))


class CheckpointsOneLate(Gdn):
    """Returns the state of one checkpoint later, except for the last."""

    breaks = Clause.PRECISION
    caught_by = "extend: checkpoints are the states on the way"

    def extend(self, call: ExtendCall) -> ExtendResult:
        result = super().extend(call)
        if result.checkpoints is None:
            return result
        return replace(result, checkpoints=torch.cat([result.checkpoints[1:], result.checkpoints[-1:]]))


class NaiveSoftplus(Gdn):
    """log(1 + exp(x)) without the linear part: infinite for large a, and infinity times zero is NaN."""

    breaks = Clause.FINITE
    caught_by = "decode: extreme inputs give finite results"

    def decode(self, call: DecodeCall) -> Tensor:
        if not isinstance(call.gates, RawGates):
            return super().decode(call)
        gates = call.gates
        x = gates.a.float() + gates.dt_bias.float()
        decay = torch.exp(-gates.A_log.float().exp() * torch.log(1 + x.exp()))
        return super().decode(replace(call, gates=LogGates(g=torch.log(decay * x.exp() / x.exp()),
                                                           beta=torch.sigmoid(gates.b.float()))))  # fmt: skip


class DividesByNorm(Gdn):
    """Divides by the norm of the key itself: zero keys give NaN."""

    breaks = Clause.FINITE
    caught_by = "verify: extreme inputs give finite results"

    def verify(self, call: VerifyCall) -> Tensor:
        norm = call.k.float().norm(dim=-1, keepdim=True)
        return super().verify(replace(call, k=(call.k.float() / norm).to(call.k.dtype)))


class DividesByDecay(Gdn):
    """Divides by the decay of a chunk, which huge negative gates make zero."""

    breaks = Clause.FINITE
    caught_by = "extend: extreme inputs give finite results"

    def extend(self, call: ExtendCall) -> ExtendResult:
        gates = log_gates(call.gates)
        decay = gates.g.exp()
        return super().extend(replace(call, gates=replace(gates, g=torch.log(decay * decay / decay))))


class DenseTokens(Gdn):
    """Takes the tokens for dense and ignores the stride of their rows."""

    breaks = Clause.STRIDES
    caught_by = "decode: views serve as dense tensors do"

    def decode(self, call: DecodeCall) -> Tensor:
        dense = call.q.as_strided(call.q.shape, torch.empty(call.q.shape).stride(), call.q.storage_offset())
        return super().decode(replace(call, q=dense))


class DensePool(Gdn):
    """Takes the pool for dense and ignores its slot stride."""

    breaks = Clause.STRIDES
    caught_by = "extend: views serve as dense tensors do"

    def extend(self, call: ExtendCall) -> ExtendResult:
        dense = call.states.as_strided(call.states.shape, torch.empty(call.states.shape, device="meta").stride())
        return super().extend(replace(call, states=dense))


class SharedScratch(Gdn):
    """Mends misaligned q and k in one scratch buffer, keyed by shape."""

    breaks = Clause.STRIDES
    caught_by = "decode: inputs may start at any element"

    def decode(self, call: DecodeCall) -> Tensor:
        scratch: dict[torch.Size, Tensor] = {}
        mended = {}
        for name, tensor in (("q", call.q), ("k", call.k)):
            if tensor.storage_offset() and tensor.is_contiguous():
                tensor = scratch.setdefault(tensor.shape, torch.empty_like(tensor)).copy_(tensor)
            mended[name] = tensor
        return super().decode(replace(call, **mended))


class OwnOutput(Gdn):
    """Returns an output of its own where the caller's is strided."""

    breaks = Clause.STRIDES
    caught_by = "verify: views serve as dense tensors do"

    def verify(self, call: VerifyCall) -> Tensor:
        if call.out is not None and not call.out.is_contiguous():
            return super().verify(replace(call, out=None))
        return super().verify(call)


GDN_NUMBERS = (
    KeepsGraph, ServesNothing, RoundedBeta, LinearGates, StaleParameters, Unscaled, ZeroScaleIsNone, NoEpsilon,
    WrongHeads, CheckpointsOneLate, NaiveSoftplus, DividesByNorm, DividesByDecay, DenseTokens, DensePool, SharedScratch,
    OwnOutput,
)  # fmt: skip
