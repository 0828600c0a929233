"""What SGLang's published configuration says of one launch, in the words of our fusion policy."""

from __future__ import annotations

import pkgutil
from types import MappingProxyType
from typing import Any

from qwen35.adapters.sglang.seam_plan import speculating
from qwen35.adapters.sglang.seams.release import Release
from qwen35.domain.errors import UnavailableError, WorkspaceError
from qwen35.domain.finalize_policy import ForwardMode, Situation
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.services.finalize_fusion import FinalizeService

#: SGLang's names of forward modes.
FORWARD_MODES = MappingProxyType({
    "EXTEND": ForwardMode.EXTEND, "DECODE": ForwardMode.DECODE, "MIXED": ForwardMode.MIXED, "IDLE": ForwardMode.IDLE,
    "TARGET_VERIFY": ForwardMode.TARGET_VERIFY, "DRAFT_EXTEND_V2": ForwardMode.DRAFT_EXTEND,
    "PREBUILT": ForwardMode.PREBUILT, "SPLIT_PREFILL": ForwardMode.SPLIT_PREFILL,
    "DLLM_EXTEND": ForwardMode.DLLM_EXTEND,
})  # fmt: skip


def forward_mode(name: str) -> ForwardMode:
    """Ours for SGLang's; one that is not known does not fuse."""
    return FORWARD_MODES.get(name, ForwardMode.IDLE)


class Engine:
    """One target model's launch: what never changes is read here, what a step changes by the methods."""

    def __init__(self, release: Release, model_runner: Any) -> None:
        from sglang.srt.runtime_context import get_flags, get_forward, get_parallel

        self._flags, self._forward, self._parallel = get_flags, get_forward, get_parallel
        self._release, self._runner = release, model_runner
        text = model_runner.model_config.hf_text_config
        self.eps: float = text.rms_norm_eps
        self.dtype = str(model_runner.dtype).removeprefix("torch.")
        sizes = get_parallel()
        moe = sizes.moe_ep_size if sizes.moe_ep_size > 1 else sizes.moe_tp_size
        self._group_sizes: dict[bool, int] = {True: sizes.attn_tp_size, False: moe}
        # Steps read these again, where it is too late to give up.
        self.drafting()
        self.input_scattered()

    def situation(self) -> Situation:
        """A decode step of one token, as far as the launch decides it; ``max_m`` is SGLang's bound of fused tokens."""
        from sglang.srt.layers.moe.utils import get_moe_a2a_backend
        from sglang.srt.runtime_context import get_disagg, get_exec

        sizes, text = self._parallel(), self._runner.model_config.hf_text_config
        all_to_all = get_moe_a2a_backend()
        max_m = int(pkgutil.resolve_name(self._release.targets["fusion_max_m"].path))
        return Situation(
            forward_mode=ForwardMode.DECODE, m=1, max_m=max_m, tp_size=sizes.tp_size, model_type=text.model_type,
            draft_model=self._runner.is_draft_worker, pipeline_size=sizes.pp_size,
            data_parallel_attention=self._flags().dp.enabled, attention_context_parallel=sizes.attn_cp_size,
            all_to_all=None if all_to_all.is_none() else all_to_all.value,
            multiplexed_streams=bool(get_disagg().enable_pdmux), deepstack=self._deepstack(),
            attention_data_parallel=sizes.attn_dp_size, attention_tp_size=sizes.attn_tp_size,
            quantised_communication=bool(get_exec().comm.enable_quant_communications),
        )  # fmt: skip

    def signature(self) -> WorkspaceSignature:
        """What a workspace must be made for; gamma comes as the multiplier that is applied, so the bias is 0."""
        text = self._runner.model_config.hf_text_config
        situation = self.situation()
        return workspace_signature(
            device=self._runner.device, gpu=self._runner.gpu_id, hidden=self._runner.model_config.hidden_size,
            top_k=text.num_experts_per_tok, max_m=situation.max_m, dtype=self.dtype, eps=self.eps, weight_bias=0.0,
        )  # fmt: skip

    def group_size(self, attention: bool) -> int:
        """Ranks of the group over which a fused norm sums: attention's, or that of the experts' output."""
        return self._group_sizes[attention]

    def group(self, attention: bool) -> Any:
        """SGLang's coordinator of that group."""
        parallel = self._parallel()
        if attention:
            return parallel.attn_tp_group
        return parallel.moe_ep_group if parallel.moe_ep_size > 1 else parallel.moe_tp_group

    def drafting(self) -> bool:
        """Whether a draft model is being run or captured."""
        return bool(self._flags().moe.in_speculative_scope)

    def input_scattered(self) -> bool:
        """Whether attention's input is scattered over ranks in this step."""
        return bool(self._forward().attn_input_scattered)

    def _deepstack(self) -> bool:
        """Visual inputs that are added between layers, on 0.5.20 to a rank's share before it is summed."""
        return bool(vars(self._runner.model).get("deepstack_visual_indexes"))


def workspace_signature(
    *, device: str, gpu: int, hidden: int, top_k: int, max_m: int, dtype: str, eps: float, weight_bias: float,
    shared_expert: bool = True,
) -> WorkspaceSignature:  # fmt: skip
    """Over SGLang's tensor-parallel group. ``device`` is "cuda" or "cpu", ``gpu`` this process's index."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return WorkspaceSignature(
        group=parallel.tp_group.device_group, tp_size=parallel.tp_size, rank=parallel.tp_rank, hidden=hidden,
        top_k=top_k, max_m=max_m, dtype=dtype, eps=eps, weight_bias=weight_bias, shared_expert=shared_expert,
        device=f"{device}:{gpu}" if device == "cuda" else device,
        speculative=speculating(),
    )  # fmt: skip


def prepare(service: FinalizeService, signature: WorkspaceSignature, requested: str) -> None:
    """Have a workspace of ``service``; every rank calls this together.

    Raises ``ConfigurationError`` for multiplexed streams, and ``UnavailableError`` for whatever else is against it:
    SGLang's warm-up takes a RuntimeError, which a ``WorkspaceError`` is, for a failed capture and hides its text.
    """
    from sglang.srt.runtime_context import get_disagg

    try:
        service.prepare(signature, multiplexed_streams=bool(get_disagg().enable_pdmux))
    except WorkspaceError as exc:
        raise UnavailableError(f"finalize = {requested!r}", [str(exc)]) from exc
