"""Decode: gates, L2 norm, recurrence, pool read and write in one launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qwen35.adapters._kernels.launches import LOW_BITS, KeptLaunch, programs_for
from qwen35.adapters.triton.kernels.gdn_common import delta_step, load_gates, load_pieces, rounded, store_pieces
from qwen35.adapters.triton.kernels.gdn_config import DecodeConfig
from qwen35.adapters.triton.kernels.gdn_launch import dependent_launch, gate_arguments, scale_of
from qwen35.domain.alignment import power_of_two
from qwen35.ports.gated_delta_rule import DecodeCall
from qwen35.services.devices import current_stream

_SCALARS = ["gate", "beta", "A_log", "dt_bias", "slots", "write_slots"]


@triton.jit(do_not_specialize=["gate_row", "beta_row"], do_not_specialize_on_alignment=_SCALARS)
def decode_kernel(
    q, k, v, gate, beta, A_log, dt_bias, states, slots, write_slots, out,
    q_row, q_head, k_row, k_head, v_row, v_head, gate_row, beta_row, out_row, out_head, slot_stride, scale,
    HV: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PIECES: tl.constexpr,
    INNER: tl.constexpr, BLOCK_V: tl.constexpr, RAW: tl.constexpr, STREAM: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V rows of the state of one value head of one batch row.

    The rows are read in PIECES of INNER columns, so that fewer lanes share a row and more of the sum over K stays
    inside a thread.

    Nothing but the slot may be waited for before the state's loads are on their way. A warp has six scoreboards to wait
    by; where ptxas lets a gate's load share one with the slot's, the state is asked for later, which costs 2 percent
    at 256 rows (benchmarks/results/decode_variants.json: o, so and uf against all others). Tokens and gates are
    masked by the slot, and stand behind the state, for that order; tests/triton/test_decode_waits.py reads it in what
    ptxas made.

    With WAIT the launch may begin before the kernel ahead of it has ended, and waits for that here: nothing is read or
    written before.
    """
    if WAIT:
        tl.extra.cuda.gdc_wait()
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = pid // BLOCKS % HV
    row = (pid // (BLOCKS * HV)).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    live = slot >= 0

    columns = tl.arange(0, INNER)
    rows = pid % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = (rows < V) & live
    at = states + slot * slot_stride + head * (V * K) + rows[:, None] * K + columns[None, :]
    state = load_pieces(at, columns[None, :], in_v[:, None], K, INNER, PIECES, STREAM)
    q_raw = load_pieces(q + row * q_row + head // RATIO * q_head + columns, columns, live, K, INNER, PIECES, False)
    k_raw = load_pieces(k + row * k_row + head // RATIO * k_head + columns, columns, live, K, INNER, PIECES, False)
    v_raw = tl.load(v + row * v_row + head * v_head + rows, mask=in_v, other=0.0).to(tl.float32)
    g, b = load_gates(gate, beta, A_log, dt_bias, row * gate_row + head, row * beta_row + head, head, live, RAW)
    alpha = tl.exp(g)

    state, o = delta_step(state, q_raw, k_raw, v_raw, scale, alpha, b, PIECES)
    o = tl.where(live, o, 0.0)
    tl.store(out + row * out_row + head * out_head + rows, rounded(o, out.dtype.element_ty), mask=rows < V)
    written = in_v
    if write_slots is not None:
        target = tl.load(write_slots + row).to(tl.int64)
        at = states + target * slot_stride + head * (V * K) + rows[:, None] * K + columns[None, :]
        written = in_v & (target >= 0)
    store_pieces(at, state, columns[None, :], written[:, None], K, INNER, PIECES, STREAM)


class DecodeLaunch:
    """What launches of calls that look like ``call``, which has at least one row, have in common. ``out_strides``: of
    rows and heads of their outputs.

    The kernel that Triton found for addresses that are multiples of 16 bytes is kept, and launched for such addresses.
    """

    __slots__ = ("_device", "_launch", "_raw")

    def __init__(self, call: DecodeCall, config: DecodeConfig, out_strides: tuple[int, int]) -> None:
        batch, heads, value_width = call.v.shape
        key_heads, key_width = call.q.shape[1:]
        gate, beta, _, _, self._raw = gate_arguments(call.gates)
        self._device = call.v.device
        scalars = (
            *call.q.stride()[:2], *call.k.stride()[:2], *call.v.stride()[:2], gate.stride(0), beta.stride(0),
            *out_strides, call.states.stride(0), scale_of(call.scale, key_width),
        )  # fmt: skip
        wait = dependent_launch()
        #: HV, RATIO, K, V, PIECES, INNER, BLOCK_V, RAW, STREAM, WAIT
        constants = (
            heads, heads // key_heads, key_width, value_width, power_of_two(key_width) // config.inner, config.inner,
            config.block_v, self._raw, config.stream, wait,
        )  # fmt: skip
        grid = batch * heads * programs_for(value_width, config.block_v), 1, 1
        self._launch = KeptLaunch(
            decode_kernel, grid, (*scalars, *constants), num_warps=config.num_warps, num_stages=1, launch_pdl=wait
        )

    def __call__(self, call: DecodeCall, out: Tensor) -> None:
        """Launch ``call``; writes ``out`` [B, HV, V] and the pool."""
        gates: Any = call.gates
        gate, beta, A_log, dt_bias = (
            (gates.a, gates.b, gates.A_log, gates.dt_bias) if self._raw else (gates.g, gates.beta, None, None)
        )
        q, k, v, states, slots, write_slots = call.q, call.k, call.v, call.states, call.slots, call.write_slots
        at_q, at_k, at_v, at_states, at_out = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), states.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        aligned, launch = not (at_q | at_k | at_v | at_states | at_out) & LOW_BITS, self._launch
        if aligned and launch.kept:
            launch.again(
                current_stream(self._device), at_q, at_k, at_v, gate.data_ptr(), beta.data_ptr(),
                None if A_log is None else A_log.data_ptr(), None if dt_bias is None else dt_bias.data_ptr(),
                at_states, slots.data_ptr(), None if write_slots is None else write_slots.data_ptr(), at_out,
            )  # fmt: skip
        else:
            launch.first(aligned, q, k, v, gate, beta, A_log, dt_bias, states, slots, write_slots, out)


def launch_decode(call: DecodeCall, out: Tensor, config: DecodeConfig) -> None:
    """Launch ``call``, which has at least one row; writes ``out`` [B, HV, V] and the pool."""
    DecodeLaunch(call, config, (out.stride(0), out.stride(1)))(call, out)
