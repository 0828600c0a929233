"""Operations on rows that mend what a vendor's kernel does with padding, slots and nodes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from qwen35.ports.gdn_calls import CommitCall, Gates


class IndexLaunch(Protocol):
    """``RowOperations.index`` for tensors that differ from those of the first call in nothing but addresses."""

    def __call__(
        self, slots: Tensor, write_slots: Tensor | None, read: Tensor, write: Tensor, a: Tensor | None,
        dt_bias: Tensor | None, clamped: Tensor | None, stream: int,
    ) -> None:  # fmt: skip
        """``a`` and ``clamped`` may lack the dimension of tokens. ``stream``: the current one of the tensors' device,
        by ``services.devices.current_stream``."""


class ZeroLaunch(Protocol):
    """``RowOperations.zero_rows`` for tensors that differ from those of the first call in nothing but addresses."""

    def __call__(self, out: Tensor, slots: Tensor, stream: int) -> None:
        """``out`` may lack the dimension of tokens. ``stream``: as for ``IndexLaunch``."""


class RowOperations(Protocol):
    """Each is one launch, legal inside CUDA graph capture, and waits for nothing.

    B rows or sequences, slot -1 is padding. Index tensors are int32 or int64.
    """

    def index(
        self, slots: Tensor, write_slots: Tensor | None, read: Tensor, write: Tensor, *, read_padding: int,
        write_padding: int, a: Tensor | None = None, dt_bias: Tensor | None = None, clamped: Tensor | None = None,
        limit: float = 0.0,
    ) -> None:  # fmt: skip
        """Fill ``read`` and ``write`` [B]: the slots, with ``read_padding`` for slot -1 and ``write_padding`` where
        either the slot or the write slot is -1. With ``clamped`` (dense, a's shape [B, T, HV]) also fill that with
        ``min(a, limit - dt_bias)``."""

    def kept_index(self, *, read_padding: int, write_padding: int, limit: float) -> IndexLaunch:
        """``index`` for calls of one layout: what the first finds out costs those after it no time."""

    def zero_rows(self, out: Tensor, slots: Tensor) -> None:
        """Zero ``out[i]`` ([B, T, HV, V], last dimension contiguous) where ``slots[i]`` is -1."""

    def kept_zero_rows(self) -> ZeroLaunch:
        """``zero_rows`` for calls of one layout: what the first finds out costs those after it no time."""

    def zero_ranges(self, rows: Tensor, offsets: Tensor, slots: Tensor) -> None:
        """Zero rows ``offsets[i]`` to ``offsets[i + 1] - 1`` of the dense ``rows`` where ``slots[i]`` is -1."""

    def gather_states(self, states: Tensor, slots: Tensor, fresh: Tensor | None, out: Tensor) -> None:
        """``out[i] = states[slots[i]]`` (out dense [S, HV, V, K]), zero where padded or fresh."""

    def scatter_states(
        self, source: Tensor, states: Tensor, slots: Tensor, write_slots: Tensor | None, cu_seqlens: Tensor
    ) -> None:
        """``states[write_slots[i]] = source[i]`` (source dense), but for padding, write slot -1 and zero length."""

    def scatter_nodes(self, source: Tensor, intermediates: Tensor, slots: Tensor, rows: Tensor | None) -> None:
        """``intermediates[rows[i], t] = source[i, t]`` (source dense [B, T, HV, V, K]) but for padding."""

    def commit(self, call: CommitCall) -> None:
        """``states[slots[i]] = intermediates[rows[i], last[i]]`` where neither slot nor node is -1."""

    def prefill_inputs(
        self, q: Tensor, k: Tensor, gates: Gates, cu_seqlens: Tensor, *, q_out: Tensor, k_out: Tensor, decay: Tensor,
        beta: Tensor, cu_out: Tensor, v: Tensor | None = None, v_out: Tensor | None = None, linear: bool = True,
        slots: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Fill dense copies: q and k L2-normalised (eps 1e-6) in float32 and rounded once, ``decay`` [T, HV] float32
        (exp of the log decay where ``linear``), ``beta`` [T, HV] float32, ``cu_seqlens``, and v where given. Tokens
        of sequences whose entry of ``slots`` is -1 are read as zero, with log decay 0 and beta 0."""


def triton_rows() -> RowOperations:
    """The operations as Triton kernels; imports Triton."""
    from qwen35.adapters._kernels.row_kernels import TritonRows

    return TritonRows()
