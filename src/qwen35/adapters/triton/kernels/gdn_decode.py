"""Decode: gates, L2 norm, recurrence, pool read and write in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qwen35.adapters.triton.kernels.gdn_common import delta_step, load_gates, load_pieces, rounded, store_pieces
from qwen35.adapters.triton.kernels.gdn_config import DecodeConfig, power_of_two
from qwen35.adapters.triton.kernels.gdn_launch import gate_arguments, scale_of
from qwen35.ports.gated_delta_rule import DecodeCall

_SCALARS = ["gate", "beta", "A_log", "dt_bias", "slots", "write_slots"]


@triton.jit(do_not_specialize=["gate_row", "beta_row"], do_not_specialize_on_alignment=_SCALARS)
def decode_kernel(
    q, k, v, gate, beta, A_log, dt_bias, states, slots, write_slots, out, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, gate_row, beta_row, out_row, out_head, slot_stride,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PIECES: tl.constexpr,
    INNER: tl.constexpr, BLOCK_V: tl.constexpr, RAW: tl.constexpr, READ_ONCE: tl.constexpr,
    WRITE_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V rows of the state of one value head of one batch row.

    The rows are read in PIECES of INNER columns, so that lanes share a row in groups of eight and most of the
    sum over K stays inside a thread.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = pid // BLOCKS % HV
    row = (pid // (BLOCKS * HV)).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    target = slot
    if write_slots is not None:
        target = tl.load(write_slots + row).to(tl.int64)
    live = slot >= 0

    columns = tl.arange(0, INNER)
    rows = pid % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = (rows < V) & live
    q_raw = load_pieces(q + row * q_row + head // RATIO * q_head + columns, columns, live, K, INNER, PIECES, False)
    k_raw = load_pieces(k + row * k_row + head // RATIO * k_head + columns, columns, live, K, INNER, PIECES, False)
    v_raw = tl.load(v + row * v_row + head * v_head + rows, mask=in_v, other=0.0).to(tl.float32)
    g, b = load_gates(gate, beta, A_log, dt_bias, row * gate_row + head, row * beta_row + head, head, live, RAW)

    tile = head * (V * K) + rows[:, None] * K + columns[None, :]
    state = load_pieces(
        states + slot * slot_stride + tile, columns[None, :], in_v[:, None], K, INNER, PIECES, READ_ONCE
    )
    state, o = delta_step(state, q_raw, k_raw, v_raw, scale, tl.exp(g), b, PIECES)
    o = tl.where(live, o, 0.0)
    tl.store(out + row * out_row + head * out_head + rows, rounded(o, out.dtype.element_ty), mask=rows < V)
    store_pieces(
        states + target * slot_stride + tile, state, columns[None, :], in_v[:, None] & (target >= 0),
        K, INNER, PIECES, WRITE_ONCE,
    )  # fmt: skip


def launch_decode(call: DecodeCall, out: Tensor, config: DecodeConfig) -> None:
    """Launch ``call``, which has at least one row; writes ``out`` [B, HV, V] and the pool."""
    batch, heads, value_width = call.v.shape
    key_heads, key_width = call.q.shape[1:]
    gate, beta, A_log, dt_bias, raw = gate_arguments(call.gates)
    grid = (batch * heads * -(-value_width // config.block_v),)
    decode_kernel[grid](
        call.q, call.k, call.v, gate, beta, A_log, dt_bias, call.states, call.slots, call.write_slots, out,
        scale_of(call.scale, key_width),
        call.q.stride(0), call.q.stride(1), call.k.stride(0), call.k.stride(1), call.v.stride(0), call.v.stride(1),
        gate.stride(0), beta.stride(0), out.stride(0), out.stride(1), call.states.stride(0),
        HV=heads, RATIO=heads // key_heads, K=key_width, V=value_width, PIECES=power_of_two(key_width) // config.inner,
        INNER=config.inner, BLOCK_V=config.block_v, RAW=raw, READ_ONCE=config.read_once,
        WRITE_ONCE=config.write_once, num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
