"""SGLang 0.5.23: what moved since 0.5.20."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen35.adapters.sglang.seam import Target
from qwen35.adapters.sglang.seams import v0_5_20
from qwen35.adapters.sglang.seams.release import Place, Release

_GDN = "sglang.srt.layers.attention.linear.gdn_backend"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

_LAYERS = "sglang.srt.layers"
_ADD_NORM = f"{_LAYERS}.layer_boundary.residual.add_norm"

TARGETS = (
    v0_5_20.TARGETS
    | v0_5_20.FUSION_TARGETS
    | {
        "scheduler": Target("sglang.srt.managers.scheduler:Scheduler.__init__", "(self, server_args, port_args)"),
        # A session may end with weights that arrived by RDMA and were announced by no update call.
        "weights_end": Target(f"{_WEIGHTS}.end_weight_update", "(self, recv_req)"),
        "weights_updater": Target(
            _WEIGHTS,
            "(*, tp_worker, draft_worker, memory_saver_adapter, flush_cache, is_fully_idle, scheduler, "
            "metrics_collector, offload_tags, stashed_model_static_state, _session)",
        ),
        "gather_switch": Target(f"{_GDN}:GDNAttnBackend.requires_contiguous_prefill_state"),
        # Imported by name elsewhere; SGLang's registry patches those names too.
        "fusion_gate": Target(f"{_ADD_NORM}:flashinfer_ar_fusion_applies", "(batch_size)"),
        "fusion_max_m": Target(f"{_ADD_NORM}:FUSE_ALLREDUCE_MAX_BATCH_SIZE"),
        "finalize_workspace": Target(
            f"{_LAYERS}.flashinfer_mnnvl_cutedsl:get_flashinfer_mnnvl_cutedsl_ar_fusion",
            "(*, hidden_size, top_k, max_m, rms_epsilon, weight_bias, include_shared_expert)",
        ),
        "finalize_prepare": Target(
            f"{_LAYERS}.layer_boundary.fusions.cutedsl:prepare_cutedsl_fusion", "(model, *, max_running_requests)"
        ),
        "cutedsl_switch": Target(f"{_LAYERS}.flashinfer_comm_fusion:uses_cutedsl_ar_fusion", "()"),
        "device": Target("sglang.srt.runtime_context:get_device", "()"),
    }
)


def place(_: Mapping[str, Any]) -> Place:
    """From the configuration that the process published before it made its scheduler."""
    from sglang.srt.runtime_context import get_device, get_parallel

    parallel = get_parallel()
    return Place(
        gpu=get_device().gpu_id or 0, tensor_rank=parallel.tp_rank, pipeline_rank=parallel.pp_rank,
        data_rank=parallel.dp_rank,
    )  # fmt: skip


def cutedsl_on() -> bool:
    """A launch argument, --flashinfer-allreduce-fusion-backend cutedsl."""
    from sglang.srt.layers.flashinfer_comm_fusion import uses_cutedsl_ar_fusion

    return bool(uses_cutedsl_ar_fusion())


RELEASE = Release(
    version="0.5.23",
    targets=TARGETS,
    place=place,
    gather_switch="requires_contiguous_prefill_state",
    weight_updates=(*v0_5_20.RELEASE.weight_updates, "weights_end"),
    cutedsl_on=cutedsl_on,
    completes_declined_norm=True,
)
