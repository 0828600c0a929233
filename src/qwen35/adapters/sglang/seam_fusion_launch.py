"""One launch whose norms our service fuses: the policy on each step, the calls, and what SGLang leaves undone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen35.adapters.sglang.seam_fusion_facts import Engine
from qwen35.domain.finalize_policy import Decision, ForwardMode, Situation, decide_all_reduce
from qwen35.ports.finalize_checks import MATRIX_ALIGNMENT
from qwen35.services.finalize_fusion import FinalizeService


@dataclass(frozen=True, slots=True)
class Step:
    """What ModelRunner.forward runs."""

    mode: ForwardMode
    draft: bool


#: Outside ModelRunner.forward only warm-up and captures run a model, and the modes that are captured all fuse.
CAPTURED = Step(ForwardMode.DECODE, draft=False)


class FusedLaunch:
    """``situation`` is what never changes of ``engine``; ``service`` is prepared."""

    def __init__(self, engine: Engine, situation: Situation, service: FinalizeService) -> None:
        self._engine, self._situation, self._service = engine, situation, service
        self._decided: tuple[object, Decision] | None = None

    def decide(self, step: Step | None, m: int) -> Decision:
        """Whether a boundary of ``m`` tokens is fused. Remembered: a step has a hundred alike."""
        mode, draft = (step or CAPTURED).mode, (step or CAPTURED).draft or self._engine.drafting()
        scattered = self._engine.input_scattered()
        key = (mode, draft, scattered, m)
        if self._decided is None or self._decided[0] != key:
            now = replace(self._situation, forward_mode=mode, draft_model=draft, input_scattered=scattered, m=m)
            self._decided = (key, decide_all_reduce(now))
        return self._decided[1]

    def serve(
        self, step: Step | None, local: Tensor, residual: Tensor, weight: Tensor, eps: float, attention_group: bool
    ) -> tuple[Tensor, Tensor]:
        """(norm, new residual), both new [m, D]. ``attention_group``: over which of SGLang's groups the sum runs.

        Raises ``UnsupportedError`` with every reason, a ``ContractError`` or ``CaptureError``, before anything is
        launched and alike on every rank; what the ranks make of it in checked mode see ``FinalizeService.all_reduce``.
        """
        against = self._against(step, local, eps, attention_group)
        result = self._service.all_reduce(_aligned(local), _aligned(residual), _aligned(weight), against=against)
        return result.norm, result.residual

    def complete(
        self, local: Tensor, residual: Tensor, weight: Tensor, eps: float, attention_group: bool
    ) -> tuple[Tensor, Tensor]:
        """What SGLang 0.5.20 leaves out where its fused function declines: the sum over ranks before the norm."""
        summed = self._engine.group(attention_group).all_reduce(local.contiguous())
        total = summed.float() + residual.float()
        norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float()
        return norm.to(local.dtype), total.to(residual.dtype)

    def _against(self, step: Step | None, local: Tensor, eps: float, attention_group: bool) -> tuple[str, ...]:
        """What the service cannot see: the step, and the group and eps that its workspace was made for."""
        if local.dim() != 2:
            return (f"input requires [m, D], got {local.dim()} dimensions",)
        reasons = list(self.decide(step, local.shape[0]).reasons)
        group, whole = self._engine.group_size(attention_group), self._situation.tp_size
        if group != whole:
            reasons.append(f"sum requires the tensor-parallel group of {whole} ranks, got one of {group}")
        if eps != self._engine.eps:
            reasons.append(f"eps requires {self._engine.eps}, got {eps}")
        return tuple(reasons)


def _aligned(tensor: Tensor) -> Tensor:
    """An address is one rank's own, so no rank may refuse by it alone: the others would wait."""
    return tensor if tensor.data_ptr() % MATRIX_ALIGNMENT == 0 or not tensor.is_contiguous() else tensor.clone()
