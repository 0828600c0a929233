"""What a chunked prefill kernel wants of its inputs, in one launch. Imported only inside factories."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qwen35.adapters._kernels.launches import KeptLaunches, programs_for
from qwen35.domain.alignment import power_of_two
from qwen35.ports.gdn_calls import Gates, LogGates

#: Tokens of one program, and offsets that it copies together.
TOKENS, ENTRIES = 16, 1024


@triton.jit
def _normalised(source, out, token, head, inside, live, stride_token, stride_head, HEADS: tl.constexpr,
                WIDTH: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    at = tl.arange(0, PADDED)
    column = (at < WIDTH)[None, :]
    where = token[:, None] * stride_token + head * stride_head + at[None, :]
    x = tl.load(source + where, mask=live[:, None] & column, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
    to = (token[:, None] * HEADS + head) * WIDTH + at[None, :]
    tl.store(out + to, x.to(out.dtype.element_ty), mask=inside[:, None] & column)


@triton.jit
def _live(token, inside, cu_seqlens, slots, sequences, STEPS: tl.constexpr):
    """Whether each token's sequence, the last that starts at or before it, has a slot: by binary search."""
    sequence = tl.zeros_like(token)
    for i in tl.static_range(STEPS):
        further = sequence + (1 << (STEPS - 1 - i))
        start = tl.load(cu_seqlens + further, mask=inside & (further < sequences), other=0)
        sequence = tl.where(inside & (further < sequences) & (start <= token), further, sequence)
    return inside & (tl.load(slots + sequence, mask=inside, other=-1) >= 0)


@triton.jit
def _prefill_inputs(
    q, k, v, decay_in, beta_in, A_log, dt_bias, cu_seqlens, slots, q_out, k_out, v_out, decay, beta, cu_out, tokens,
    entries, q_token, q_head, k_token, k_head, v_token, v_head, decay_token, beta_token, HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr, HEADS_PADDED: tl.constexpr, RAW: tl.constexpr, LINEAR: tl.constexpr,
    COPY_V: tl.constexpr, STEPS: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_CU: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    inside = token < tokens
    live = inside
    if HAS_SLOTS:
        live = _live(token, inside, cu_seqlens, slots, entries - 1, STEPS)
    if part < HEADS:
        _normalised(q, q_out, token, part, inside, live, q_token, q_head, HEADS, KEY_WIDTH, KEY_PADDED)
        _normalised(k, k_out, token, part, inside, live, k_token, k_head, HEADS, KEY_WIDTH, KEY_PADDED)
    elif part == HEADS:
        head = tl.arange(0, HEADS_PADDED)
        column = (head < VALUE_HEADS)[None, :]
        mask, read = inside[:, None] & column, live[:, None] & column
        g = tl.load(decay_in + token[:, None] * decay_token + head[None, :], mask=read, other=0.0).to(tl.float32)
        b = tl.load(beta_in + token[:, None] * beta_token + head[None, :], mask=read, other=0.0).to(tl.float32)
        if RAW:
            rate = tl.exp(tl.load(A_log + head, mask=head < VALUE_HEADS, other=0.0).to(tl.float32))
            x = g + tl.load(dt_bias + head, mask=head < VALUE_HEADS, other=0.0).to(tl.float32)[None, :]
            small = tl.exp(-tl.abs(x))
            # log(1 + u) loses every digit of a small u: four terms of its series hold to 2e-9 below 0.01.
            series = small * (1.0 - small * (0.5 - small * (1.0 / 3.0 - small * 0.25)))
            log1p = tl.where(small < 0.01, series, tl.log(1.0 + small))
            g = -rate[None, :] * tl.where(x > 20.0, x, tl.where(x > 0.0, x, 0.0) + log1p)
            b = 1.0 / (1.0 + tl.exp(-b))
        if HAS_SLOTS:
            g = tl.where(live[:, None], g, 0.0)
            b = tl.where(live[:, None], b, 0.0)
        if LINEAR:
            g = tl.exp(g)
        to = token[:, None] * VALUE_HEADS + head[None, :]
        tl.store(decay + to, g, mask=mask)
        tl.store(beta + to, b, mask=mask)
        if tl.program_id(0) == 0:
            for first in range(0, entries, BLOCK_CU):
                at = first + tl.arange(0, BLOCK_CU)
                offset = tl.load(cu_seqlens + at, mask=at < entries, other=0)
                tl.store(cu_out + at, offset.to(cu_out.dtype.element_ty), mask=at < entries)
    elif COPY_V:
        # Names of its own: Triton wants one type for a name that several branches assign.
        value_head = part - HEADS - 1
        lane = tl.arange(0, VALUE_PADDED)
        within = (lane < VALUE_WIDTH)[None, :]
        where = token[:, None] * v_token + value_head * v_head + lane[None, :]
        copied = tl.load(v + where, mask=live[:, None] & within, other=0.0)
        target = (token[:, None] * VALUE_HEADS + value_head) * VALUE_WIDTH + lane[None, :]
        tl.store(v_out + target, copied, mask=inside[:, None] & within)


kept_inputs = KeptLaunches(_prefill_inputs)


def launch_prefill_inputs(
    q: Tensor, k: Tensor, gates: Gates, cu_seqlens: Tensor, q_out: Tensor, k_out: Tensor, decay: Tensor, beta: Tensor,
    cu_out: Tensor, v: Tensor | None, v_out: Tensor | None, linear: bool, slots: Tensor | None,
) -> None:  # fmt: skip
    """See ``RowOperations.prefill_inputs``. A program normalises one head of sixteen tokens, or makes the gates of
    all heads of sixteen tokens, or copies one value head of them."""
    tokens, heads, width = q.shape
    value_heads = decay.shape[1]
    if isinstance(gates, LogGates):
        decay_in, beta_in, a_log, dt_bias = gates.g, gates.beta, gates.g, gates.g
    else:
        decay_in, beta_in, a_log, dt_bias = gates.a, gates.b, gates.A_log, gates.dt_bias
    value, value_out = (q, q_out) if v is None or v_out is None else (v, v_out)
    parts = heads + 1 + (0 if value is q else value_heads)
    entries = cu_seqlens.shape[0]
    kept_inputs(
        (programs_for(tokens, TOKENS), parts, 1),
        (
            tokens, entries, *q.stride()[:2], *k.stride()[:2], *value.stride()[:2], decay_in.stride(0),
            beta_in.stride(0), heads, value_heads, width, value.shape[2],
            *map(power_of_two, (width, value.shape[2], value_heads)), not isinstance(gates, LogGates), linear,
            value is not q, max(1, (entries - 1).bit_length()), slots is not None, TOKENS, ENTRIES,
        ),
        q, k, value, decay_in, beta_in, a_log, dt_bias, cu_seqlens, cu_seqlens if slots is None else slots, q_out,
        k_out, value_out, decay, beta, cu_out,
    )  # fmt: skip
