"""Extend by SGLang's chunked prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.adapters._kernels.rows import RowOperations
from qwen35.adapters.sglang.driven_kernels import SGLangKernels
from qwen35.adapters.sglang.layouts import offsets_without_empty
from qwen35.ports.gdn_calls import ExtendCall, GdnPlan
from qwen35.services.scratch import Scratch

FLOAT = torch.float32


class ChunkedPrefill:
    """Runs one extend call; reads the lengths on the host where the caller does not know them.

    Empty sequences are left out: the kernel's chunk indices count sequences by their first chunks. States are
    updated in the pool where it is dense and nothing is fresh or redirected; otherwise they pass through scratch,
    since a pool with padded slots is silently copied by the kernel's input guard and its update lost.
    """

    def __init__(self, kernels: SGLangKernels, rows: RowOperations, scratch: Scratch) -> None:
        self._kernels, self._rows, self._scratch = kernels, rows, scratch

    def run(self, call: ExtendCall, plan: GdnPlan, out: Tensor) -> None:
        """Mutates the written slots and ``out``."""
        lengths = call.seq_lens_host or tuple(call.cu_seqlens.diff().tolist())
        if not sum(lengths):
            return
        offsets = offsets_without_empty(lengths, call.cu_seqlens)
        slots = _with_tokens(call.slots, lengths)
        q, k, decay, beta = self._inputs(call, plan, offsets)
        direct = call.states.is_contiguous() and call.fresh is None and call.write_slots is None
        if direct:
            states, indices = call.states, slots
        else:
            shape = (call.slots.shape[0], *call.states.shape[1:])
            states = self._cut("extend.states", shape, FLOAT, plan.max_batch, call)
            self._rows.gather_states(call.states, call.slots, call.fresh, states)
            held = torch.arange(call.slots.shape[0], dtype=torch.int32, device=slots.device)
            indices = _with_tokens(held, lengths)
        made, _, _ = self._kernels.chunked(
            q=q[None], k=k[None], v=call.v[None], g=decay[None], beta=beta[None],
            scale=call.q.shape[-1] ** -0.5 if call.scale is None else call.scale, initial_state=states,
            initial_state_indices=indices, cu_seqlens=offsets, use_qk_l2norm_in_kernel=False, inplace_update=True,
        )  # fmt: skip
        if not direct:
            self._rows.scatter_states(states, call.states, call.slots, call.write_slots, call.cu_seqlens)
        if plan.may_pad:
            self._rows.zero_ranges(made[0], offsets, slots)
        out.copy_(made[0])

    def _inputs(self, call: ExtendCall, plan: GdnPlan, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalised q and k, log decay and beta, both float32."""
        q = self._cut("extend.q", tuple(call.q.shape), call.q.dtype, plan.max_tokens, call)
        k = self._cut("extend.k", tuple(call.k.shape), call.k.dtype, plan.max_tokens, call)
        decay = self._cut("extend.decay", tuple(call.v.shape[:2]), FLOAT, plan.max_tokens, call)
        beta = self._cut("extend.beta", tuple(call.v.shape[:2]), FLOAT, plan.max_tokens, call)
        held = self._cut("extend.offsets", tuple(offsets.shape), torch.int64, plan.max_batch + 1, call)
        self._rows.prefill_inputs(
            call.q, call.k, call.gates, offsets, q_out=q, k_out=k, decay=decay, beta=beta, cu_out=held, linear=False,
        )  # fmt: skip
        return q, k, decay, beta

    def _cut(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int, call: ExtendCall) -> Tensor:
        most = (max(rows, shape[0]), *shape[1:])
        return self._scratch.take(name, shape, dtype, call.states.device, most)


def _with_tokens(values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Entries of the sequences that have tokens."""
    if all(lengths):
        return values
    kept = [i for i, length in enumerate(lengths) if length]
    return values[torch.tensor(kept, dtype=torch.int64, device=values.device)]
