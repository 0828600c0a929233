"""Where a block's output meets the next norm: the sum over ranks, the residual and the norm, fused or one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from qwen35.domain.array import Array
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import HandoffError
from qwen35.domain.finalize import FinalizeHandoff, PendingAllReduce, finish_mlp_output
from qwen35.domain.finalize_policy import (
    Decision,
    ForwardMode,
    LayerPlan,
    Situation,
    decide_all_reduce,
    decide_finalize,
    plan_layer,
)
from qwen35.domain.finalize_signature import TOKEN_DTYPES, TokenBounds, WorkspaceSignature
from qwen35.model.batch import Batch
from qwen35.model.config import DENSE, MOE, TextConfig
from qwen35.model.norm import RMSNorm, add_and_norm
from qwen35.model.parallel import TensorParallel
from qwen35.services.finalize_fusion import FinalizeService
from qwen35.services.finalize_log import DecisionLog

#: What a layer may leave for the next norm: the whole output, this rank's share of it, or a handoff.
Unfinished = Tensor | PendingAllReduce | FinalizeHandoff

#: Tokens of the largest fused step, whatever the bounds say: a workspace's memory may grow with them.
MAX_FUSED_TOKENS = 8192

_MODES = {Phase.DECODE: ForwardMode.DECODE, Phase.EXTEND: ForwardMode.EXTEND}


class Step:
    """What the policy says of one forward pass: of a mixture's end, and of any other sum over ranks."""

    def __init__(self, situation: Situation, against: Iterable[str] = ()) -> None:
        """``against``: why the workspace itself would not serve this pass."""
        self._against = tuple(against)
        self.finalize = self._with(decide_finalize(situation))
        self._finalize_dense = self._with(decide_finalize(replace(situation, sparse_moe=False)))
        self.all_reduce = self._with(decide_all_reduce(situation))

    def _with(self, decision: Decision) -> Decision:
        reasons = tuple(dict.fromkeys((*decision.reasons, *self._against)))
        return Decision(not reasons, reasons)

    def plan(self, *, sparse: bool, last: bool) -> LayerPlan:
        """What a layer does with the output of its MLP, ``sparse`` where that is a mixture."""
        finalize = self.finalize if sparse else self._finalize_dense
        return plan_layer(finalize, generic_fuse=self.all_reduce.eligible, last=last)


class Boundaries:
    """All boundaries of one model. Without a service, or before ``prepare``, nothing is fused.

    ``latest`` is the step that ran last, None before the first. ``prepare`` logs what the policy says, and an extend
    what is new; a decode step never does.
    """

    def __init__(self, config: TextConfig, parallel: TensorParallel, service: FinalizeService | None) -> None:
        self._config, self._parallel, self._service = config, parallel, service
        self._gammas: dict[RMSNorm, Tensor] = {}
        self._log = DecisionLog()
        self.latest: Step | None = None

    def prepare(
        self, norms: Iterable[RMSNorm], dtype: torch.dtype, device: torch.device, bounds: TokenBounds
    ) -> None:  # fmt: skip
        """Have a workspace where this model can use one; every rank calls this together.

        It is made for as many tokens as ``bounds`` say, ``MAX_FUSED_TOKENS`` at most. It never grows: where one lives
        in this process already, that one serves, and a step of more tokens is not fused. ``norms`` are those that may
        meet an unfinished output. Copies of their weights are kept in ``dtype``, as the kernels read them, until the
        next ``prepare``. Raises ``ConfigurationError`` for bounds of which none is positive, and what
        ``FinalizeService.prepare`` raises.
        """
        self._prepare(norms, dtype, device, bounds)
        self._note(self._decide(ForwardMode.DECODE, 1))

    def _prepare(
        self, norms: Iterable[RMSNorm], dtype: torch.dtype, device: torch.device, bounds: TokenBounds
    ) -> None:  # fmt: skip
        service, moe, name = self._service, self._config.moe, str(dtype).removeprefix("torch.")
        if service is None or moe is None or not self._parallel.divided or name not in TOKEN_DTYPES:
            return
        # The weight alone is exact in bfloat16 where the checkpoint is; weight plus one would be rounded.
        self._gammas = {norm: torch.empty_like(norm.weight, dtype=dtype).copy_(norm.weight) for norm in norms}
        most = min(bounds.resolve_max_m(), MAX_FUSED_TOKENS)
        max_m = min(most, service.standing_max_m or most)
        service.prepare(
            WorkspaceSignature(
                group=self._parallel.group, tp_size=self._parallel.size, rank=self._parallel.rank,
                hidden=self._config.hidden, top_k=moe.top_k, max_m=max_m, dtype=name, eps=self._config.eps,
                weight_bias=1.0, shared_expert=True, device=str(device), speculative=False,
            )
        )  # fmt: skip

    def step(self, batch: Batch) -> Step:
        """The policy's word on a pass over ``batch``."""
        self.latest = step = self._decide(_MODES[batch.phase], batch.tokens)
        if batch.phase is not Phase.DECODE:
            self._note(step)
        return step

    def _decide(self, mode: ForwardMode, m: int) -> Step:
        service = self._service
        support = () if service is None else service.supports(m).reasons
        situation = Situation(
            forward_mode=mode, m=m, max_m=m if service is None else service.max_m or m,
            tp_size=self._parallel.size, enabled=service is not None and service.enabled,
            prepared=service is not None and service.is_prepared and bool(self._gammas),
            model_type=DENSE if self._config.moe is None else MOE,
        )  # fmt: skip
        return Step(situation, support)

    def _note(self, step: Step) -> None:
        self._log.note("finalize", step.finalize)
        self._log.note("all-reduce", step.all_reduce)

    def after_mixer(self, share: Tensor, step: Step) -> Unfinished:
        """What goes from a token mixer, of whose output ``share`` [T, hidden] is this rank's, to the next norm."""
        return PendingAllReduce(share) if step.all_reduce.eligible else self._parallel.all_reduce(share)

    def after_mlp(self, output: Tensor | FinalizeHandoff, plan: LayerPlan) -> Unfinished:
        """What goes from an MLP to the next norm. Raises ``HandoffError`` where ``plan`` announced the other kind."""
        pending = plan.fuse and not plan.defer
        finished = finish_mlp_output(output, deferred=plan.defer, pending=pending)
        return self._parallel.all_reduce(finished) if isinstance(finished, Tensor) else finished

    def add_and_norm(self, output: Unfinished, residual: Tensor, norm: RMSNorm, step: Step) -> tuple[Tensor, Tensor]:
        """(normed, new residual), both [T, hidden], of a block's ``output`` and the residual before it."""
        if isinstance(output, Tensor):
            return add_and_norm(output, residual, norm)
        if self._service is None:
            raise HandoffError("an unfinished output came to a model without a finalize service")
        gamma = self._gammas.get(norm)
        if isinstance(output, FinalizeHandoff):
            result = self._service.consume(output, residual, gamma, step.finalize)
        else:
            if gamma is None:
                raise HandoffError("a pending sum over ranks came to a norm that was not prepared for it")
            result = self._service.all_reduce(_tensor(output.local), residual, gamma)
        return result.norm, result.residual


def _tensor(array: Array) -> Tensor:
    assert isinstance(array, Tensor)
    return array
