"""Verify: draft tokens of a chain or a tree, every state kept. Commit: accepted states copied into the pool."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qwen35.adapters._kernels.launches import programs_for
from qwen35.adapters.triton.kernels.gdn_common import (
    delta_step,
    load_gates,
    load_pieces,
    rounded,
    select_pieces,
    store_pieces,
)
from qwen35.adapters.triton.kernels.gdn_config import DecodeConfig
from qwen35.adapters.triton.kernels.gdn_launch import gate_arguments, scale_of
from qwen35.domain.alignment import power_of_two
from qwen35.ports.gated_delta_rule import CommitCall, VerifyCall

#: Elements that one program of commit copies: 32 a thread at four warps.
_COPY_BLOCK = 4096


@triton.jit(
    do_not_specialize=["T", "gate_row", "gate_step", "beta_row", "beta_step", "parent_row"],
    do_not_specialize_on_alignment=["gate", "beta", "A_log", "dt_bias", "slots", "rows", "parents"],
)
def verify_kernel(
    q, k, v, gate, beta, A_log, dt_bias, states, slots, intermediates, rows, parents, out, scale, T,
    q_row, q_step, q_head, k_row, k_step, k_head, v_row, v_step, v_head, gate_row, gate_step, beta_row, beta_step,
    out_row, out_step, out_head, slot_stride, kept_row, kept_step, parent_row,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PIECES: tl.constexpr,
    INNER: tl.constexpr, BLOCK_V: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """One program: all T nodes for BLOCK_V rows of the state of one value head of one batch row.

    A node that continues from the node before it takes the state from registers, in float32, in a chain and
    in a tree alike; any other parent is read back, as stored, from what this same program wrote.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = pid // BLOCKS % HV
    row = (pid // (BLOCKS * HV)).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    live = slot >= 0
    kept = row
    if rows is not None:
        kept = tl.load(rows + row).to(tl.int64)

    columns = tl.arange(0, INNER)
    at = pid % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = (at < V) & live
    across, down = columns[None, :], in_v[:, None]
    tile = head * (V * K) + at[:, None] * K + across
    pool = states + slot * slot_stride + tile
    nodes = intermediates + kept * kept_row + tile
    state = load_pieces(pool, across, down, K, INNER, PIECES, False)

    q += row * q_row + head // RATIO * q_head
    k += row * k_row + head // RATIO * k_head
    v += row * v_row + head * v_head
    out += row * out_row + head * out_head
    for t in range(T):
        step = tl.cast(t, tl.int64)
        if parents is not None:
            parent = tl.load(parents + row * parent_row + step, mask=live, other=-1).to(tl.int64)
            if live & (parent != step - 1):
                # The parent's node was written by other threads of this program.
                tl.debug_barrier()
                root = load_pieces(pool, across, down & (parent < 0), K, INNER, PIECES, False)
                node = load_pieces(nodes + parent * kept_step, across, down & (parent >= 0), K, INNER, PIECES, False)
                state = select_pieces(parent < 0, root, node, PIECES)
        q_raw = load_pieces(q + step * q_step + columns, columns, live, K, INNER, PIECES, False)
        k_raw = load_pieces(k + step * k_step + columns, columns, live, K, INNER, PIECES, False)
        v_raw = tl.load(v + step * v_step + at, mask=in_v, other=0.0).to(tl.float32)
        g, b = load_gates(
            gate, beta, A_log, dt_bias, row * gate_row + step * gate_step + head,
            row * beta_row + step * beta_step + head, head, live, RAW,
        )  # fmt: skip
        state, o = delta_step(state, q_raw, k_raw, v_raw, scale, tl.exp(g), b, PIECES)
        o = tl.where(live, o, 0.0)
        tl.store(out + step * out_step + at, rounded(o, out.dtype.element_ty), mask=at < V)
        store_pieces(nodes + step * kept_step, state, across, down, K, INNER, PIECES, False)


def launch_verify(call: VerifyCall, out: Tensor, config: DecodeConfig) -> None:
    """Launch ``call``, which has rows and tokens; writes ``out`` [B, T, HV, V] and ``call.intermediates``."""
    batch, draft, heads, value_width = call.v.shape
    key_heads, key_width = call.q.shape[2:]
    gate, beta, A_log, dt_bias, raw = gate_arguments(call.gates)
    grid = (batch * heads * programs_for(value_width, config.block_v),)
    verify_kernel[grid](
        call.q, call.k, call.v, gate, beta, A_log, dt_bias, call.states, call.slots, call.intermediates, call.rows,
        call.parents, out, scale_of(call.scale, key_width), draft,
        *call.q.stride()[:3], *call.k.stride()[:3], *call.v.stride()[:3], *gate.stride()[:2], *beta.stride()[:2],
        *out.stride()[:3], call.states.stride(0), *call.intermediates.stride()[:2],
        0 if call.parents is None else call.parents.stride(0),
        HV=heads, RATIO=heads // key_heads, K=key_width, V=value_width, PIECES=power_of_two(key_width) // config.inner,
        INNER=config.inner, BLOCK_V=config.block_v, RAW=raw, num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots", "rows", "last"])
def commit_kernel(
    states, slots, intermediates, rows, last, slot_stride, kept_row, kept_step, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK elements of the state of one batch row."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    row = (pid // BLOCKS).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    node = tl.load(last + row).to(tl.int64)
    kept = row
    if rows is not None:
        kept = tl.load(rows + row).to(tl.int64)
    at = pid % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = (at < SIZE) & (slot >= 0) & (node >= 0)
    state = tl.load(intermediates + kept * kept_row + node * kept_step + at, mask=mask, other=0.0)
    state = rounded(state.to(tl.float32), states.dtype.element_ty)
    tl.store(states + slot * slot_stride + at, state, mask=mask)


def launch_commit(call: CommitCall) -> None:
    """Launch ``call``, which has at least one row; writes the named slots."""
    size = call.states.shape[1:].numel()
    block = min(_COPY_BLOCK, power_of_two(size))
    commit_kernel[(call.slots.shape[0] * programs_for(size, block),)](
        call.states, call.slots, call.intermediates, call.rows, call.last, call.states.stride(0),
        *call.intermediates.stride()[:2], SIZE=size, BLOCK=block,
    )  # fmt: skip
