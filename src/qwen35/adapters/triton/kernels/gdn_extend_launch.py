"""Launches of the two kernels of extend."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from qwen35.adapters._kernels.launches import LOW_BITS, KeptLaunch, programs_for
from qwen35.adapters.triton.kernels.gdn_config import CHUNK, ExtendConfig
from qwen35.adapters.triton.kernels.gdn_extend import chunk_kernel, scan_kernel
from qwen35.adapters.triton.kernels.gdn_launch import gate_arguments, scale_of
from qwen35.adapters.triton.kernels.gdn_scratch import ExtendScratch, cut, scratch_bytes
from qwen35.domain.alignment import power_of_two
from qwen35.ports.gated_delta_rule import ExtendCall

_TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
#: Offsets that one program of the first kernel looks at together, while it seeks its chunk.
_OFFSETS = 128


class ExtendLaunch:
    """What launches of calls that look like ``call``, which has tokens, have in common: a model's layers make the same
    one in turn. ``dot``: the dtype of matrix products; ``out_strides``: of tokens and heads of their outputs.

    The kernels that Triton found for addresses that are multiples of 16 bytes are kept, and launched for such ones.
    """

    __slots__ = ("_chunks", "_device", "_dot", "_heads", "_scan", "_tokens", "scratch_bytes")

    def __init__(
        self, call: ExtendCall, config: ExtendConfig, dot: torch.dtype, out_strides: tuple[int, int]
    ) -> None:
        self._tokens, self._heads, value_width = call.v.shape
        key_heads, key_width = call.q.shape[1:]
        self._device, self._dot = call.v.device, dot
        #: Bytes of scratch that a call takes.
        self.scratch_bytes = scratch_bytes(self._heads, self._tokens, dot)
        gate, beta, _, _, raw = gate_arguments(call.gates)
        sequences, plan = call.slots.shape[0], call.checkpoints
        tokens_at = (*call.q.stride()[:2], *call.k.stride()[:2])
        ratio, block_k = self._heads // key_heads, max(power_of_two(key_width), 16)
        # Below the rounding of bfloat16 one TF32 product is enough for the inverse, the only float32 product then.
        products = _TRITON_DTYPE[dot], "tf32x3" if dot is torch.float32 else "tf32"
        registers = {} if config.chunk_registers is None else {"maxnreg": config.chunk_registers}
        self._chunks = KeptLaunch(
            chunk_kernel, ((self._tokens // CHUNK + sequences) * self._heads, 1, 1),
            (
                scale_of(call.scale, key_width), sequences, self._tokens, *tokens_at, gate.stride(0), beta.stride(0),
                self._heads, ratio, key_width, block_k, raw, *products, _OFFSETS,
            ),
            num_warps=config.chunk_warps, num_stages=1, **registers,
        )  # fmt: skip
        self._scan = KeptLaunch(
            scan_kernel, (sequences * self._heads * programs_for(value_width, config.block_v), 1, 1),
            (
                self._tokens, CHUNK if plan is None else plan.every, *tokens_at, *call.v.stride()[:2], *out_strides,
                call.states.stride(0), self._heads, ratio, key_width, value_width, block_k, config.block_v, *products,
                config.scan_stages,
            ),
            num_warps=config.scan_warps, num_stages=config.scan_stages,
        )  # fmt: skip

    def __call__(self, call: ExtendCall, out: Tensor, checkpoints: Tensor | None, room: Tensor) -> None:
        """Launch both kernels; writes ``out`` [T, HV, V], ``checkpoints``, the pool, and ``room``, which has
        ``scratch_bytes`` bytes and starts at a multiple of 256."""
        scratch = cut(room, self._heads, self._tokens, self._dot)
        self.chunks(call, scratch)
        self.scan(call, out, checkpoints, scratch)

    def chunks(self, call: ExtendCall, scratch: ExtendScratch) -> None:
        """Launch the first kernel; writes ``scratch``."""
        gate, beta, A_log, dt_bias, _ = gate_arguments(call.gates)
        self._chunks.launch(
            self._device, not (call.q.data_ptr() | call.k.data_ptr()) & LOW_BITS,
            call.q, call.k, gate, beta, A_log, dt_bias, call.slots, call.cu_seqlens, scratch.inverse, scratch.attention,
            scratch.factors,
        )  # fmt: skip

    def scan(self, call: ExtendCall, out: Tensor, checkpoints: Tensor | None, scratch: ExtendScratch) -> None:
        """Launch the second kernel, once the first has written ``scratch``; writes the rest."""
        plan = call.checkpoints
        addresses = (
            call.q.data_ptr() | call.k.data_ptr() | call.v.data_ptr() | call.states.data_ptr() | out.data_ptr()
            | (0 if checkpoints is None else checkpoints.data_ptr())
        )  # fmt: skip
        self._scan.launch(
            self._device, not addresses & LOW_BITS,
            call.q, call.k, call.v, call.states, call.slots, call.write_slots, call.fresh, call.cu_seqlens,
            scratch.inverse, scratch.attention, scratch.factors, None if plan is None else plan.starts, checkpoints,
            out,
        )  # fmt: skip
