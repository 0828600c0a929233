"""A launch of the installed SGLang on two tensor-parallel ranks, as far as a CPU shows it.

Its own configuration, norms and gates, and a process group of this rank alone that counts its sums. SGLang's fused
function exists for CUDA only; here its operator gets an implementation that records calls, or declines them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finalize_fakes import FakeFusion
from finalize_fakes import Group as ProcessGroup
from seam_machine import PLACE, installed_seam
from torch import Tensor

from qwen35 import sglang_plugin
from qwen35.adapters.sglang.seam_choices import requested_fusion
from qwen35.container import build
from qwen35.domain.finalize_capabilities import DeviceFacts
from qwen35.services.counters import Counters
from qwen35.services.finalize_agreement import Agreement, Agreements
from qwen35.services.finalize_fusion import FinalizeService
from qwen35.services.finalize_registry import WorkspaceRegistry
from qwen35.settings import load_settings

HIDDEN, TOP_K, EPS, TP = 16, 2, 1e-6, 2


class Both:
    """An agreement of two ranks that are always of one mind."""

    def exchange(self, value: Any) -> list[Any]:
        return [value, value]


class Group:
    """SGLang's coordinator of a group whose every rank holds the same share."""

    def __init__(self, ranks: int = TP) -> None:
        self.world_size, self.rank_in_group, self.device_group, self.sums = ranks, 0, ProcessGroup(), 0
        self.pcie_ipc_comm = None

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sums += 1
        return x * self.world_size


class EngineFusedNorm:
    """What SGLang's fused function does here: ``answers`` are its results, (None, None) where it declines."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.declines = False

    def __call__(
        self, input_tensor: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, max_token_num: int = 2048,
        use_oneshot: bool | None = None, trigger_completion_at_end: bool = False, fp32_acc: bool = True,
        use_attn_tp_group: bool = True,
    ) -> Any:  # fmt: skip
        self.calls.append({"m": input_tensor.shape[0], "use_attn_tp_group": use_attn_tp_group, "eps": eps})
        if self.declines:
            return None, None
        return torch.full_like(input_tensor, 7.0), torch.full_like(residual, 8.0)


ENGINE = EngineFusedNorm()
_LIBRARY: list[torch.library.Library] = []


def give_the_operator_a_cpu() -> None:
    """Once a process: SGLang's operator, on CPU tensors, is ``ENGINE``."""
    if not _LIBRARY:
        import sglang.srt.layers.flashinfer_comm_fusion  # noqa: F401  defines the operator

        _LIBRARY.append(torch.library.Library("sglang", "IMPL"))
        _LIBRARY[0].impl("flashinfer_allreduce_residual_rmsnorm", ENGINE, "CPU")


class FusedMachine:
    """The plugin with ``finalize`` named, over a fake fusion, and a model runner that is about to warm up."""

    def __init__(
        self, *, finalize: str = "fake", fusion: FakeFusion | None = None, strict: bool = False,
        dtype: torch.dtype = torch.float32, service: FinalizeService | None = None, checked: bool = False,
        agreement: Agreement | None = None,
    ) -> None:  # fmt: skip
        self.fusion = fusion or FakeFusion()
        settings = load_settings(None, device="cpu", finalize=finalize, sglang_strict=strict, checked=checked)
        named = requested_fusion(settings)
        container = build(settings, adapters=[self.fusion.entry()], gdn_decode="reference", gdn_extend="reference",
                          gdn_verify="reference", conv="reference", finalize=named or "off")  # fmt: skip
        self.counters: Counters = container.counters()
        agreements = Agreements(lambda _: agreement or Both())
        self.service = service or FinalizeService(
            container.registry(), named or "off", WorkspaceRegistry(synchronise=lambda _: None), self.counters,
            checked=checked, agreements=agreements, facts=lambda device: DeviceFacts(device=device),
        )  # fmt: skip
        container.finalize.override(self.service)
        self.container = container
        self.running = sglang_plugin.start(settings, installed_seam(), PLACE, container, agreements)
        self.dtype = dtype
        self.runner = model_runner(dtype)

    @property
    def fused(self) -> list[tuple[str, Tensor]]:
        """The calls that our workspace served."""
        return self.fusion.made[0].calls if self.fusion.made else []

    @property
    def notes(self) -> str:
        return "\n".join(self.running.fusion.notes)

    def warm_up(self) -> None:
        """What BaseRunner.warmup does first on a GPU."""
        from sglang.srt.model_executor.runner.base_runner import BaseRunner

        BaseRunner._pre_initialize_flashinfer_allreduce_workspace(SimpleNamespace(model_runner=self.runner))

    def norm(self, m: int, *, hidden: int = HIDDEN, attention: bool = True, **changes: Any) -> Any:
        """SGLang's own Gemma-style norm on ``m`` tokens, through its fused forward, as a layer calls it."""
        from sglang.srt.layers.layernorm import _forward_with_allreduce_fusion

        norm = gemma(hidden, self.dtype)
        x, residual = (torch.randn(m, hidden).to(self.dtype) for _ in range(2))
        if attention:
            return x, residual, norm, norm.forward_with_allreduce_fusion(x, residual)
        weight = norm.gemma_weight
        return x, residual, norm, _forward_with_allreduce_fusion(norm, x, residual, None, weight, False)

    def reasons(self, counter: str) -> dict[str, int]:
        """Reasons of ``counter``, with their counts."""
        return {
            dict(labels)["reason"]: value for (name, labels), value in self.counters.snapshot().items()
            if name == counter and dict(labels).get("port") == "finalize_fusion"
        }  # fmt: skip


def gemma(hidden: int, dtype: torch.dtype, eps: float = EPS) -> Any:
    """SGLang's Gemma-style norm with loaded weights."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    norm = GemmaRMSNorm(hidden, eps=eps).to(dtype)
    with torch.no_grad():
        norm.weight.weight_loader(norm.weight, torch.randn(hidden).to(dtype) * 0.1)
    return norm


def model_runner(
    dtype: torch.dtype = torch.float32, *, draft: bool = False, device: str = "cpu", hidden: int = HIDDEN, **text: Any
) -> Any:
    """What the seam and SGLang's warm-up read of a ModelRunner; ``text`` changes the model's configuration."""
    model = torch.nn.Module()
    model.shared_experts_config = None
    config = {"model_type": "qwen3_5_moe_text", "rms_norm_eps": EPS, "num_experts_per_tok": TOP_K} | text
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**config), hidden_size=hidden),
        dtype=dtype, device=device, gpu_id=0, is_draft_worker=draft, model=model, max_running_requests=8,
        spec_algorithm=SimpleNamespace(is_speculative=lambda: False), ps=SimpleNamespace(pp_size=1),
    )  # fmt: skip


def gate_function() -> Any:
    """SGLang's gate, as its layers look it up."""
    return pkgutil.resolve_name(installed_seam().targets["fusion_gate"].path)


def gate(m: int) -> bool:
    """What SGLang's layers ask."""
    return bool(gate_function()(m))


@contextmanager
def launch(**changes: Any) -> Iterator[dict[str, Group]]:
    """SGLang's parallel configuration: two tensor-parallel ranks, with ``changes``; its groups."""
    from sglang.srt.runtime_context import get_parallel

    widths = {
        "tp_size": TP, "attn_tp_size": TP, "moe_tp_size": TP, "moe_ep_size": 1, "moe_dp_size": 1, "pp_size": 1,
        "attn_cp_size": 1, "attn_dp_size": 1,
    }  # fmt: skip
    ranks: dict[str, Any] = {"tp_rank": 0, "attn_tp_rank": 0, "moe_tp_rank": 0, "moe_ep_rank": 0, "dcp_enabled": False}
    names = ("tp", "attn_tp", "moe_tp", "moe_ep")
    groups = {f"{name}_group": Group((widths | changes)[f"{name}_size"]) for name in names}
    with get_parallel().override(**widths | ranks | groups | changes):
        yield groups


def prepared(**changes: Any) -> FusedMachine:
    machine = FusedMachine(**changes)
    machine.warm_up()
    assert machine.running.fusion.prepared, machine.notes
    return machine


def assert_left_to_sglang(machine: FusedMachine, reason: str) -> None:
    assert machine.fusion.attempts == 0
    assert reason in machine.notes
    assert reason in machine.reasons("plans_refused")
    assert not gate(4)


def fused(*tensors: torch.Tensor, **more: Any) -> Any:
    """SGLang's function as its norms import it, late."""
    from sglang.srt.layers.flashinfer_comm_fusion import flashinfer_allreduce_residual_rmsnorm

    names = ("input_tensor", "residual", "weight")
    return flashinfer_allreduce_residual_rmsnorm(**dict(zip(names, tensors, strict=True)), **({"eps": EPS} | more))


def run_step(runner: Any, mode: Any, inside: Any) -> Any:
    """``inside`` while ModelRunner.forward runs a batch of ``mode``."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    class ReachedError(Exception):
        def __init__(self, value: Any) -> None:
            self.value = value

    def apply_deprecated_skip_attn_backend_init(_: Any) -> None:
        raise ReachedError(inside())  # ModelRunner.forward's first statement

    batch = SimpleNamespace(
        forward_mode=mode, apply_deprecated_skip_attn_backend_init=apply_deprecated_skip_attn_backend_init
    )
    try:
        ModelRunner.forward(runner, batch)
    except ReachedError as reached:
        return reached.value
    raise AssertionError("ModelRunner.forward did not begin as expected")


def sglangs_switch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's own CuTe DSL fusion, switched on as its release does it."""
    from sglang.srt.runtime_context import get_exec

    if installed_seam().version == "0.5.20":
        monkeypatch.setenv("SGLANG_FLASHINFER_MNNVL_CUTEDSL_AR_FUSION", "1")
        return ExitStack()
    return get_exec().comm.override(flashinfer_allreduce_fusion_backend="cutedsl")
