"""Extend by FlashInfer's chunked prefill: gather states, normalise, run, scatter."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from qwen35.adapters._kernels.rows import RowOperations
from qwen35.adapters.flashinfer.mends import fit
from qwen35.adapters.flashinfer.prefill_layout import ExtendLayout, Pieces
from qwen35.adapters.flashinfer.release import FlashInferKernels
from qwen35.adapters.flashinfer.steps import backend_of, required
from qwen35.adapters.flashinfer.workspaces import PrefillWorkspaces
from qwen35.ports.gdn_calls import CheckpointPlan, ExtendCall, ExtendResult
from qwen35.services.scratch import Scratch

FLOAT = torch.float32


class Prefill:
    """Runs one extend call. Normalisation is ours and the kernel's flag is passed as False: 0.6.18 ignores the
    flag, 0.7 honours it, and a vector of norm one stays itself either way.

    States pass through float32 scratch in sequence order: on Hopper the kernel has no pool form, it leaves the
    final state of an empty sequence unwritten, and it knows nothing of slot -1. Initial and final states are two
    buffers, since the split kernel may write one sequence's end before another block has read its start.

    The last block of a sequence is loaded whole and multiplied by zeros past its end, so NaN in the tokens that
    follow would reach it: tokens of padded sequences are copied as zeros.

    Scratch is each stream's own; the kernel's workspaces are the process's, and ``workspaces`` says whose turn it is.
    Of the latest layout on one stream the pieces of scratch are kept as they were cut.
    """

    def __init__(
        self, kernels: FlashInferKernels, rows: RowOperations, scratch: Scratch, workspaces: PrefillWorkspaces
    ) -> None:
        self._kernels, self._rows, self._scratch, self._workspaces = kernels, rows, scratch, workspaces
        self._latest: tuple[ExtendLayout, Pieces] | None = None

    def run(self, call: ExtendCall, layout: ExtendLayout) -> ExtendResult:
        """Mutates the written slots and ``call.out``. ``layout``: that of the call, under the present plan."""
        out = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device) if call.out is None else call.out
        if not call.v.shape[0] or not call.slots.shape[0]:
            return ExtendResult(out=out, checkpoints=_empty_checkpoints(call))
        plan, pieces = layout.plan, self._pieces(layout)
        dense = out if fit(out) else self._cut("extend.out", tuple(out.shape), out.dtype, plan.max_tokens, call)
        v = self._inputs(call, layout, pieces)
        self._rows.gather_states(call.states, call.slots, call.fresh, pieces.initial)
        checkpoints, planned = _checkpoints(call)
        launch = partial(
            required("prefill", self._kernels.prefill),
            q=pieces.q, k=pieces.k, v=v, g=pieces.decay, beta=pieces.beta, cu_seqlens=pieces.offsets,
            scale=call.q.shape[-1] ** -0.5 if call.scale is None else call.scale, initial_state=pieces.initial,
            output_final_state=True, use_qk_l2norm_in_kernel=False, output=dense, output_state=pieces.final,
            state_checkpoints=checkpoints, checkpoint_cu_starts=None if planned is None else planned.starts,
            checkpoint_every_n_tokens=0 if planned is None else planned.every, use_cp=layout.split,
            **backend_of(self._kernels, "prefill"),
        )  # fmt: skip
        self._workspaces.run(call.states.device, self._kernels.workspaces, launch)
        self._rows.scatter_states(pieces.final, call.states, call.slots, call.write_slots, call.cu_seqlens)
        if plan.may_pad:
            self._rows.zero_ranges(dense, call.cu_seqlens, call.slots)
            if checkpoints is not None and planned is not None:
                self._rows.zero_ranges(checkpoints, planned.starts, call.slots)
        if dense is not out:
            out.copy_(dense)
        return ExtendResult(out=out, checkpoints=_in_pool_dtype(call, checkpoints))

    def close(self) -> None:
        """Forget scratch."""
        self._latest = None

    def _pieces(self, layout: ExtendLayout) -> Pieces:
        room = self._scratch.take("extend", (layout.size,), torch.uint8, layout.plan.device)
        latest = self._latest
        if latest is not None and latest[0] is layout and latest[1].address == room.data_ptr():
            return latest[1]
        pieces = layout.cut(room)
        self._latest = layout, pieces
        return pieces

    def _inputs(self, call: ExtendCall, layout: ExtendLayout, pieces: Pieces) -> Tensor:
        """Fill dense, normalised tokens, linear decay and beta in float32, 64-bit offsets; returns v as it is run."""
        v = call.v if pieces.v is None else pieces.v
        if not fit(v):
            v = self._cut("extend.v", tuple(v.shape), v.dtype, layout.plan.max_tokens, call)
        self._rows.prefill_inputs(
            call.q, call.k, call.gates, call.cu_seqlens, q_out=pieces.q, k_out=pieces.k, decay=pieces.decay,
            beta=pieces.beta, cu_out=pieces.offsets, v=None if v is call.v else call.v,
            v_out=None if v is call.v else v, linear=True, slots=None if pieces.v is None else call.slots,
        )  # fmt: skip
        return v

    def _cut(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int, call: ExtendCall) -> Tensor:
        most = (max(rows, shape[0]), *shape[1:])
        return self._scratch.take(name, shape, dtype, call.states.device, most)


def _empty_checkpoints(call: ExtendCall) -> Tensor | None:
    if call.checkpoints is None:
        return None
    return call.states.new_empty(call.checkpoints.count, *call.states.shape[1:])


def _checkpoints(call: ExtendCall) -> tuple[Tensor | None, CheckpointPlan | None]:
    """The kernel's float32 buffer with the plan, or neither where no sequence reaches a checkpoint."""
    planned = call.checkpoints
    if planned is None or not planned.count:
        return None, None
    shape = (planned.count, *call.states.shape[1:])
    return torch.empty(shape, dtype=FLOAT, device=call.states.device), planned


def _in_pool_dtype(call: ExtendCall, checkpoints: Tensor | None) -> Tensor | None:
    return _empty_checkpoints(call) if checkpoints is None else checkpoints.to(call.states.dtype)
