"""The gated delta rule as the laws see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from qwen35.domain.capabilities import GateKind, Phase
from qwen35.ports.gated_delta_rule import (
    CheckpointPlan,
    CommitCall,
    DecodeCall,
    ExtendCall,
    Gates,
    GdnCall,
    GdnPlan,
    LogGates,
    RawGates,
    VerifyCall,
)
from qwen35.testing.case import Case, GdnSizes
from qwen35.testing.kit import Kit, Parts, serve
from qwen35.testing.limits import Limits
from qwen35.testing.tensors import normal, uniform

#: None: the default. 0.0 is a value, and some kernels take it for "not given".
SCALES = (None, 0.5, 0.0)


class GdnKit(Kit):
    """See ``Kit``. Tokens: q, k, v and either a, b or g, beta; params: A_log, dt_bias (raw gates), scale."""

    port = "gated_delta_rule"
    groups = (("q", "k", "v"), ("b", "a"), ("g", "beta"))
    pool_name = "states"

    def sizes(self, limits: Limits) -> st.SearchStrategy[GdnSizes]:
        """Heads, widths, dtypes, gates and scale within ``limits``."""

        def make(heads: tuple[int, int], widths: tuple[int, int], token: torch.dtype, state: torch.dtype,
                 gates: GateKind, scale: float | None) -> GdnSizes:  # fmt: skip
            return GdnSizes(
                key_heads=heads[0], value_heads=heads[1], key_width=widths[0], value_width=widths[1],
                token_dtype=token, state_dtype=state, gates=gates, scale=scale,
            )  # fmt: skip

        return st.builds(
            make, st.sampled_from(limits.heads), st.sampled_from(limits.widths),
            st.sampled_from(limits.token_dtypes), st.sampled_from(limits.state_dtypes),
            st.sampled_from(limits.gates), st.sampled_from(SCALES),
        )  # fmt: skip

    def tokens(self, sizes: GdnSizes, leading: tuple[int, ...], source: torch.Generator) -> dict[str, Tensor]:
        """q and k of very different lengths, so that the norm and its epsilon show."""
        keys, values = (*leading, sizes.key_heads), (*leading, sizes.value_heads)
        made = {
            name: normal((*keys, sizes.key_width), source) * uniform((*keys, 1), -7, 3, source).exp()
            for name in ("q", "k")
        }
        made["v"] = normal((*values, sizes.value_width), source)
        made = {name: t.to(sizes.token_dtype) for name, t in made.items()}
        if sizes.gates is GateKind.LOG:
            made["g"] = -uniform(values, -6.0, 1.5, source).exp()
            made["beta"] = uniform(values, 0.02, 0.98, source)
        else:
            made["a"] = (1.5 * normal(values, source)).to(sizes.token_dtype)
            made["b"] = (1.5 * normal(values, source)).to(sizes.token_dtype)
        return made

    def params(self, sizes: GdnSizes, source: torch.Generator) -> dict[str, Any]:
        """A_log float32, dt_bias in the tokens' dtype: decays from none to nearly all in a step."""
        made: dict[str, Any] = {"scale": sizes.scale}
        if sizes.gates is GateKind.RAW:
            made["A_log"] = uniform((sizes.value_heads,), -4.0, 2.0, source)
            made["dt_bias"] = uniform((sizes.value_heads,), -2.0, 1.0, source).to(sizes.token_dtype)
        return made

    def out_shape(self, sizes: GdnSizes) -> tuple[int, ...]:
        """[HV, V]."""
        return (sizes.value_heads, sizes.value_width)

    def plan(self, case: Case[GdnSizes], device: torch.device, null_slot: int | None) -> GdnPlan:
        """The smallest plan that holds the case."""
        return GdnPlan(
            geometry=case.sizes.geometry, state_dtype=case.sizes.state_dtype, device=device,
            max_batch=max(1, len(case.slots)), max_tokens=max(1, sum(case.lengths), len(case.slots)),
            max_draft=case.draft, token_dtype=case.sizes.token_dtype, null_slot=null_slot,
        )  # fmt: skip

    def call(self, phase: Phase, parts: Parts) -> GdnCall:
        """The call object of ``phase``."""
        p = parts
        if phase is Phase.COMMIT:
            assert p.intermediates is not None
            assert p.last is not None
            return CommitCall(states=p.pool, slots=p.slots, intermediates=p.intermediates, last=p.last, rows=p.rows)
        q, k, v, gates, scale = p.tokens["q"], p.tokens["k"], p.tokens["v"], _gates(p), p.params["scale"]
        if phase is Phase.DECODE:
            return DecodeCall(
                q=q, k=k, v=v, gates=gates, states=p.pool, slots=p.slots, write_slots=p.write_slots, scale=scale,
                out=p.out,
            )  # fmt: skip
        if phase is Phase.VERIFY:
            assert p.intermediates is not None
            return VerifyCall(
                q=q, k=k, v=v, gates=gates, states=p.pool, slots=p.slots, intermediates=p.intermediates, rows=p.rows,
                parents=p.parents, scale=scale, out=p.out,
            )  # fmt: skip
        assert p.cu_seqlens is not None
        return ExtendCall(
            q=q, k=k, v=v, gates=gates, states=p.pool, slots=p.slots, cu_seqlens=p.cu_seqlens,
            seq_lens_host=p.seq_lens_host, fresh=p.fresh, write_slots=p.write_slots,
            checkpoints=None if p.every is None else checkpoint_plan(p.cu_seqlens, p.every), scale=scale, out=p.out,
        )  # fmt: skip

    def parts(self, call: GdnCall) -> Parts:
        """The reverse of ``call``."""
        if isinstance(call, CommitCall):
            return Parts(
                pool=call.states, slots=call.slots, intermediates=call.intermediates, rows=call.rows, last=call.last
            )
        gates = call.gates
        tokens = {"q": call.q, "k": call.k, "v": call.v}
        params: dict[str, Any] = {"scale": call.scale}
        if isinstance(gates, LogGates):
            tokens |= {"g": gates.g, "beta": gates.beta}
        else:
            tokens |= {"a": gates.a, "b": gates.b}
            params |= {"A_log": gates.A_log, "dt_bias": gates.dt_bias}
        if isinstance(call, DecodeCall):
            return Parts(
                pool=call.states, slots=call.slots, tokens=tokens, params=params, write_slots=call.write_slots,
                out=call.out,
            )  # fmt: skip
        if isinstance(call, VerifyCall):
            return Parts(
                pool=call.states, slots=call.slots, tokens=tokens, params=params, out=call.out,
                intermediates=call.intermediates, rows=call.rows, parents=call.parents,
            )  # fmt: skip
        return Parts(
            pool=call.states, slots=call.slots, tokens=tokens, params=params, write_slots=call.write_slots,
            out=call.out, cu_seqlens=call.cu_seqlens, seq_lens_host=call.seq_lens_host, fresh=call.fresh,
            every=None if call.checkpoints is None else call.checkpoints.every,
        )  # fmt: skip

    def out_terms(self, oracle: Any, phase: Phase, parts: Parts) -> Tensor:
        """Of o[v] = sum_k S[v, k] q[k], with the state after each token."""
        q = parts.tokens["q"]
        heads, width = q.shape[-2:]
        states = self._states_after(oracle, phase, parts)
        scale = parts.params["scale"]
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * (width**-0.5 if scale is None else scale)
        q = q.repeat_interleave(states.shape[-3] // heads, dim=-2)
        squares = torch.einsum("...hvk,...hk->...hv", states.square_(), q.square())
        # The q of a padded row may be NaN.
        return squares.nan_to_num_(0.0, posinf=0.0).sqrt_()

    def _states_after(self, oracle: Any, phase: Phase, parts: Parts) -> Tensor:
        """The state after each token, [T, HV, V, K] or [B, T, HV, V, K] (decode: [B, HV, V, K]); zeros for padding."""
        if phase is Phase.EXTEND:
            kept = serve(oracle, self.call(phase, replace(parts, every=1))).checkpoints
            assert kept is not None
            return kept
        tokens = parts.tokens
        if phase is Phase.DECODE:
            tokens = {name: t[:, None] for name, t in tokens.items()}
        rows, draft = tokens["q"].shape[:2]
        nodes = parts.pool.new_zeros(rows, draft, *parts.pool.shape[1:])
        serve(oracle, self.call(Phase.VERIFY, replace(parts, tokens=tokens, intermediates=nodes, rows=None)))
        return nodes[:, 0] if phase is Phase.DECODE else nodes


def checkpoint_plan(cu_seqlens: Tensor, every: int) -> CheckpointPlan:
    """The plan that keeps a state after every ``every`` tokens of each sequence. Reads ``cu_seqlens``."""
    starts = torch.zeros(cu_seqlens.shape[0], dtype=torch.int64, device=cu_seqlens.device)
    starts[1:] = (cu_seqlens.diff().to(torch.int64) // every).cumsum(0)
    return CheckpointPlan(every=every, starts=starts, count=int(starts[-1]))


def _gates(parts: Parts) -> Gates:
    if "g" in parts.tokens:
        return LogGates(g=parts.tokens["g"], beta=parts.tokens["beta"])
    return RawGates(
        a=parts.tokens["a"], b=parts.tokens["b"], A_log=parts.params["A_log"], dt_bias=parts.params["dt_bias"]
    )
