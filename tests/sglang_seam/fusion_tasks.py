"""What each of two rank processes does with the plugin installed in its own SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fusion_machine import ENGINE, EPS, Group, gate, gemma, give_the_operator_a_cpu, launch, model_runner
from seam_machine import PLACE, installed_seam
from torch import Tensor

from qwen35 import sglang_plugin
from qwen35.settings import load_settings


class RealGroup(Group):
    """SGLang's coordinator over a process group."""

    def __init__(self, group: Any) -> None:
        super().__init__(dist.get_world_size(group))
        self.device_group, self.rank_in_group = group, dist.get_rank(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sums += 1
        total = x.clone()
        dist.all_reduce(total, group=self.device_group)
        return total


def fused_norms(ranked: Any, weight: Tensor, calls: list[tuple[list[Tensor], Tensor]]) -> dict[str, Any]:
    """Each call's (norm, residual) by SGLang's Gemma-style norm, this rank's share fused by the reference adapter; and
    of the last call once more, with a share that is not contiguous, which neither the adapter nor SGLang fuses."""
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.model_executor.runner.base_runner import BaseRunner
    from sglang.srt.runtime_context import get_context

    give_the_operator_a_cpu()
    override = get_context().override_server_args()
    override.install()
    settings = load_settings(None, device="cpu", finalize="reference")
    container = sglang_plugin.make_container(settings, PLACE)
    groups = {f"{name}_group": RealGroup(ranked.group) for name in ("tp", "attn_tp", "moe_tp")}
    ranks = {f"{name}_rank": ranked.rank for name in ("tp", "attn_tp", "moe_tp")}
    try:
        with launch(**ranks, **groups), torch.no_grad():
            one = sglang_plugin.start(settings, installed_seam(), PLACE, container)
            runner = model_runner(weight.dtype, hidden=weight.shape[0])
            BaseRunner._pre_initialize_flashinfer_allreduce_workspace(SimpleNamespace(model_runner=runner))
            norm = gemma(weight.shape[0], weight.dtype, EPS)
            norm.weight.weight_loader(norm.weight, weight)
            opened = [gate(residual.shape[0]) for _, residual in calls]
            results = [
                norm.forward_with_allreduce_fusion(shares[ranked.rank].clone(), residual.clone())
                for shares, residual in calls
            ]
            ENGINE.declines = True
            shares, residual = calls[-1]
            strided = shares[ranked.rank].t().contiguous().t()
            declined = norm.forward_with_allreduce_fusion(strided, residual.clone())
            snapshot = container.counters().snapshot()
            return {
                "prepared": one.fusion.prepared, "gate": opened, "results": results, "declined": declined,
                "counters": {f"{name} {dict(labels)}": value for (name, labels), value in snapshot.items()},
                "served": container.counters().total("calls", port="finalize_fusion", adapter="reference"),
            }  # fmt: skip
    finally:
        sglang_plugin.uninstall()
        container.finalize().close()
        override.restore()
