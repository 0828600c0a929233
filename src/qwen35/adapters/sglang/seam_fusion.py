"""The fusion part of the seam: our all-reduce + residual + norm where SGLang would run FlashInfer's, or none.

SGLang asks a gate, with the number of tokens, whether a boundary is fused, and then calls one function. The gate is
opened where our policy says yes; the function is served by our service, and what it refuses goes to SGLang's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qwen35.adapters.sglang.seam import Hook
from qwen35.adapters.sglang.seam_fusion_facts import Engine, forward_mode, prepare
from qwen35.adapters.sglang.seam_fusion_launch import FusedLaunch, Step
from qwen35.adapters.sglang.seam_gdn import MODEL_FAMILY
from qwen35.adapters.sglang.seam_moved import Guard
from qwen35.adapters.sglang.seam_ranks import RankSettings
from qwen35.adapters.sglang.seam_reasons import BoundedReasons
from qwen35.adapters.sglang.seams.release import Release
from qwen35.domain.errors import AgreementError, CaptureError, ConfigurationError, ContractError, UnsupportedError
from qwen35.domain.finalize_policy import decide_all_reduce
from qwen35.domain.finalize_signature import TOKEN_DTYPES
from qwen35.services.counters import Counters
from qwen35.services.devices import capturing
from qwen35.services.finalize_choice import PORT
from qwen35.services.finalize_fusion import FinalizeService

logger = logging.getLogger("qwen35")

PHASE = "all-reduce"
#: How counters name SGLang's own fused function, and its all-reduce and norm one after the other.
ENGINE_FUSED, ENGINE_UNFUSED = "engine:flashinfer", "engine:unfused"

Pair = tuple[Tensor, Tensor] | tuple[None, None]


class FusionSeam:
    """``requested``: the adapter that serves; ``service`` is None where SGLang's own choice is kept and only counted.

    ``ranks`` are asked to agree whatever is requested. ``strict``: a model or launch that cannot be fused stops the
    engine instead of running as SGLang alone would. ``guard``: our half of SGLang's warm-up goes on inside it.
    """

    def __init__(
        self, release: Release, requested: str | None, service: FinalizeService | None, counters: Counters,
        ranks: RankSettings, guard: Guard, *, strict: bool = False,
    ) -> None:  # fmt: skip
        self._release, self._requested, self._service, self._guard = release, requested, service, guard
        self._counters, self._ranks, self._strict = counters, ranks, strict
        self._refusals, self._declines = BoundedReasons(), BoundedReasons()
        self._launch: FusedLaunch | None = None
        self._step: Step | None = None
        self.notes: list[str] = []

    @property
    def prepared(self) -> bool:
        """Whether our adapter serves this engine's model."""
        return self._launch is not None

    def hooks(self) -> dict[str, Hook]:
        """What to hook, by key of the release's targets."""
        hooks: dict[str, Hook] = {
            "fused_norm": self._around_fused_norm, "fusion_prepare": self._around_prepare,
        }  # fmt: skip
        if self._service is not None:
            hooks |= {"fusion_gate": self._around_gate, "model_forward": self._around_model_forward}
        return hooks

    def _around_prepare(self, original: Callable[..., None], runner: Any) -> None:
        """SGLang's warm-up makes its workspaces here: once a model runner, before autotune and capture."""
        model_runner = None
        with self._guard("fusion_prepare"):
            model_runner = self._agreed_target(runner)
        original(runner)
        if self._service is not None and model_runner is not None:
            with self._guard("fusion_prepare"):
                self.prepare(self._service, model_runner)

    def _agreed_target(self, runner: Any) -> Any | None:
        """The model runner of the target model, on which the ranks agree; None of a draft model."""
        model_runner = runner.model_runner
        if model_runner.is_draft_worker:  # it shares the process, which holds one workspace
            return None
        self._ranks.agree()
        return model_runner

    def prepare(self, service: FinalizeService, model_runner: Any) -> None:
        """Have a workspace where this launch may use one; every rank calls this together.

        Raises ``ConfigurationError`` for multiplexed streams and pipeline parallelism, which exclude it,
        ``UnavailableError`` where the ranks cannot have it, and where strict ``UnsupportedError``.
        """
        family = model_runner.model_config.hf_text_config.model_type
        if not family.startswith(MODEL_FAMILY):
            if self._strict:
                raise UnsupportedError(
                    f"fusion by {self._requested}", [f"{family} is not Qwen3.5 (QWEN35_SGLANG_STRICT)"]
                )
            self._note(f"{family} is not Qwen3.5: its norms are not fused by {self._requested}")
            return
        if self._release.cutedsl_on():
            self._note("SGLang's CuTe DSL fusion is on: it asks for the workspace itself and serves both patterns")
            return
        engine = Engine(self._release, model_runner)
        situation = engine.situation()
        if situation.pipeline_size != 1:
            raise ConfigurationError(
                f"finalize = {self._requested!r} requires pipeline parallelism of 1, got {situation.pipeline_size}; "
                "unset QWEN35_FINALIZE or use one stage"
            )
        # Said by the service where it is against it, with what to do.
        reasons = list(decide_all_reduce(replace(situation, multiplexed_streams=False)).reasons)
        if engine.dtype not in TOKEN_DTYPES:
            reasons.append(f"dtype requires {' or '.join(TOKEN_DTYPES)}, got {engine.dtype}")
        if reasons:
            self._refuse_model(reasons)
            return
        prepare(service, engine.signature(), str(self._requested))
        max_m = min(situation.max_m, service.max_m)
        self._launch = FusedLaunch(engine, replace(situation, max_m=max_m), service)
        self._note(f"{service.workspace.adapter} serves all-reduce + residual + norm of 1 to {max_m} tokens")

    def _refuse_model(self, reasons: Sequence[str]) -> None:
        if self._strict:
            raise UnsupportedError(f"fusion by {self._requested}", reasons)
        for reason in reasons:
            self._counters.add("plans_refused", port=PORT, adapter=str(self._requested), reason=reason)
        self._note(f"fusion by {self._requested} is not used: {'; '.join(reasons)}")

    def _around_model_forward(
        self, original: Callable[..., Any], model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        before = self._step
        self._step = Step(forward_mode(forward_batch.forward_mode.name), bool(model_runner.is_draft_worker))
        try:
            return original(model_runner, forward_batch, *args, **kwargs)
        finally:
            self._step = before

    def _around_gate(self, original: Callable[..., Any], batch_size: Any) -> Any:
        """Whether a boundary of ``batch_size`` tokens is fused. While torch.compile traces: what SGLang alone says."""
        if torch.compiler.is_compiling() or self._launch is None:
            return original(batch_size)
        decision = self._launch.decide(self._step, batch_size)
        if decision.eligible:
            return True
        for reason in decision.reasons:
            self._counters.add(
                "fusions_declined", port=PORT, phase=PHASE, adapter=str(self._requested), mode=_mode(),
                reason=self._declines.label(reason),
            )  # fmt: skip
        return original(batch_size)

    def _around_fused_norm(
        self, original: Callable[..., Pair], input_tensor: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6,
        max_token_num: int = 2048, use_oneshot: bool | None = None, trigger_completion_at_end: bool = False,
        fp32_acc: bool = True, use_attn_tp_group: bool = True,
    ) -> Pair:  # fmt: skip
        """(norm, new residual), both [m, D], of ``input_tensor`` [m, D], of which every rank has a share. ``weight`` is
        the multiplier as applied: of a Gemma-style norm, one plus the checkpoint's. (None, None): not fused.

        In checked mode what some ranks alone refuse is raised on all of them; else all of them go on alike.
        How the kernel runs is the adapter's business, so the three arguments about that concern only SGLang's own:
        ours sums in float32 and completes at its end whatever they say.
        """

        def own() -> Pair:
            return original(
                input_tensor=input_tensor, residual=residual, weight=weight, eps=eps, max_token_num=max_token_num,
                use_oneshot=use_oneshot, trigger_completion_at_end=trigger_completion_at_end, fp32_acc=fp32_acc,
                use_attn_tp_group=use_attn_tp_group,
            )  # fmt: skip

        if torch.compiler.is_compiling():
            return own()
        launch = self._launch
        if launch is None:
            return self._count_own(own())
        try:
            return launch.serve(self._step, input_tensor, residual, weight, eps, use_attn_tp_group)
        except UnsupportedError as exc:
            self._count_refused(exc.reasons)
        except (ContractError, CaptureError) as exc:
            if isinstance(exc.__cause__, AgreementError):
                raise  # the other ranks, which did not see it, do: none of them comes to SGLang's own sum
            self._count_refused([str(exc)])
        result = self._count_own(own())
        if result[0] is None and not self._release.completes_declined_norm:
            return launch.complete(input_tensor, residual, weight, eps, use_attn_tp_group)
        return result

    def _count_own(self, result: Pair) -> Pair:
        adapter = ENGINE_UNFUSED if result[0] is None else ENGINE_FUSED
        self._counters.add("calls", port=PORT, phase=PHASE, adapter=adapter, mode=_mode())
        return result

    def _count_refused(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            line = self._refusals.line(reason)
            if line is not None:
                logger.warning("SGLang's own fused norm serves instead of %s: %s", self._requested, line)
            self._counters.add(
                "fallbacks", port=PORT, phase=PHASE, adapter="engine", instead_of=str(self._requested), mode=_mode(),
                reason=self._refusals.label(reason),
            )  # fmt: skip

    def _note(self, text: str) -> None:
        self.notes.append(text)
        logger.warning("qwen35: %s", text)


def _mode() -> str:
    return "captured" if capturing() else "eager"
