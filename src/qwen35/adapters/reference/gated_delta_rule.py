"""The gated delta rule as its formula reads, in plain torch: the oracle in float64, a default in float32."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from qwen35.domain.capabilities import Capabilities, Clause, Phase, Support
from qwen35.domain.errors import CaptureError, ClosedError, UnsupportedError
from qwen35.domain.precision import Precision
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    Gates,
    GdnCall,
    GdnPlan,
    LogGates,
    VerifyCall,
)
from qwen35.ports.gdn_checks import check_commit, check_decode, check_extend, check_verify
from qwen35.ports.support import call_support, dtype_name, plan_support
from qwen35.services.devices import capturing

L2_EPS = 1e-6
#: softplus(x) is x itself past this, as torch and every kernel have it.
SOFTPLUS_LINEAR_FROM = 20.0
NOT_CAPTURABLE = "index tensors are read on the host, which waits for the device"


class ReferenceGatedDeltaRule:
    """Token by token, one sequence after another, in ``compute_dtype``; supports everything, slowly.

    Reads index tensors on the host: on a GPU it waits for the device and cannot be captured, which
    ``device_type`` "cuda" states as a deviation.
    """

    def __init__(self, compute_dtype: torch.dtype, device_type: str = "cpu") -> None:
        self._dtype = compute_dtype
        self._closed = False
        precision = Precision(products=dtype_name(compute_dtype))
        dtypes = frozenset({"float64", "float32", "bfloat16", "float16"})
        self.capabilities = Capabilities(
            token_dtypes=dtypes, state_dtypes=dtypes - {"float16"}, trees=True, checkpoints=True,
            device_types=frozenset({device_type}), precision=MappingProxyType(dict.fromkeys(Phase, precision)),
            deviations=MappingProxyType({Clause.CAPTURE: NOT_CAPTURABLE} if device_type == "cuda" else {}),
        )  # fmt: skip

    def prepare(self, plan: GdnPlan) -> None:
        """Nothing to fix; raises ``UnsupportedError`` for a plan on another device."""
        self._open()
        support = plan_support(self.capabilities, plan)
        if not support:
            raise UnsupportedError("plan for the reference", support.reasons)

    def supports(self, call: GdnCall) -> Support:
        """Everything on the adapter's device is supported."""
        return call_support(self.capabilities, call)

    @torch.no_grad()
    def decode(self, call: DecodeCall) -> Tensor:
        """One token a row; see the port."""
        check_decode(call)
        self._admit(call)
        out = torch.zeros_like(call.v) if call.out is None else call.out.zero_()
        written = call.slots if call.write_slots is None else call.write_slots
        for row, (read, write) in enumerate(zip(call.slots.tolist(), written.tolist(), strict=True)):
            if read < 0:
                continue
            token = (call.q[row], call.k[row], call.v[row], *self._gates(call.gates, row))
            state, o = self._step(call.states[read].to(self._dtype), *token, call.scale)
            out[row] = o
            if write >= 0:
                call.states[write] = state
        return out

    @torch.no_grad()
    def extend(self, call: ExtendCall) -> ExtendResult:
        """Packed sequences; see the port."""
        check_extend(call)
        self._admit(call)
        out = torch.zeros_like(call.v) if call.out is None else call.out.zero_()
        written = (call.slots if call.write_slots is None else call.write_slots).tolist()
        fresh = [False] * len(written) if call.fresh is None else call.fresh.tolist()
        offsets, plan, checkpoints = call.cu_seqlens.tolist(), call.checkpoints, None
        if plan is not None:
            checkpoints = call.states.new_zeros(plan.count, *call.states.shape[1:])
        for s, read in enumerate(call.slots.tolist()):
            if read < 0 or offsets[s] == offsets[s + 1]:
                continue
            state = call.states[read].to(self._dtype)
            if fresh[s]:
                state = torch.zeros_like(state)
            for t in range(offsets[s], offsets[s + 1]):
                token = (call.q[t], call.k[t], call.v[t], *self._gates(call.gates, t))
                state, out[t] = self._step(state, *token, call.scale)
                done = t + 1 - offsets[s]
                if plan is not None and checkpoints is not None and done % plan.every == 0:
                    checkpoints[int(plan.starts[s]) + done // plan.every - 1] = state
            if written[s] >= 0:
                call.states[written[s]] = state
        return ExtendResult(out=out, checkpoints=checkpoints)

    @torch.no_grad()
    def verify(self, call: VerifyCall) -> Tensor:
        """Draft tokens, chain or tree; see the port."""
        check_verify(call)
        self._admit(call)
        out = torch.zeros_like(call.v) if call.out is None else call.out.zero_()
        batch, draft = call.q.shape[:2]
        rows = range(batch) if call.rows is None else call.rows.tolist()
        chain = [list(range(-1, draft - 1))] * batch
        parents = chain if call.parents is None else call.parents.tolist()
        for i, read in enumerate(call.slots.tolist()):
            if read < 0:
                continue
            states: dict[int, Tensor] = {-1: call.states[read].to(self._dtype)}
            for t in range(draft):
                token = (call.q[i, t], call.k[i, t], call.v[i, t], *self._gates(call.gates, (i, t)))
                states[t], out[i, t] = self._step(states[parents[i][t]], *token, call.scale)
                call.intermediates[rows[i], t] = states[t]
        return out

    @torch.no_grad()
    def commit(self, call: CommitCall) -> None:
        """Copy accepted states; see the port."""
        check_commit(call)
        self._admit(call)
        rows = range(len(call.slots)) if call.rows is None else call.rows.tolist()
        for slot, row, node in zip(call.slots.tolist(), rows, call.last.tolist(), strict=True):
            if slot >= 0 and node >= 0:
                call.states[slot] = call.intermediates[row, node]

    def refresh_parameters(self) -> int:
        """Parameters are read at every call: there are no copies."""
        return 0

    def close(self) -> None:
        """Idempotent."""
        self._closed = True

    def _gates(self, gates: Gates, at: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Log decay and beta [HV] of the token at ``at``, in the compute dtype.

        One token at a time: torch's vectorised exp differs in the last bit between the body and the tail of a
        tensor, so that a token's place in the batch would show in its result.
        """
        if isinstance(gates, LogGates):
            return gates.g[at].to(self._dtype), gates.beta[at].to(self._dtype)
        x = gates.a[at].to(self._dtype) + gates.dt_bias.to(self._dtype)
        softplus = torch.where(x > SOFTPLUS_LINEAR_FROM, x, torch.log1p(x.clamp(max=SOFTPLUS_LINEAR_FROM).exp()))
        return -gates.A_log.to(self._dtype).exp() * softplus, torch.sigmoid(gates.b[at].to(self._dtype))

    def _step(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """One token of every value head: state [HV, V, K], q and k [H, K], v [HV, V], gates [HV]."""
        q, k, v = (x.to(self._dtype) for x in (q, k, v))
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + L2_EPS)
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + L2_EPS)
        q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
        ratio = v.shape[0] // q.shape[0]
        q, k = q.repeat_interleave(ratio, dim=0), k.repeat_interleave(ratio, dim=0)
        state = state * log_decay.exp()[:, None, None]
        error = v - torch.einsum("hvk,hk->hv", state, k)
        state = state + beta[:, None, None] * error[:, :, None] * k[:, None, :]
        return state, torch.einsum("hvk,hk->hv", state, q)

    def _admit(self, call: GdnCall) -> None:
        self._open()
        support = self.supports(call)
        if not support:
            raise UnsupportedError(f"{type(call).__name__} for the reference", support.reasons)
        if capturing(call.states.device):
            raise CaptureError(f"the reference cannot be captured: {NOT_CAPTURABLE}")

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("this adapter was closed; make another one")
