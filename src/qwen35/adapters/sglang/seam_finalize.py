"""The finalize part of the seam (Blackwell): SGLang's CuTe DSL fusion is handed our workspace instead of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qwen35.adapters.sglang.seam import Hook
from qwen35.adapters.sglang.seam_fusion_facts import prepare, workspace_signature
from qwen35.adapters.sglang.seam_ranks import RankSettings
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.ports.finalize_fusion import NormAndResidual
from qwen35.services.finalize_fusion import FinalizeService


class HandedWorkspace:
    """What SGLang's fusion service and its layers call, by SGLang's names; everything is done by our service.

    All tensors bfloat16 but ``permuted_indices``, int32; matrices [m, D] contiguous. ``gamma`` [D] is the multiplier as
    applied. Both calls return (norm, new residual), in the outputs that were given or in new ones.
    """

    def __init__(self, service: FinalizeService) -> None:
        self._service = service

    @property
    def max_m(self) -> int:
        """The most tokens of a call."""
        return self._service.max_m

    def supports(self, m: int) -> bool:
        """Whether calls of ``m`` tokens are served."""
        return bool(self._service.supports(int(m)))

    def moe_finalize_all_reduce_rms_norm(
        self, *, routed_output: Tensor, expert_weights: Tensor, permuted_indices: Tensor,
        gated_shared_output: Tensor | None, residual: Tensor, gamma: Tensor, norm_output: Tensor | None = None,
        residual_output: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``routed_output`` [R, D], ``expert_weights`` and ``permuted_indices`` [m, top_k]; see ``FinalizeHandoff``."""
        handoff = FinalizeHandoff(
            routed_output=routed_output, expert_weights=expert_weights, permuted_indices=permuted_indices,
            gated_shared_output=gated_shared_output, m=int(permuted_indices.shape[0]),
        )  # fmt: skip
        out = _outputs(residual, norm_output, residual_output)
        result = self._service.finalize(handoff, residual, gamma, out=out)
        return result.norm, result.residual

    def all_reduce_residual_rms_norm(
        self, *, local_contribution: Tensor, residual: Tensor, gamma: Tensor, norm_output: Tensor | None = None,
        residual_output: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same without the experts' sum; ``local_contribution`` [m, D]."""
        out = _outputs(residual, norm_output, residual_output)
        result = self._service.all_reduce(local_contribution, residual, gamma, out=out)
        return result.norm, result.residual

    def destroy(self) -> None:
        """Destroy the workspace. Idempotent."""
        self._service.close()


class FinalizeSeam:
    """Answers SGLang's request for its workspace, by the adapter ``requested``. ``gpu``: this process's GPU.

    ``service`` is None where SGLang makes its own, once the ranks agree that all of them do.
    """

    def __init__(self, requested: str | None, service: FinalizeService | None, gpu: int, ranks: RankSettings) -> None:
        self._requested, self._service, self._gpu, self._ranks = requested, service, gpu, ranks
        self._handed: HandedWorkspace | None = None

    def hooks(self) -> dict[str, Hook]:
        """What to hook, by key of the release's targets."""
        return {"finalize_workspace": self._around_workspace}

    def _around_workspace(self, original: Callable[..., Any], **wanted: Any) -> Any:
        """Make our workspace, or look it up where nothing is ``wanted`` (0.5.20); every rank calls this together.

        Raises ``ConfigurationError`` for multiplexed streams and for ranks that were told different things, and
        ``UnavailableError`` where the ranks cannot have it or the one live workspace does not cover what is asked.
        """
        service = self._service
        if not any(value is not None for value in wanted.values()):
            return self._handed if self._handed is not None else original(**wanted)
        self._ranks.agree()
        if service is None:
            return original(**wanted)
        signature = workspace_signature(
            device="cuda" if torch.cuda.is_available() else "cpu", gpu=self._gpu, hidden=wanted["hidden_size"],
            top_k=wanted["top_k"], max_m=wanted["max_m"], dtype="bfloat16", eps=wanted["rms_epsilon"],
            weight_bias=wanted["weight_bias"], shared_expert=wanted.get("include_shared_expert", True),
        )  # fmt: skip
        prepare(service, signature, str(self._requested))
        self._handed = HandedWorkspace(service)
        return self._handed


def _outputs(residual: Tensor, norm: Tensor | None, total: Tensor | None) -> NormAndResidual | None:
    if norm is None and total is None:
        return None
    return NormAndResidual(
        norm=torch.empty_like(residual) if norm is None else norm,
        residual=torch.empty_like(residual) if total is None else total,
    )
