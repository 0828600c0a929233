"""When the fused finalize and the fused all-reduce may be used: one policy, one answer with all its reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class ForwardMode(StrEnum):
    """What a step does, in the engine's words. A mode that is not named as fusing does not fuse."""

    DECODE = "decode"
    EXTEND = "extend"
    TARGET_VERIFY = "target verify"
    MIXED = "mixed"
    IDLE = "idle"
    DRAFT_EXTEND = "draft extend"
    SPLIT_PREFILL = "split prefill"
    PREBUILT = "prebuilt"
    DLLM_EXTEND = "diffusion extend"

    @property
    def fuses(self) -> bool:
        return self in _FUSING


_FUSING = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})

#: Text models whose MoE layers have this end.
FUSING_MODEL_TYPES = frozenset({"qwen3_5_moe_text"})


@dataclass(frozen=True, slots=True)
class Decision:
    """``eligible`` and, where not, every reason that applies: "X requires Y, got Z"."""

    eligible: bool
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.eligible


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One layer boundary of one step, as the engine sees it. The defaults are those of an eligible one."""

    forward_mode: ForwardMode
    m: int
    max_m: int
    tp_size: int
    enabled: bool = True
    prepared: bool = True
    model_type: str = "qwen3_5_moe_text"
    draft_model: bool = False
    pipeline_size: int = 1
    data_parallel_attention: bool = False
    attention_context_parallel: int = 1
    input_scattered: bool = False
    all_to_all: str | None = None
    multiplexed_streams: bool = False
    deepstack: bool = False
    gemma_norm: bool = True
    has_residual: bool = True
    # of the finalize alone
    mlp_scattered: bool = False
    expert_parallel: int = 1
    sparse_moe: bool = True
    supports_deferral: bool = True
    shared_expert_separate: bool = True
    # of the all-reduce alone
    gathers_hidden_states: bool = True
    residual_full: bool = True
    attention_data_parallel: int = 1
    attention_tp_size: int | None = None
    quantised_communication: bool = False


def decide_finalize(s: Situation) -> Decision:
    """Whether the MoE layer may hand over its output unfinished, to be finalized with the next norm."""
    return _decision(_common(s), _finalize_only(s))


def decide_all_reduce(s: Situation) -> Decision:
    """Whether all-reduce, residual and norm may run as one."""
    return _decision(_common(s), _all_reduce_only(s))


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """``defer``: the MLP returns a handoff. ``fuse``: the sum over ranks is left to the next norm."""

    defer: bool
    fuse: bool


def plan_layer(finalize: Decision, *, generic_fuse: bool, last: bool) -> LayerPlan:
    """What a layer does with its MLP's output, decided before the MLP runs.

    ``generic_fuse``: the engine would leave a plain all-reduce to the next layer's norm. After the last layer
    only the final norm follows, which takes a handoff but no pending sum: there a layer that cannot defer
    does not fuse, so that its collective really runs.
    """
    if finalize.eligible:
        return LayerPlan(defer=True, fuse=True)
    return LayerPlan(defer=False, fuse=generic_fuse and not last)


def _decision(*reasons: Iterator[str]) -> Decision:
    found = tuple(reason for each in reasons for reason in each)
    return Decision(not found, found)


def _common(s: Situation) -> Iterator[str]:
    if not s.enabled:
        yield "fusion requires the finalize setting, which is off"
    if not s.prepared:
        yield "fusion requires a prepared workspace"
    if s.model_type not in FUSING_MODEL_TYPES:
        yield f"model type requires {' or '.join(sorted(FUSING_MODEL_TYPES))}, got {s.model_type}"
    if s.draft_model:
        yield "fusion requires the target model, got the draft model"
    if not s.forward_mode.fuses:
        yield f"forward mode requires decode, extend or target verify, got {s.forward_mode}"
    if not 1 <= s.m <= s.max_m:
        yield f"m requires 1..{s.max_m}, got {s.m}"
    if s.tp_size < 2:
        yield f"tensor parallelism requires at least 2 ranks, got {s.tp_size}"
    if s.pipeline_size != 1:
        yield f"pipeline parallelism requires 1, got {s.pipeline_size}"
    if s.data_parallel_attention:
        yield "attention requires no data parallelism"
    if s.attention_context_parallel != 1:
        yield f"attention context parallelism requires 1, got {s.attention_context_parallel}"
    if s.input_scattered:
        yield "attention input requires to be whole on every rank, got a scattered one"
    if s.all_to_all is not None:
        yield f"expert dispatch requires no all-to-all backend, got {s.all_to_all}"
    if s.multiplexed_streams:
        yield "one workspace requires one stream at a time, got multiplexed prefill and decode streams"
    if s.deepstack:
        yield "hidden states require no deepstack input"
    if not s.gemma_norm:
        yield "norm requires a Gemma-style weight"
    if not s.has_residual:
        yield "fusion requires a residual"


def _finalize_only(s: Situation) -> Iterator[str]:
    if s.mlp_scattered:
        yield "MLP output requires to be whole on every rank, got a scattered one"
    if s.expert_parallel != 1:
        yield f"expert parallelism requires 1, for the sum to span the tensor-parallel group, got {s.expert_parallel}"
    if not s.sparse_moe:
        yield "finalize requires a sparse MoE block"
    if not s.supports_deferral:
        yield "finalize requires experts that can defer it"
    if not s.shared_expert_separate:
        yield "finalize requires a separate shared expert"


def _all_reduce_only(s: Situation) -> Iterator[str]:
    if not s.gathers_hidden_states:
        yield "all-reduce requires the boundary that gathers hidden states and residual"
    if not s.residual_full:
        yield "residual requires to be whole on every attention rank"
    if s.attention_data_parallel != 1:
        yield f"attention data parallelism requires 1, got {s.attention_data_parallel}"
    if s.attention_tp_size is not None and s.attention_tp_size != s.tp_size:
        yield f"attention tensor parallelism requires {s.tp_size}, got {s.attention_tp_size}"
    if s.quantised_communication:
        yield "all-reduce requires unquantised communication"
