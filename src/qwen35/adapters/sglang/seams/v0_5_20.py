"""SGLang 0.5.20."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen35.adapters.sglang.seam import Target
from qwen35.adapters.sglang.seams.release import Place, Release

_GDN = "sglang.srt.layers.attention.linear.gdn_backend"
_KERNELS = "sglang.srt.layers.attention.linear.kernels"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_OVERLAP = "sglang.srt.managers.overlap_utils"
_LAYERS = "sglang.srt.layers"
_CONTEXT = "sglang.srt.runtime_context"
_RUNNER = "sglang.srt.model_executor"

_PACKED_DECODE = (
    "(self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads, head_v_dim, **kwargs)"
)
_DECODE = "(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **kwargs)"
_EXTEND = "(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **kwargs)"
_VERIFY = "(self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc, **kwargs)"
_FUSED_NORM = (
    "(input_tensor, residual, weight, eps, max_token_num, use_oneshot, trigger_completion_at_end, fp32_acc, "
    "use_attn_tp_group)"
)

TARGETS = {
    # hooked
    "scheduler": Target(
        "sglang.srt.managers.scheduler:Scheduler.__init__",
        "(self, server_args, port_args, gpu_id, tp_rank, moe_ep_rank, pp_rank, attn_cp_rank, moe_dp_rank, dp_rank)",
    ),
    "gdn_backend": Target(f"{_GDN}:GDNAttnBackend.__init__", "(self, model_runner)"),
    "gdn_forward_extend": Target(
        f"{_GDN}:GDNAttnBackend.forward_extend", "(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)"
    ),
    "weights_disk": Target(f"{_WEIGHTS}.update_weights_from_disk", "(self, recv_req)"),
    "weights_distributed": Target(f"{_WEIGHTS}.update_weights_from_distributed", "(self, recv_req)"),
    "weights_tensor": Target(f"{_WEIGHTS}.update_weights_from_tensor", "(self, recv_req)"),
    "weights_ipc": Target(f"{_WEIGHTS}.update_weights_from_ipc", "(self, recv_req)"),
    "weights_resume": Target(f"{_WEIGHTS}.resume_memory_occupation", "(self, recv_req)"),
    # relied on: who calls our kernels, and how
    "dispatcher": Target(
        f"{_GDN}:GDNKernelDispatcher.__init__", "(self, decode_backend, prefill_backend, verify_backend)"
    ),
    "dispatcher_packed_decode": Target(f"{_GDN}:GDNKernelDispatcher.packed_decode", _PACKED_DECODE),
    "dispatcher_decode": Target(f"{_GDN}:GDNKernelDispatcher.decode", _DECODE),
    "dispatcher_extend": Target(f"{_GDN}:GDNKernelDispatcher.extend", _EXTEND),
    "dispatcher_verify": Target(f"{_GDN}:GDNKernelDispatcher.target_verify", _VERIFY),
    "kernel_base": Target(f"{_KERNELS}.kernel_backend:LinearAttnKernelBase"),
    "kernel_packed_decode": Target(f"{_KERNELS}.gdn_triton:TritonGDNKernel.packed_decode", _PACKED_DECODE),
    "kernel_checkpoints": Target(f"{_KERNELS}.kernel_backend:LinearAttnKernelBase.uses_state_checkpoints"),
    "checkpoint_plan": Target(
        f"{_KERNELS}.gdn_flashinfer:maybe_build_flashinfer_checkpoint_plan", "(forward_batch, forward_metadata, device)"
    ),
    "chunk_size": Target(f"{_GDN}:FLA_CHUNK_SIZE"),
    "schedule": Target(f"{_CONTEXT}:get_schedule", "()"),
    # relied on: what says of a batch what it is, and of a verify whether its rows differ in length
    "forward_batch": Target(
        f"{_RUNNER}.forward_batch_info:ForwardBatch", fields=("forward_mode", "extend_seq_lens_cpu", "spec_info")
    ),
    "forward_mode": Target(f"{_RUNNER}.forward_batch_info:ForwardMode.is_target_verify", "(self)"),
    "draft_input": Target("sglang.srt.speculative.spec_info:SpecInput", fields=("ragged_verify_layout",)),
    # relied on: what says that weights have no memory
    "weights_updater": Target(
        _WEIGHTS,
        "(*, tp_worker, draft_worker, tp_cpu_group, memory_saver_adapter, flush_cache, is_fully_idle, scheduler, "
        "metrics_collector, offload_tags, stashed_model_static_state)",
    ),
    "weights_tag": Target("sglang.srt.constants:GPU_MEMORY_TYPE_WEIGHTS"),
}
FUSION_TARGETS = {
    # hooked
    "fused_norm": Target(f"{_LAYERS}.flashinfer_comm_fusion:flashinfer_allreduce_residual_rmsnorm", _FUSED_NORM),
    "fusion_gate": Target(f"{_LAYERS}.communicator:apply_flashinfer_allreduce_fusion", "(batch_size)"),
    "fusion_prepare": Target(
        f"{_RUNNER}.runner.base_runner:BaseRunner._pre_initialize_flashinfer_allreduce_workspace", "(self)"
    ),
    "model_forward": Target(
        f"{_RUNNER}.model_runner:ModelRunner.forward",
        "(self, forward_batch, skip_attn_backend_init, pp_proxy_tensors, reinit_attn_backend, split_forward_count)",
    ),
    "finalize_workspace": Target(
        f"{_LAYERS}.flashinfer_mnnvl_cutedsl:get_flashinfer_mnnvl_cutedsl_ar_fusion",
        "(*, hidden_size, top_k, max_m, rms_epsilon, weight_bias)",
    ),
    # relied on: who calls the fused norm and with which weight, and what the launch and the step are
    "fused_norm_caller": Target(
        f"{_LAYERS}.layernorm:_forward_with_allreduce_fusion",
        "(norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group)",
    ),
    "gemma_norm": Target(
        f"{_LAYERS}.layernorm:GemmaRMSNorm.forward_with_allreduce_fusion",
        "(self, x, residual, post_residual_addition, use_attn_tp_group)",
    ),
    "fusion_max_m": Target(f"{_LAYERS}.communicator:FUSE_ALLREDUCE_MAX_BATCH_SIZE"),
    "all_to_all": Target(f"{_LAYERS}.moe.utils:get_moe_a2a_backend", "()"),
    "flags": Target(f"{_CONTEXT}:get_flags", "()"),
    "forward": Target(f"{_CONTEXT}:get_forward", "()"),
    "exec": Target(f"{_CONTEXT}:get_exec", "()"),
    "disaggregation": Target(f"{_CONTEXT}:get_disagg", "()"),
    "speculation": Target(f"{_CONTEXT}:get_spec", "()"),
    "parallel": Target(f"{_CONTEXT}:get_parallel", "()"),
}
#: What asks for SGLang's CuTe DSL fusion here.
SWITCH_TARGETS = {"cutedsl_switch": Target("sglang.srt.environ:Envs.SGLANG_FLASHINFER_MNNVL_CUTEDSL_AR_FUSION")}
#: Of this release alone: its FutureMap fails in some orders of payloads.
RELAY_TARGETS = {
    # hooked
    "relay": Target(
        f"{_OVERLAP}:FutureMap.__init__",
        "(self, device, spec_algo, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)",
    ),
    "relay_stash": Target(f"{_OVERLAP}:FutureMap.stash", "(self, future_indices, payload)"),
    "relay_resolve": Target(f"{_OVERLAP}:FutureMap._resolve_spec_extras", "(self, batch)"),
    # relied on: who makes the buffers, what a payload is, and whether rows are poisoned
    "relay_buffers": Target(f"{_OVERLAP}:FutureMap._maybe_init_forward_bufs", "(self, payload)"),
    "relay_payload": Target(
        f"{_OVERLAP}:RelayPayload",
        "(bonus_tokens, topk_p, topk_index, hidden_states, draft_probs, dsa_topk_indices, accept_tokens, accept_lens)",
    ),
    "relay_draft": Target(
        "sglang.srt.speculative.eagle_info:EagleDraftInput",
        "(topk_p, topk_index, draft_probs, hidden_states, capture_hidden_mode, dsa_topk_indices, bonus_tokens, "
        "kv_indptr, kv_indices, num_tokens_per_req, num_tokens_for_logprob_per_req, future_indices, "
        "future_dsa_topk_indices_available)",
    ),
    "relay_debug": Target(f"{_OVERLAP}:_DEBUG_ASSERT"),
}


def place(arguments: Mapping[str, Any]) -> Place:
    """From the arguments of Scheduler.__init__, by name."""
    return Place(
        gpu=arguments["gpu_id"], tensor_rank=arguments["tp_rank"], pipeline_rank=arguments["pp_rank"],
        data_rank=arguments["dp_rank"],
    )  # fmt: skip


def cutedsl_on() -> bool:
    """An environment variable, read when asked."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_FLASHINFER_MNNVL_CUTEDSL_AR_FUSION.get())


RELEASE = Release(
    version="0.5.20",
    targets=TARGETS | FUSION_TARGETS | SWITCH_TARGETS | RELAY_TARGETS,
    place=place,
    gather_switch=None,
    weight_updates=("weights_disk", "weights_distributed", "weights_tensor", "weights_ipc", "weights_resume"),
    cutedsl_on=cutedsl_on,
    completes_declined_norm=False,
)
