"""What the seam of each release must hook and check, written down apart from the seam: a target that is dropped there
is missed here."""

from __future__ import annotations

_SRT = "sglang.srt."
_GDN = f"{_SRT}layers.attention.linear.gdn_backend:"
_KERNELS = f"{_SRT}layers.attention.linear.kernels."
_UPDATER = f"{_SRT}managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_RELAY = f"{_SRT}managers.overlap_utils:"
_RUNNER = f"{_SRT}model_executor.forward_batch_info:"
_CONTEXT = f"{_SRT}runtime_context:"
_ADD_NORM = f"{_SRT}layers.layer_boundary.residual.add_norm:"

_UPDATES = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc", "resume_memory_occupation",
)  # fmt: skip
#: By release, the methods of SGLang that change parameters.
WEIGHT_UPDATES = {"0.5.20": _UPDATES, "0.5.23": (*_UPDATES, "end_weight_update")}


def update_path(method: str) -> str:
    """Where the weight update ``method`` is."""
    return f"{_UPDATER}.{method}"


_HOOKED = {
    f"{_GDN}GDNAttnBackend.__init__", f"{_GDN}GDNAttnBackend.forward_extend",
    f"{_SRT}layers.flashinfer_comm_fusion:flashinfer_allreduce_residual_rmsnorm",
    f"{_SRT}layers.flashinfer_mnnvl_cutedsl:get_flashinfer_mnnvl_cutedsl_ar_fusion",
    f"{_SRT}model_executor.model_runner:ModelRunner.forward",
    f"{_SRT}model_executor.runner.base_runner:BaseRunner._pre_initialize_flashinfer_allreduce_workspace",
}  # fmt: skip
#: By release, what is hooked inside a scheduler where every part is asked for.
HOOKED = {
    "0.5.20": _HOOKED | {update_path(name) for name in WEIGHT_UPDATES["0.5.20"]} | {
        f"{_SRT}layers.communicator:apply_flashinfer_allreduce_fusion",
        f"{_RELAY}FutureMap.__init__", f"{_RELAY}FutureMap.stash", f"{_RELAY}FutureMap._resolve_spec_extras",
    },
    "0.5.23": _HOOKED | {update_path(name) for name in WEIGHT_UPDATES["0.5.23"]} | {
        f"{_ADD_NORM}flashinfer_ar_fusion_applies",
    },
}  # fmt: skip

_CALLED = {
    f"{_SRT}managers.scheduler:Scheduler.__init__", _UPDATER,
    f"{_GDN}GDNKernelDispatcher.__init__", f"{_GDN}GDNKernelDispatcher.packed_decode",
    f"{_GDN}GDNKernelDispatcher.decode", f"{_GDN}GDNKernelDispatcher.extend",
    f"{_GDN}GDNKernelDispatcher.target_verify", f"{_KERNELS}gdn_triton:TritonGDNKernel.packed_decode",
    f"{_KERNELS}gdn_flashinfer:maybe_build_flashinfer_checkpoint_plan",
    f"{_SRT}layers.layernorm:_forward_with_allreduce_fusion",
    f"{_SRT}layers.layernorm:GemmaRMSNorm.forward_with_allreduce_fusion",
    f"{_SRT}layers.moe.utils:get_moe_a2a_backend", f"{_RUNNER}ForwardMode.is_target_verify",
    *(f"{_CONTEXT}get_{name}" for name in ("schedule", "flags", "forward", "exec", "disagg", "spec", "parallel")),
}  # fmt: skip
#: By release, the functions whose signatures must be checked: what is hooked, and what the seam relies on.
CHECKED = {
    "0.5.20": HOOKED["0.5.20"] | _CALLED | {f"{_RELAY}FutureMap._maybe_init_forward_bufs", f"{_RELAY}RelayPayload"},
    "0.5.23": HOOKED["0.5.23"] | _CALLED | {
        f"{_SRT}layers.flashinfer_comm_fusion:uses_cutedsl_ar_fusion",
        f"{_SRT}layers.layer_boundary.fusions.cutedsl:prepare_cutedsl_fusion", f"{_CONTEXT}get_device",
    },
}  # fmt: skip

_THERE = {
    f"{_RUNNER}ForwardBatch", f"{_SRT}speculative.spec_info:SpecInput",
    f"{_GDN}FLA_CHUNK_SIZE", f"{_KERNELS}kernel_backend:LinearAttnKernelBase",
    f"{_KERNELS}kernel_backend:LinearAttnKernelBase.uses_state_checkpoints",
    f"{_SRT}constants:GPU_MEMORY_TYPE_WEIGHTS",
}  # fmt: skip
#: By release, the values that must be there.
THERE = {
    "0.5.20": _THERE | {
        f"{_SRT}environ:Envs.SGLANG_FLASHINFER_MNNVL_CUTEDSL_AR_FUSION", f"{_RELAY}_DEBUG_ASSERT",
        f"{_SRT}layers.communicator:FUSE_ALLREDUCE_MAX_BATCH_SIZE",
    },
    "0.5.23": _THERE | {
        f"{_GDN}GDNAttnBackend.requires_contiguous_prefill_state", f"{_ADD_NORM}FUSE_ALLREDUCE_MAX_BATCH_SIZE",
    },
}  # fmt: skip
