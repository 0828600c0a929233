"""From the tensors that SGLang's dispatcher passes to the calls of our contract. Nothing is copied but tree parents."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qwen35.domain.errors import UnsupportedError
from qwen35.ports.gated_delta_rule import CheckpointPlan, DecodeCall, ExtendCall, Gates, LogGates, RawGates, VerifyCall


@dataclass(frozen=True, slots=True)
class ExtendContext:
    """What GDNAttnBackend.forward_extend knows and does not pass on.

    Raw gates ``a``, ``b`` [T, HV] (or [1, T, HV]) with their parameters, the sequences' ``lengths`` on the host,
    whether the rows of a verify are ``ragged``: of different draft lengths, and whether the call is one of multi-item
    ``scoring``: the dispatcher is then handed other rows than these, with rounded gates alone.
    """

    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lengths: tuple[int, ...] | None
    ragged: bool
    scoring: bool


#: The forward_extend that is running; None outside of one.
EXTENDING: ContextVar[ExtendContext | None] = ContextVar("qwen35_extending", default=None)

_EXTEND_KNOWN = frozenset({
    "inplace_update", "state_checkpoint_cu_starts", "num_state_checkpoints", "state_checkpoint_every_n_tokens",
    "output", "layer_id", "extend_prefix_lens",
})  # fmt: skip
_VERIFY_KNOWN = frozenset({
    "intermediate_states_buffer", "intermediate_state_indices", "cache_steps", "retrieve_parent_token", "stable_rows",
})  # fmt: skip


def refuse_unknown(what: str, arguments: Mapping[str, Any], known: frozenset[str]) -> None:
    """An argument that we do not know and that says something is SGLang's own kernel's business."""
    strange = sorted(name for name, value in arguments.items() if name not in known and value is not None)
    if any(name.startswith("replayssm_") for name in strange):
        raise UnsupportedError(what, ["ReplaySSM keeps recent tokens outside the pool, so its row is not the state"])
    if strange:
        raise UnsupportedError(what, [f"{what} requires known arguments, got {', '.join(strange)}"])


def packed_decode_call(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float | None, states: Tensor,
    slots: Tensor, value_heads: int, value_width: int, others: Mapping[str, Any],
) -> DecodeCall:  # fmt: skip
    """mixed_qkv [B, 2*H*K + HV*V], as the convolution leaves it."""
    refuse_unknown("packed decode", others, frozenset())
    batch, width = mixed_qkv.shape
    keys = (width - value_heads * value_width) // 2
    key_shape = (batch, keys // states.shape[-1], states.shape[-1])
    return DecodeCall(
        q=mixed_qkv[:, :keys].view(key_shape), k=mixed_qkv[:, keys : 2 * keys].view(key_shape),
        v=mixed_qkv[:, 2 * keys :].view(batch, value_heads, value_width),
        gates=_raw(a, b, A_log, dt_bias, (batch, value_heads)), states=states, slots=slots[:batch], scale=scale,
    )  # fmt: skip


def decode_call(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, states: Tensor,
    slots: Tensor, others: Mapping[str, Any],
) -> DecodeCall:  # fmt: skip
    """q, k [1, B, H, K], v [1, B, HV, V]."""
    refuse_unknown("decode", others, frozenset())
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    gates = _raw(a, b, A_log, dt_bias, tuple(v.shape[:2]))
    return DecodeCall(q=q, k=k, v=v, gates=gates, states=states, slots=slots[: q.shape[0]])


def extend_call(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor, offsets: Tensor,
    others: Mapping[str, Any],
) -> tuple[ExtendCall, Tensor | None]:  # fmt: skip
    """q, k [1, T, H, K], v [1, T, HV, V], g, beta [1, T, HV]; rows past the last sequence are left out.

    Also the whole output [T, HV, V], of which the call fills the rows of sequences and the rest is zero (None: the
    call makes its own output, and that is all of it).
    """
    context = EXTENDING.get()
    if context is not None and context.scoring:
        raise UnsupportedError("extend", ["extend requires a batch without multi-item scoring"])
    refuse_unknown("extend", others, _EXTEND_KNOWN)
    if not others.get("inplace_update", True):
        raise UnsupportedError("extend", ["extend requires an update in place, got inplace_update=False"])
    q, k, v = (x[0] for x in (q, k, v))
    tokens, sequences = q.shape[0], offsets.shape[0] - 1
    lengths = None if context is None else context.lengths
    if lengths is not None and (len(lengths) != sequences or sum(lengths) > tokens):
        lengths = None
    real = tokens if lengths is None else sum(lengths)
    raw = context if context is not None and context.a.shape[-2] == tokens else None
    gates: Gates
    if raw is not None:
        gates = _raw(raw.a, raw.b, raw.A_log, raw.dt_bias, (tokens, v.shape[-2]), real)
    else:
        gates = LogGates(g=g[0][:real].float(), beta=beta[0][:real].float())
    output = others.get("output")
    whole = out = None if output is None else output[0]
    if real < tokens:
        whole = torch.empty_like(v) if whole is None else whole
        q, k, v, out = q[:real], k[:real], v[:real], whole[:real]
        whole[real:].zero_()
    call = ExtendCall(
        q=q, k=k, v=v, gates=gates, states=states, slots=slots[:sequences], cu_seqlens=offsets, seq_lens_host=lengths,
        checkpoints=checkpoint_plan(others), out=out,
    )  # fmt: skip
    return call, whole


def checkpoint_plan(others: Mapping[str, Any]) -> CheckpointPlan | None:
    """The plan that SGLang made with the batch's metadata, None where it keeps no checkpoint."""
    count, starts = others.get("num_state_checkpoints") or 0, others.get("state_checkpoint_cu_starts")
    if not count or starts is None:
        return None
    return CheckpointPlan(every=others["state_checkpoint_every_n_tokens"], starts=starts, count=count)


def verify_call(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, states: Tensor,
    slots: Tensor, offsets: Tensor, others: Mapping[str, Any],
) -> VerifyCall:  # fmt: skip
    """q, k [1, B*T, H, K], v [1, B*T, HV, V], every row with T = cache_steps draft tokens."""
    refuse_unknown("verify", others, _VERIFY_KNOWN)
    intermediates, draft = others["intermediate_states_buffer"], others["cache_steps"]
    context, batch = EXTENDING.get(), offsets.shape[0] - 1
    if intermediates is None:
        raise UnsupportedError("verify", ["verify requires a buffer of intermediate states, got none"])
    if (context is not None and context.ragged) or q.shape[1] != batch * draft:
        raise UnsupportedError("verify", ["verify requires rows of equal draft length, got ragged ones"])
    q, k, v = (x[0].view(batch, draft, *x.shape[2:]) for x in (q, k, v))
    parents = others.get("retrieve_parent_token")
    return VerifyCall(
        q=q, k=k, v=v, gates=_raw(a, b, A_log, dt_bias, tuple(v.shape[:3])), states=states, slots=slots[:batch],
        intermediates=intermediates, rows=others["intermediate_state_indices"][:batch],
        parents=None if parents is None else tree_parents(parents[:batch]),
    )  # fmt: skip


def tree_parents(links: Tensor) -> Tensor:
    """``links`` [B, T] as int32. SGLang leaves the root's parent undefined; ours is -1, the pool's state."""
    parents = links.to(torch.int32, copy=True)
    parents[:, 0] = -1
    return parents


def _raw(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, shape: tuple[int, ...], real: int | None = None
) -> RawGates:
    a, b = a.reshape(shape), b.reshape(shape)
    if real is not None and real < shape[0]:
        a, b = a[:real], b[:real]
    return RawGates(a=a, b=b, A_log=A_log, dt_bias=dt_bias)
