"""What one MoE layer hands to the next norm, unfinished, and what its end must be: the finalize contract.

``x = sum over ranks (sum_j w_j * routed[idx_j] + shared)``, ``residual' = residual + x``,
``norm = residual' * rsqrt(mean(residual'^2) + eps) * (gamma + weight_bias)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from qwen35.domain.array import Array
from qwen35.domain.errors import HandoffError, LayoutError, ShapeError, ValueRangeError


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalizeHandoff:
    """The routed and shared expert outputs of ``m`` tokens before they are summed.

    ``routed_output`` [R, D], unweighted, R any number of rows; ``expert_weights`` [m, top_k];
    ``permuted_indices`` [m, top_k] int32, the row of ``routed_output`` for each choice, -1 where the expert is
    not here or was dropped (contributes zero, whatever its weight); ``gated_shared_output`` [m, D] or None.
    A row that no index names, or only indices of weight zero, is never part of the result, NaN included.
    """

    routed_output: Array
    expert_weights: Array
    permuted_indices: Array
    gated_shared_output: Array | None
    m: int

    @staticmethod
    def from_flashinfer(
        *, gemm2_out: Array, expert_weights: Array, permuted_indices: Array, gated_shared: Array | None,
        m: int, hidden: int, top_k: int,
    ) -> FinalizeHandoff:  # fmt: skip
        """The handoff over FlashInfer's deferred output, without a copy.

        ``gemm2_out`` holds rows of ``hidden``, ``expert_weights`` and ``permuted_indices`` rows of ``top_k``,
        both possibly more than ``m``: these two are cut to ``m`` rows, the routed output never is, since
        indices point anywhere in it. Raises ``ShapeError``, ``LayoutError`` or ``ValueRangeError``.
        """
        if m < 1:
            raise ValueRangeError(f"m must be at least 1, got {m}")
        routed = _rows("gemm2_out", gemm2_out, hidden, "hidden")
        weights = _rows("expert_weights", expert_weights, top_k, "top_k")
        indices = _rows("permuted_indices", permuted_indices, top_k, "top_k")
        for name, rows in (("expert_weights", weights), ("permuted_indices", indices)):
            if rows.shape[0] < m:
                raise ShapeError(f"{name} must have at least m = {m} rows of top_k = {top_k}, got {rows.shape[0]}")
        return FinalizeHandoff(
            routed_output=routed, expert_weights=weights[:m], permuted_indices=indices[:m],
            gated_shared_output=gated_shared, m=m,
        )  # fmt: skip

    def check(self, *, hidden: int, top_k: int, shared_expert: bool) -> None:
        """Raise ``ShapeError`` where a tensor does not fit the geometry; R is free."""
        self.check_routed(hidden=hidden, top_k=top_k)
        self.check_shared(hidden=hidden, shared_expert=shared_expert)

    def check_routed(self, *, hidden: int, top_k: int) -> None:
        """Routed output, weights and indices, in this order."""
        routed = tuple(self.routed_output.shape)
        if len(routed) != 2 or routed[1] != hidden:
            raise ShapeError(f"routed_output must be [R, D] with D = {hidden}, got {list(routed)}")
        _exactly("expert_weights", self.expert_weights, (self.m, top_k), "[m, top_k]")
        _exactly("permuted_indices", self.permuted_indices, (self.m, top_k), "[m, top_k]")

    def check_shared(self, *, hidden: int, shared_expert: bool) -> None:
        """The shared expert's output is there, with its shape, exactly where one is meant to be."""
        if shared_expert and self.gated_shared_output is None:
            raise ShapeError(f"gated_shared_output must be [m, D] = {[self.m, hidden]}, got None")
        if not shared_expert and self.gated_shared_output is not None:
            raise ShapeError("gated_shared_output must be None: the workspace was made without a shared expert")
        if self.gated_shared_output is not None:
            _exactly("gated_shared_output", self.gated_shared_output, (self.m, hidden), "[m, D]")


@dataclass(frozen=True, slots=True)
class PendingAllReduce:
    """One rank's share of an MLP output [M, D], which the next norm must sum over the ranks."""

    local: Array


def finish_mlp_output(output: Any, *, deferred: bool, pending: bool) -> Any:
    """What an MLP may return, given what its layer announced.

    ``deferred``: the layer announced a handoff, and gets it back untouched. ``pending``: the sum over ranks is
    left to the next norm, so the tensor comes back as ``PendingAllReduce``. Otherwise the very tensor.
    Raises ``HandoffError`` for a handoff that nobody announced, or for one that is missing.
    """
    came = isinstance(output, FinalizeHandoff)
    if deferred and not came:
        raise HandoffError(f"expected a FinalizeHandoff from the deferred MLP, got {type(output).__name__}")
    if came and not deferred:
        raise HandoffError("unexpected FinalizeHandoff from an MLP that was not deferred")
    return PendingAllReduce(output) if pending and not deferred else output


def _rows(name: str, buffer: Array, width: int, what: str) -> Any:
    """``buffer`` viewed as rows of ``width``."""
    expected = 1
    for size, stride in zip(reversed(tuple(buffer.shape)), reversed(buffer.stride()), strict=True):
        if size > 1 and stride != expected:
            raise LayoutError(f"{name} must be contiguous to be viewed without a copy, got strides {buffer.stride()}")
        expected *= size
    elements = prod(buffer.shape)
    if width < 1 or elements % width:
        raise ShapeError(f"{name} must hold whole rows of {what} = {width}, got {elements} elements")
    return buffer.view(elements // width, width)


def _exactly(name: str, array: Array, expected: tuple[int, ...], why: str) -> None:
    if tuple(array.shape) != expected:
        raise ShapeError(f"{name} must be {why} = {list(expected)}, got {list(array.shape)}")
