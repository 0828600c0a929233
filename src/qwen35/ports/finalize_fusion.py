"""The port of the fused finalize: the end of the MoE layer together with the next norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from qwen35.domain.capabilities import Support
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import FusionCapabilities
from qwen35.domain.finalize_signature import WorkspaceSignature

__all__ = [
    "FinalizeFusion", "FinalizeHandoff", "FusionCapabilities", "FusionWorkspace", "NormAndResidual",
    "WorkspaceSignature",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NormAndResidual:
    """``norm`` and ``residual`` [m, D] in the signature's dtype: results, or the caller's buffers for them."""

    norm: Tensor
    residual: Tensor


@runtime_checkable
class FusionWorkspace(Protocol):
    """Graph-stable memory shared by the ranks of one group, and the two calls that use it.

    Every rank makes the same calls in the same order; calls must not overlap. Both calls mutate the workspace
    and ``out`` only, raise a ``ContractError`` before anything is launched (``qwen35.ports.finalize_checks``),
    ``ClosedError`` after ``destroy``, synchronise nothing and are legal inside capture unless the adapter's
    capabilities deviate. Every rank ends with identical bits. ``out`` must not overlap any input.
    """

    @property
    def adapter(self) -> str:
        """The name of the adapter that made it."""

    @property
    def signature(self) -> WorkspaceSignature:
        """What it was made for; ``max_m`` may be larger than was asked."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """Device addresses of its memory; they never change."""

    def supports(self, m: int) -> Support:
        """Whether calls of ``m`` tokens are served; not after ``destroy``. Never raises."""

    def finalize(
        self, handoff: FinalizeHandoff, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        """``x = sum over ranks (sum_j w_j * routed[idx_j] + shared)``; ``residual' = residual + x``;
        ``norm = residual' * rsqrt(mean(residual'^2) + eps) * (gamma + weight_bias)``.

        ``residual`` [m, D] and ``gamma`` [D], both alike on every rank. ``out`` is filled and returned.
        """

    def all_reduce(
        self, local: Tensor, residual: Tensor, gamma: Tensor, out: NormAndResidual | None = None
    ) -> NormAndResidual:
        """The same with ``x = sum over ranks local``; ``local`` [m, D]."""

    def destroy(self) -> None:
        """Free the memory. Idempotent; afterwards ``supports`` is false for every m."""


@runtime_checkable
class FinalizeFusion(Protocol):
    """Makes workspaces."""

    @property
    def capabilities(self) -> FusionCapabilities: ...

    def supports(self, signature: WorkspaceSignature) -> Support:
        """Whether a workspace could be made, as far as this rank can see alone. Launches nothing."""

    def prepare(self, signature: WorkspaceSignature) -> FusionWorkspace:
        """Make a workspace; every rank of the group calls it, outside capture.

        Compiles and allocates everything that calls of 1..max_m tokens need. Raises ``UnsupportedError`` for what
        ``supports`` is against, ``CreationError`` alike on every rank where making it failed on one of them, and
        ``AgreementError`` where a rank is lost.
        """

    def close(self) -> None:
        """Free what the adapter itself holds; workspaces are destroyed by their owner. Idempotent."""
