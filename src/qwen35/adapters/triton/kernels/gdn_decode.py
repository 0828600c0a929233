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
    INNER: tl.constexpr, BLOCK_V: tl.constexpr, WALK: tl.constexpr, STAGES: tl.constexpr, RAW: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    """One program: WALK tiles of BLOCK_V rows of the state of one value head of one batch row, one after another.

    The rows are read in PIECES of INNER columns, so that lanes share a row in groups of eight and most of the
    sum over K stays inside a thread. With STAGES above one the next tiles are on their way while one is worked on.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V * WALK - 1) // (BLOCK_V * WALK)
    pid = tl.program_id(0)
    head = pid // BLOCKS % HV
    row = (pid // (BLOCKS * HV)).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    target = slot
    if write_slots is not None:
        target = tl.load(write_slots + row).to(tl.int64)
    live = slot >= 0

    columns = tl.arange(0, INNER)
    q_raw = load_pieces(q + row * q_row + head // RATIO * q_head + columns, columns, live, K, INNER, PIECES, False)
    k_raw = load_pieces(k + row * k_row + head // RATIO * k_head + columns, columns, live, K, INNER, PIECES, False)
    g, b = load_gates(gate, beta, A_log, dt_bias, row * gate_row + head, row * beta_row + head, head, live, RAW)
    alpha = tl.exp(g)
    v += row * v_row + head * v_head
    out += row * out_row + head * out_head
    source = states + slot * slot_stride + head * (V * K)
    sink = states + target * slot_stride + head * (V * K)

    for step in tl.range(0, WALK, num_stages=STAGES):
        rows = (pid % BLOCKS * WALK + step) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = (rows < V) & live
        tile = rows[:, None] * K + columns[None, :]
        v_raw = tl.load(v + rows, mask=in_v, other=0.0).to(tl.float32)
        state = load_pieces(source + tile, columns[None, :], in_v[:, None], K, INNER, PIECES, STREAM)
        state, o = delta_step(state, q_raw, k_raw, v_raw, scale, alpha, b, PIECES)
        o = tl.where(live, o, 0.0)
        tl.store(out + rows, rounded(o, out.dtype.element_ty), mask=rows < V)
        store_pieces(sink + tile, state, columns[None, :], in_v[:, None] & (target >= 0), K, INNER, PIECES, STREAM)


def launch_decode(call: DecodeCall, out: Tensor, config: DecodeConfig) -> None:
    """Launch ``call``, which has at least one row; writes ``out`` [B, HV, V] and the pool."""
    batch, heads, value_width = call.v.shape
    key_heads, key_width = call.q.shape[1:]
    gate, beta, A_log, dt_bias, raw = gate_arguments(call.gates)
    grid = (batch * heads * -(-value_width // (config.block_v * config.walk)),)
    decode_kernel[grid](
        call.q, call.k, call.v, gate, beta, A_log, dt_bias, call.states, call.slots, call.write_slots, out,
        scale_of(call.scale, key_width),
        call.q.stride(0), call.q.stride(1), call.k.stride(0), call.k.stride(1), call.v.stride(0), call.v.stride(1),
        gate.stride(0), beta.stride(0), out.stride(0), out.stride(1), call.states.stride(0),
        HV=heads, RATIO=heads // key_heads, K=key_width, V=value_width, PIECES=power_of_two(key_width) // config.inner,
        INNER=config.inner, BLOCK_V=config.block_v, WALK=config.walk, STAGES=config.stages, RAW=raw,
        STREAM=config.stream, num_warps=config.num_warps,
    )  # fmt: skip
