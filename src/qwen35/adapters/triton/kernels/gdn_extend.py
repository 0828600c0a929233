"""Extend: the recurrence in chunks of 64 tokens, two launches.

With G the log decay summed from the chunk's start, S0 the state before the chunk, and normalised k and q,
A_ij = beta_i (k_i.k_j) exp(G_i - G_j) for i > j, the updates of a chunk (Yang et al., "Gated Delta Networks",
2024, section 3) are

    D = (I + A)^-1 diag(beta) (V - diag(exp G) K S0')
    O = diag(exp G) Q S0' + P D,   P_ij = (q_i.k_j) exp(G_i - G_j) for i >= j
    S = exp(G_last) S0 + D' diag(exp(G_last - G)) K

The first kernel finds (I + A)^-1 diag(beta) and P of every chunk and value head; the second walks a sequence's
chunks with a block of S in registers. Products take q, k and v as they came: what normalises them is applied to
the float32 results, so that bfloat16 operands are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qwen35.adapters.triton.kernels.gdn_common import load_gates, rounded

#: exp of less is zero in float32, so a log decay may be cut here; it keeps sums of a chunk finite.
_LOWEST_LOG_DECAY = tl.constexpr(-128.0)


@triton.jit
def _find_chunk(cu_seqlens, index, sequences, BLOCK: tl.constexpr):
    """Sequence and first token of chunk number ``index``.

    Sequence s may use the numbers from cu_seqlens[s] // 64 + s on: at least as many as it has chunks, and found
    without a table. Numbers that stay unused give a first token at or past the sequence's end.
    """
    before = 0
    for start in range(0, sequences, BLOCK):
        s = start + tl.arange(0, BLOCK)
        offset = tl.load(cu_seqlens + s, mask=s < sequences, other=0).to(tl.int64)
        before += tl.sum(((offset // 64 + s <= index) & (s < sequences)).to(tl.int32), 0)
    sequence = before - 1
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    return sequence, begin + (index - (begin // 64 + sequence)) * 64


@triton.jit
def _row_factor(x):
    """What normalises each row of ``x``."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _merge(inverse, a, rows, columns, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """From inverses of diagonal blocks of SIZE to those of 2 SIZE."""
    block = rows[:, None] // SIZE
    below = tl.where((block % 2 == 1) & (columns[None, :] // SIZE == block - 1), a, 0.0)
    below = tl.dot(below, inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, below, input_precision=PRECISION)


@triton.jit
def _unit_lower_inverse(a, rows, columns, PRECISION: tl.constexpr):
    """(I + a)^-1 for a strictly lower [64, 64].

    Diagonal blocks of 16 by substitution, one column at a time for all four; then the blocks below the
    diagonal, at 16 and at 32: X <- X - X a_below X. Powers of a, which a Neumann product would need, overflow
    where keys repeat.
    """
    at = tl.arange(0, 16)
    block = tl.arange(0, 4)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(a, (4, 16, 4, 16)), 0.0), 2)
    x = tl.where(at[None, :, None] == at[None, None, :], 1.0, 0.0) + tl.zeros_like(diagonal)
    for j in range(15):
        column = tl.sum(tl.where(at[None, None, :] == j, diagonal, 0.0), 2)
        row = tl.sum(tl.where(at[None, :, None] == j, x, 0.0), 1)
        x -= column[:, :, None] * row[:, None, :]
    inverse = tl.reshape(tl.where(same, x[:, :, None, :], 0.0), (64, 64))
    inverse = _merge(inverse, a, rows, columns, 16, PRECISION)
    return _merge(inverse, a, rows, columns, 32, PRECISION)


@triton.jit(
    do_not_specialize=["sequences", "tokens", "gate_row", "beta_row"],
    do_not_specialize_on_alignment=["gate", "beta", "A_log", "dt_bias", "slots", "cu_seqlens"],
)
def chunk_kernel(
    q, k, gate, beta, A_log, dt_bias, slots, cu_seqlens, inverse, attention, factors, scale, sequences, tokens,
    q_row, q_head, k_row, k_head, gate_row, beta_row,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, RAW: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one value head; no program waits for another."""
    pid = tl.program_id(0)
    head = pid % HV
    sequence, first = _find_chunk(cu_seqlens, pid // HV, sequences, BLOCK_S)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    if (first >= end) | (tl.load(slots + sequence) < 0):
        return

    row = tl.arange(0, 64)
    column = tl.arange(0, 64)
    token = first + row
    inside = token < end
    width = tl.arange(0, BLOCK_K)
    mask = inside[:, None] & (width < K)[None, :]
    q += head // RATIO * q_head
    k += head // RATIO * k_head
    k_raw = tl.load(k + token[:, None] * k_row + width[None, :], mask=mask, other=0.0)
    q_raw = tl.load(q + token[:, None] * q_row + width[None, :], mask=mask, other=0.0)
    g, b = load_gates(gate, beta, A_log, dt_bias, token * gate_row + head, token * beta_row + head, head, inside, RAW)
    g = tl.where(inside, tl.maximum(g, _LOWEST_LOG_DECAY), 0.0)
    b = tl.where(inside, b, 0.0)
    k_factor = _row_factor(k_raw)
    q_factor = _row_factor(q_raw) * scale
    keys = tl.trans(k_raw.to(DOT))
    qk = tl.dot(q_raw.to(DOT), keys, input_precision=PRECISION)
    kk = tl.dot(k_raw.to(DOT), keys, input_precision=PRECISION)

    # Differences of sums lose what a large decay rounds away, so whole sixteenths, which add up exactly, are
    # summed apart from the rest.
    coarse = tl.floor(g * 16.0 + 0.5) * 0.0625
    high = tl.cumsum(coarse, 0)
    low = tl.cumsum(g - coarse, 0)
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    decay = tl.exp(tl.where(row[:, None] >= column[None, :], between, 0.0)) * k_factor[None, :]
    p = tl.where(row[:, None] >= column[None, :], qk * q_factor[:, None] * decay, 0.0)
    a = tl.where(row[:, None] > column[None, :], kk * (b * k_factor)[:, None] * decay, 0.0)

    at = (head * tokens + token)[:, None] * 64 + column[None, :]
    tl.store(attention + at, rounded(p, attention.dtype.element_ty), mask=inside[:, None])
    x = _unit_lower_inverse(a, row, column, PRECISION) * b[None, :]
    tl.store(inverse + at, rounded(x, inverse.dtype.element_ty), mask=inside[:, None])

    decayed = tl.exp(high + low)
    remaining = tl.exp((tl.sum(coarse, 0) - high) + (tl.sum(g - coarse, 0) - low))
    factors += head * tokens + token
    step = HV * tokens
    tl.store(factors, decayed * k_factor, mask=inside)
    tl.store(factors + step, decayed * q_factor, mask=inside)
    tl.store(factors + 2 * step, remaining * k_factor, mask=inside)
    tl.store(factors + 3 * step, decayed, mask=inside)


@triton.jit(
    do_not_specialize=["tokens", "every"],
    do_not_specialize_on_alignment=["slots", "write_slots", "fresh", "cu_seqlens", "starts"],
)
def scan_kernel(
    q, k, v, states, slots, write_slots, fresh, cu_seqlens, inverse, attention, factors, starts, checkpoints, out,
    tokens, every, q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, slot_stride,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V rows of the state of one value head of one sequence, held transposed [K, BLOCK_V].

    A padded sequence walks its tokens too, with everything masked to zero: its rows of ``out`` and of
    ``checkpoints`` are written as zeros.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = pid // BLOCKS % HV
    sequence = pid // (BLOCKS * HV)
    slot = tl.load(slots + sequence).to(tl.int64)
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens + sequence + 1) - begin).to(tl.int32)
    live = slot >= 0

    row = tl.arange(0, 64)
    width = tl.arange(0, BLOCK_K)
    at = pid % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = head * (V * K) + at[None, :] * K + width[:, None]
    inside = (at < V)[None, :] & (width < K)[:, None]
    keep = live
    if fresh is not None:
        # Selected, not multiplied: a fresh slot may hold NaN.
        keep = live & (tl.load(fresh + sequence) == 0)
    state = tl.load(states + slot * slot_stride + tile, mask=inside & keep, other=0.0).to(tl.float32)

    q += begin * q_row + head // RATIO * q_head
    k += begin * k_row + head // RATIO * k_head
    v += begin * v_row + head * v_head + at[None, :]
    out += begin * out_row + head * out_head + at[None, :]
    rows_of = head * tokens + begin
    inverse += rows_of * 64
    attention += rows_of * 64
    factors += rows_of
    step = HV * tokens
    square = row[:, None] * 64 + row[None, :]
    if starts is not None:
        checkpoints += tl.load(starts + sequence) * (HV * V * K) + tile

    for first in tl.range(0, length, 64, num_stages=STAGES):
        token = first + row
        far = token.to(tl.int64)[:, None]
        known = (token < length) & live
        in_k = known[:, None] & (width < K)[None, :]
        in_v = known[:, None] & (at < V)[None, :]
        keys = tl.load(k + far * k_row + width[None, :], mask=in_k, other=0.0).to(DOT)
        queries = tl.load(q + far * q_row + width[None, :], mask=in_k, other=0.0).to(DOT)
        values = tl.load(v + far * v_row, mask=in_v, other=0.0).to(tl.float32)
        chunk = tl.cast(first, tl.int64) * 64 + square
        x = tl.load(inverse + chunk, mask=known[:, None], other=0.0)
        p = tl.load(attention + chunk, mask=known[:, None], other=0.0)
        k_decayed = tl.load(factors + token, mask=known, other=0.0)
        q_decayed = tl.load(factors + step + token, mask=known, other=0.0)
        remaining = tl.load(factors + 2 * step + token, mask=known, other=0.0)
        last = tl.minimum(first + 64, length) - 1
        decay = tl.load(factors + 3 * step + last, mask=live, other=0.0)

        old = state.to(DOT)
        error = values - tl.dot(keys, old, input_precision=PRECISION) * k_decayed[:, None]
        delta = tl.dot(x, error.to(DOT), input_precision=PRECISION)
        o = tl.dot(queries, old, input_precision=PRECISION) * q_decayed[:, None]
        o = tl.dot(p, delta.to(DOT), o, input_precision=PRECISION)
        write = (delta * remaining[:, None]).to(DOT)
        state = tl.dot(tl.trans(keys), write, state * decay, input_precision=PRECISION)
        written = (token < length)[:, None] & (at < V)[None, :]
        tl.store(out + far * out_row, rounded(o, out.dtype.element_ty), mask=written)
        if starts is not None:
            done = first + 64
            if (done <= length) & (done % every == 0):
                where = checkpoints + tl.cast(done // every - 1, tl.int64) * (HV * V * K)
                tl.store(where, rounded(state, checkpoints.dtype.element_ty), mask=inside)

    target = slot
    if write_slots is not None:
        target = tl.load(write_slots + sequence).to(tl.int64)
    wanted = live & (target >= 0) & (length > 0)
    tl.store(states + target * slot_stride + tile, rounded(state, states.dtype.element_ty), mask=inside & wanted)
