"""What each of two rank processes does with the plugin installed in its own SGLang."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fusion_machine import ENGINE, EPS, Group, fused, gate, gemma, give_the_operator_a_cpu, launch, model_runner
from seam_machine import PLACE, installed_seam
from torch import Tensor

from qwen35 import sglang_plugin
from qwen35.domain.errors import Qwen35Error
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


@contextmanager
def plugged(ranked: Any, **settings: Any) -> Iterator[sglang_plugin.Running]:
    """The plugin in this rank's SGLang, which is about to warm up."""
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.runtime_context import get_context

    give_the_operator_a_cpu()
    ENGINE.declines = False
    ENGINE.calls.clear()
    override = get_context().override_server_args()
    override.install()
    known = load_settings(None, device="cpu", **settings)
    container = sglang_plugin.make_container(known, PLACE)
    groups = {f"{name}_group": RealGroup(ranked.group) for name in ("tp", "attn_tp", "moe_tp")}
    ranks = {f"{name}_rank": ranked.rank for name in ("tp", "attn_tp", "moe_tp")}
    try:
        with launch(**ranks, **groups), torch.no_grad():
            yield sglang_plugin.start(known, installed_seam(), PLACE, container)
    finally:
        sglang_plugin.uninstall()
        container.finalize().close()
        override.restore()


def warm_up(weight: Tensor) -> None:
    """What BaseRunner.warmup does first on a GPU."""
    from sglang.srt.model_executor.runner.base_runner import BaseRunner

    runner = model_runner(weight.dtype, hidden=weight.shape[0])
    BaseRunner._pre_initialize_flashinfer_allreduce_workspace(SimpleNamespace(model_runner=runner))


def warm_up_told(ranked: Any, told: Sequence[dict[str, Any]]) -> tuple[str, str, float]:
    """The warm-up of a rank that has settings of its own: how it ends, by type and text, and after how long."""
    with plugged(ranked, **told[ranked.rank]) as one:
        since = time.monotonic()
        try:
            warm_up(torch.ones(8))
        except Qwen35Error as exc:
            return type(exc).__name__, str(exc), time.monotonic() - since
        return "fused" if one.fusion.prepared else "left to SGLang", "", time.monotonic() - since


def refused_call(ranked: Any, strided: Sequence[int], other_eps: Sequence[int], checked: bool) -> dict[str, Any]:
    """Who serves a norm of which the ranks ``strided`` bring a share that is not contiguous, and ``other_eps`` another
    eps; and one more norm after it, of which all bring the same."""
    here = ranked.rank
    with plugged(ranked, finalize="reference", checked=checked) as one:
        warm_up(torch.ones(8))
        share = torch.full((4, 8), float(here + 1))
        brought = share.t().contiguous().t() if here in strided else share
        eps = EPS * 10 if here in other_eps else EPS
        said: dict[str, Any] = {"error": None, "cause": None}
        try:
            fused(brought, torch.zeros(4, 8), torch.ones(8), eps=eps)
        except Qwen35Error as exc:
            said = {"error": type(exc).__name__, "cause": type(exc.__cause__).__name__}
        said["engine"] = len(ENGINE.calls)
        said["sum"] = fused(share, torch.zeros(4, 8), torch.ones(8))[1]
        said["served"] = one.container.counters().total("calls", port="finalize_fusion", adapter="reference")
        return said


def fused_norms(ranked: Any, weight: Tensor, calls: list[tuple[list[Tensor], Tensor]]) -> dict[str, Any]:
    """Each call's (norm, residual) by SGLang's Gemma-style norm, this rank's share fused by the reference adapter; and
    of the last call once more, with a share that is not contiguous, which neither the adapter nor SGLang fuses."""
    with plugged(ranked, finalize="reference") as one:
        warm_up(weight)
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
        counters = one.container.counters()
        return {
            "prepared": one.fusion.prepared, "gate": opened, "results": results, "declined": declined,
            "counters": {f"{name} {dict(labels)}": value for (name, labels), value in counters.snapshot().items()},
            "served": counters.total("calls", port="finalize_fusion", adapter="reference"),
        }  # fmt: skip
