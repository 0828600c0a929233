"""SGLang 0.5.23: what moved since 0.5.20."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen35.adapters.sglang.seam import Target
from qwen35.adapters.sglang.seams import v0_5_20
from qwen35.adapters.sglang.seams.release import Place, Release

_GDN = "sglang.srt.layers.attention.linear.gdn_backend"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

TARGETS = v0_5_20.TARGETS | {
    "scheduler": Target("sglang.srt.managers.scheduler:Scheduler.__init__", "(self, server_args, port_args)"),
    # A session may end with weights that arrived by RDMA and were announced by no update call.
    "weights_end": Target(f"{_WEIGHTS}.end_weight_update", "(self, recv_req)"),
    "gather_switch": Target(f"{_GDN}:GDNAttnBackend.requires_contiguous_prefill_state"),
    "parallel": Target("sglang.srt.runtime_context:get_parallel", "()"),
    "device": Target("sglang.srt.runtime_context:get_device", "()"),
}


def place(_: Mapping[str, Any]) -> Place:
    """From the configuration that the process published before it made its scheduler."""
    from sglang.srt.runtime_context import get_device, get_parallel

    parallel = get_parallel()
    return Place(
        gpu=get_device().gpu_id or 0, tensor_rank=parallel.tp_rank, pipeline_rank=parallel.pp_rank,
        data_rank=parallel.attn_dp_rank,
    )  # fmt: skip


RELEASE = Release(
    version="0.5.23",
    targets=TARGETS,
    place=place,
    gather_switch="requires_contiguous_prefill_state",
    weight_updates=(*v0_5_20.RELEASE.weight_updates, "weights_end"),
)
