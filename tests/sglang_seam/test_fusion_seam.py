"""All-reduce + residual + norm inside SGLang: who serves it, what is left to SGLang and why, and never a wrong sum."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fusion_machine import (
    ENGINE,
    EPS,
    HIDDEN,
    TP,
    FusedMachine,
    Group,
    gate,
    gate_function,
    gemma,
    give_the_operator_a_cpu,
    launch,
    model_runner,
)
from seam_machine import close, installed_seam

from finalize.finalize_fakes import FakeFusion
from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seam_choices import requested_fusion
from qwen35.adapters.sglang.seam_fusion_facts import FORWARD_MODES
from qwen35.domain.errors import (
    ConfigurationError,
    CreationError,
    Qwen35Error,
    UnavailableError,
    UnsupportedError,
)
from qwen35.settings import load_settings


@pytest.fixture(autouse=True)
def groups() -> Iterator[dict[str, Group]]:
    give_the_operator_a_cpu()
    ENGINE.calls.clear()
    ENGINE.declines = False
    with launch() as made:
        yield made


def prepared(**changes: Any) -> FusedMachine:
    machine = FusedMachine(**changes)
    machine.warm_up()
    assert machine.running.fusion.prepared, machine.notes
    return machine


@pytest.mark.row("B13")
def test_a_named_adapter_opens_the_gate_and_serves_sglangs_norm() -> None:
    machine = FusedMachine()
    assert not gate(4), "nothing is fused before the workspace is there"
    machine.warm_up()
    assert gate(4)
    x, residual, _, (norm, total) = machine.norm(4)
    assert [name for name, _ in machine.fused] == ["all-reduce"]
    assert norm.shape == total.shape == x.shape
    assert not ENGINE.calls
    assert machine.counters.total("calls", port="finalize_fusion", adapter="fake", mode="eager") == 1
    assert machine.fused[0][1] is residual, "no copy of an aligned residual"


@pytest.mark.parametrize("m", [0, 1, 2048, 2049])
def test_the_gate_is_open_for_one_to_as_many_tokens_as_the_workspace_takes(m: int) -> None:
    machine = prepared()
    assert gate(m) is (1 <= m <= 2048)
    assert list(machine.reasons("fusions_declined")) == ([] if gate(m) else [f"m requires 1..2048, got {m}"])


def test_the_workspace_is_made_for_sglangs_group_and_the_multiplier_as_applied(groups: dict[str, Group]) -> None:
    machine = prepared(dtype=torch.bfloat16)
    signature = machine.fusion.made[0].signature
    assert signature.group is groups["tp_group"].device_group
    assert (signature.tp_size, signature.rank, signature.hidden, signature.max_m) == (TP, 0, HIDDEN, 2048)
    assert (signature.dtype, signature.eps, signature.weight_bias) == ("bfloat16", EPS, 0.0)
    assert not signature.speculative


@pytest.mark.row("C08")
def test_preparation_happens_once_and_not_for_a_draft_model() -> None:
    machine = FusedMachine()
    machine.runner = model_runner(draft=True)
    machine.warm_up()
    assert machine.fusion.attempts == 0
    machine.runner = model_runner()
    machine.warm_up()
    machine.warm_up()
    assert machine.fusion.attempts == 1
    machine.runner = model_runner(draft=True)
    machine.warm_up()
    assert machine.fusion.attempts == 1
    assert gate(3), "the draft's warm-up does not take the target's workspace away"


@pytest.mark.row("C08")
def test_sglangs_own_warm_up_prepares_once_and_before_autotune(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.runner import base_runner

    machine = FusedMachine()
    machine.runner = model_runner(device="cuda")
    found: list[bool] = []

    def autotunes(_: Any) -> bool:
        found.append(machine.running.fusion.prepared)
        return False

    class Runner(base_runner.BaseRunner):  # type: ignore[misc]
        def __init__(self) -> None:
            self.model_runner = machine.runner

    monkeypatch.setattr(base_runner, "should_run_flashinfer_autotune", autotunes)
    Runner.__abstractmethods__ = frozenset()
    for _ in range(2):
        Runner().warmup()
    assert found == [True]
    assert machine.fusion.attempts == 1


# what makes a launch ineligible, one thing at a time


@pytest.mark.row("B13", "C01")
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"tp_size": 1, "attn_tp_size": 1, "moe_tp_size": 1}, "tensor parallelism requires at least 2 ranks, got 1"),
        ({"attn_cp_size": 2, "attn_tp_size": 1}, "attention context parallelism requires 1, got 2"),
        ({"attn_dp_size": 2, "attn_tp_size": 1}, "attention data parallelism requires 1, got 2"),
    ],
)
def test_sizes_against_the_launch(sizes: dict[str, int], reason: str) -> None:
    machine = FusedMachine()
    with launch(**sizes):
        machine.warm_up()
        assert_left_to_sglang(machine, reason)


@pytest.mark.row("B13", "C01")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"model_type": "qwen3_5_text"}, "model type requires qwen3_5_moe_text, got qwen3_5_text"),
        ({"model_type": "llama"}, None),
    ],
)
def test_models_that_are_not_fused(text: dict[str, Any], reason: str | None) -> None:
    machine = FusedMachine()
    machine.runner = model_runner(**text)
    machine.warm_up()
    assert machine.fusion.attempts == 0
    if reason is None:
        assert "llama is not Qwen3.5" in machine.notes
    else:
        assert_left_to_sglang(machine, reason)


@pytest.mark.row("B13")
def test_flags_against_the_launch() -> None:
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.runtime_context import get_exec, get_flags

    flags = [
        (get_flags().dp.override(enabled=True), "attention requires no data parallelism"),
        (get_flags().moe.override(a2a_backend=MoeA2ABackend.DEEPEP),
         "expert dispatch requires no all-to-all backend, got deepep"),
        (get_exec().comm.override(enable_quant_communications=True), "all-reduce requires unquantised communication"),
    ]  # fmt: skip
    for flag, reason in flags:
        machine = FusedMachine()
        with flag:
            machine.warm_up()
            assert_left_to_sglang(machine, reason)
        sglang_plugin.uninstall()


@pytest.mark.row("C09")
def test_visual_inputs_between_layers_are_never_added_to_a_share() -> None:
    machine = FusedMachine()
    machine.runner.model.deepstack_visual_indexes = [5]
    machine.warm_up()
    assert_left_to_sglang(machine, "hidden states require no deepstack input")


def test_half_precision_is_left_to_sglang() -> None:
    machine = FusedMachine()
    machine.runner = model_runner(torch.float16)
    machine.warm_up()
    assert_left_to_sglang(machine, "dtype requires bfloat16 or float32, got float16")


def test_a_strict_launch_that_cannot_be_fused_is_an_error() -> None:
    machine = FusedMachine(strict=True)
    machine.runner = model_runner(model_type="qwen3_5_text")
    with pytest.raises(UnsupportedError, match="fusion by fake: model type requires"):
        machine.warm_up()


@pytest.mark.row("B17")
def test_multiplexed_streams_are_refused_when_the_workspace_is_asked_for() -> None:
    from sglang.srt.runtime_context import get_disagg

    machine = FusedMachine()
    with get_disagg().override(enable_pdmux=True):
        with pytest.raises(ConfigurationError, match="multiplexed prefill and decode streams"):
            machine.warm_up()
        assert not gate(4)
        sglang_plugin.uninstall()
        silent = FusedMachine(finalize="auto")
        silent.warm_up()
    assert silent.fusion.attempts == 0


@pytest.mark.row("C07")
def test_pipeline_parallelism_is_refused() -> None:
    machine = FusedMachine()
    with launch(pp_size=2), pytest.raises(ConfigurationError, match="'fake' requires pipeline parallelism of 1, got 2"):
        machine.warm_up()
    assert machine.fusion.attempts == 0


def test_an_adapter_that_cannot_make_its_workspace_is_an_error_with_every_ranks_reason() -> None:
    machine = FusedMachine(fusion=FakeFusion(fail=RuntimeError("no peer memory")))
    with pytest.raises(CreationError, match="rank 0: RuntimeError: no peer memory; rank 1"):
        machine.warm_up()
    assert not gate(4)


def test_sglangs_cutedsl_fusion_asks_for_the_workspace_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with sglangs_switch(monkeypatch):
        machine = FusedMachine()
        assert installed_seam().cutedsl_on()
        if installed_seam().version == "0.5.20":
            machine.warm_up()
        else:
            machine.running.fusion.prepare(machine.service, machine.runner)
    assert machine.fusion.attempts == 0
    assert "asks for the workspace itself" in machine.notes
    assert not gate(4)


# what makes a step or a call ineligible


@pytest.mark.row("B13")
@pytest.mark.parametrize("mode", sorted(FORWARD_MODES))
def test_forward_modes_that_fuse(mode: str) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    machine, fuses = prepared(), mode in ("DECODE", "EXTEND", "TARGET_VERIFY")
    assert run_step(machine.runner, ForwardMode[mode], lambda: gate(4)) is fuses
    if not fuses:
        (reason,) = machine.reasons("fusions_declined")
        assert reason.startswith("forward mode requires decode, extend or target verify, got")
    assert gate(4), "outside a step, as in a capture"


def test_every_forward_mode_of_sglang_has_a_name_here() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    assert {mode.name for mode in ForwardMode} == set(FORWARD_MODES)


def test_a_draft_models_step_and_scattered_inputs_are_declined() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_flags, get_forward

    machine = prepared()
    assert not run_step(model_runner(draft=True), ForwardMode.DECODE, lambda: gate(4))
    with get_flags().moe.override(in_speculative_scope=True):
        assert not gate(4)
        machine.norm(4)
    with get_forward().scoped(attn_input_scattered=True):
        assert not gate(4)
    assert gate(4)
    assert not machine.fused
    assert machine.reasons("fusions_declined") == {
        "fusion requires the target model, got the draft model": 2,
        "attention input requires to be whole on every rank, got a scattered one": 1,
    }
    assert machine.reasons("fallbacks") == {"fusion requires the target model, got the draft model": 1}


def test_calls_that_the_workspace_cannot_take_go_to_sglangs_own_function() -> None:
    machine = prepared()
    residual, weight = torch.randn(4, HIDDEN), torch.ones(HIDDEN)
    cases = {
        "m requires 1..2048, got 2049": (torch.randn(2049, HIDDEN), torch.randn(2049, HIDDEN), weight),
        "m requires 1..2048, got 0": (torch.randn(0, HIDDEN), torch.randn(0, HIDDEN), weight),
        "local must be [m, D] = [4, 16], got [4, 8]": (torch.randn(4, 8), torch.randn(4, 8), torch.ones(8)),
        "local must be contiguous": (torch.randn(HIDDEN, 4).t(), residual, weight),
        "residual must be contiguous": (torch.randn(4, HIDDEN), torch.randn(HIDDEN, 4).t(), weight),
        "local must be float32, got bfloat16": (residual.bfloat16(), residual.bfloat16(), weight.bfloat16()),
        "gamma must be float32, got bfloat16": (residual, residual, weight.bfloat16()),
        "input requires [m, D], got 3 dimensions": (residual[None], residual[None], weight),
    }
    for reason, (x, total, gamma) in cases.items():
        before = machine.reasons("fallbacks")
        norm, _ = fused(x, total, gamma)
        (new,) = set(machine.reasons("fallbacks")) - set(before)
        assert new.startswith(reason)
        assert bool((norm == 7.0).all()), "SGLang's own function answered"
    assert not machine.fused
    assert len(ENGINE.calls) == len(cases)


def test_another_eps_is_another_norm() -> None:
    machine = prepared()
    x = torch.randn(4, HIDDEN)
    fused(x, x, torch.ones(HIDDEN), eps=1e-5)
    assert machine.reasons("fallbacks") == {"eps requires 1e-06, got 1e-05": 1}
    assert not machine.fused


@pytest.mark.row("B16")
def test_a_sum_over_another_group_is_left_to_sglang() -> None:
    with launch(tp_size=4, attn_tp_size=4, moe_dp_size=2, moe_tp_size=2):
        machine = prepared()
        machine.norm(4, attention=False)
        assert not machine.fused
        assert list(machine.reasons("fallbacks")) == [
            "sum requires the tensor-parallel group of 4 ranks, got one of 2"
        ]
        machine.norm(4)
        assert len(machine.fused) == 1, "attention's own group is the workspace's"


@pytest.mark.row("B16")
def test_experts_over_all_ranks_sum_over_all_ranks() -> None:
    with launch(moe_ep_size=2, moe_tp_size=1):
        machine = prepared()
        machine.norm(4, attention=False)
        assert len(machine.fused) == 1


@pytest.mark.parametrize("name", ["trigger_completion_at_end", "fp32_acc", "use_oneshot"])
@pytest.mark.parametrize("value", [True, False])
def test_how_sglangs_kernel_would_run_does_not_concern_ours(name: str, value: bool) -> None:
    machine = prepared()
    x = torch.randn(4, HIDDEN)
    fused(x, x.clone(), torch.ones(HIDDEN), **{name: value})
    assert len(machine.fused) == 1


def test_an_address_is_never_a_reason() -> None:
    machine = prepared()
    odd = torch.randn(4 * HIDDEN + 1)[1:].view(4, HIDDEN)
    assert odd.data_ptr() % 16
    fused(odd, torch.randn(4, HIDDEN), torch.ones(HIDDEN))
    assert len(machine.fused) == 1
    assert not machine.reasons("fallbacks")


def test_a_call_that_nobody_fuses_is_summed_before_its_norm(groups: dict[str, Group]) -> None:
    machine = prepared()
    ENGINE.declines = True
    weight = gemma(HIDDEN, torch.float32).gemma_weight
    x, residual = torch.randn(4, HIDDEN).t().contiguous().t(), torch.randn(4, HIDDEN)
    before = residual.clone()
    norm, total = fused(x, residual, weight)
    if installed_seam().completes_declined_norm:
        assert norm is None
        assert groups["attn_tp_group"].sums == 0, "SGLang 0.5.23 sums by itself"
        return
    expected = residual + TP * x
    close(total, expected, 1e-6)
    close(norm, expected * torch.rsqrt(expected.square().mean(-1, keepdim=True) + EPS) * weight, 1e-6)
    assert groups["attn_tp_group"].sums == 1
    assert torch.equal(residual, before), "SGLang takes the residual of a fused norm for unchanged"
    assert machine.counters.total("calls", port="finalize_fusion", adapter="engine:unfused") == 1


# counted only, and off


def test_unset_keeps_sglangs_own_choice_and_counts_it() -> None:
    machine = FusedMachine(finalize="auto")
    machine.warm_up()
    assert not gate(4)
    _, _, _, (norm, total) = machine.norm(4)
    assert bool((norm == 7.0).all())
    assert bool((total == 8.0).all())
    assert machine.counters.total("calls", port="finalize_fusion", adapter="engine:flashinfer", mode="eager") == 1
    ENGINE.declines = True
    machine.norm(4)
    assert machine.counters.total("calls", port="finalize_fusion", adapter="engine:unfused") == 1
    assert machine.fusion.attempts == 0


def test_off_is_like_unset() -> None:
    assert requested_fusion(FusedMachine(finalize="off").container.settings()) is None


def test_switched_off_the_gate_closes_and_sglangs_own_function_serves() -> None:
    machine = prepared()
    sglang_plugin.uninstall()
    assert not gate(4)
    machine.norm(4)
    assert len(ENGINE.calls) == 1
    assert not machine.fused


def test_the_gate_and_the_norm_can_be_traced_by_torch_compile_and_are_then_sglangs() -> None:
    machine, fuses = prepared(), gate_function()

    def boundary(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm = fused(x, residual, weight)[0]
        return norm + 1.0 if fuses(4) else norm

    x, weight = torch.randn(4, HIDDEN), torch.ones(HIDDEN)
    compiled = torch.compile(boundary, backend="eager", fullgraph=True)
    assert bool((compiled(x, x.clone(), weight) == 7.0).all())
    assert not machine.fused
    assert gate(4)


# what is said before and when the engine stands


def test_explain_has_lines_for_fusion_relay_and_shadow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = sglang_plugin.explain()
    assert "fusion: SGLang's own choice, counted (QWEN35_FINALIZE is not set)" in text
    assert "shadow: none (QWEN35_GDN_SHADOW is not set)" in text
    mended = "are mended" if installed_seam().version == "0.5.20" else "which this release mended itself"
    assert mended in next(line for line in text.splitlines() if line.startswith("  relay: "))
    monkeypatch.setenv("QWEN35_DEVICE", "cpu")
    monkeypatch.setenv("QWEN35_FINALIZE", "triton")
    monkeypatch.setenv("QWEN35_GDN_SHADOW", "reference:0.01")
    text = sglang_plugin.explain()
    assert "fusion: triton (QWEN35_FINALIZE), which cannot serve here: device requires cuda, got cpu" in text
    assert "shadow: none; reference (QWEN35_GDN_SHADOW) needs a phase that an adapter of ours serves" in text
    monkeypatch.setenv("QWEN35_FINALIZE", "reference")
    monkeypatch.setenv("QWEN35_GDN_DECODE", "reference")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_text"}')
    text = sglang_plugin.explain(str(tmp_path))
    assert "which cannot serve here: model type requires qwen3_5_moe_text, got qwen3_5_text" in text
    assert "shadow: reference repeats one eager call in 100 of each phase (QWEN35_GDN_SHADOW)" in text
    assert "fusion: reference (QWEN35_FINALIZE) for all-reduce + residual + norm" in sglang_plugin.explain()
    monkeypatch.setenv("QWEN35_FINALIZE", "off")
    assert "counted (QWEN35_FINALIZE is off)" in sglang_plugin.explain()


def test_what_was_decided_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    machine = prepared()
    sglang_plugin.announce(machine.container.settings(), machine.running)
    assert "fake serves all-reduce + residual + norm of 1 to 2048 tokens" in machine.running.announced[0]


@pytest.mark.parametrize(
    ("name", "says"), [("triton", "device requires cuda, got cpu"), ("tritn", "Did you mean 'triton'")]
)
def test_a_demand_that_cannot_be_met_ends_the_launch_with_one_line(name: str, says: str) -> None:
    with pytest.raises(Qwen35Error, match=says):
        sglang_plugin.refuse_impossible(load_settings(None, device="cpu", finalize=name))


def test_sglangs_refused_switch_is_explained_when_the_plugin_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with sglangs_switch(monkeypatch):
        FusedMachine()
    assert "SGLang itself refuses the model; switch it off and set QWEN35_FINALIZE" in caplog.text


@pytest.mark.parametrize("key", ["fused_norm", "fusion_gate", "fusion_prepare", "finalize_workspace"])
def test_a_renamed_target_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    target = installed_seam().targets[key].path
    module, _, name = target.partition(":")
    *owner, last = name.split(".")
    monkeypatch.delattr(pkgutil.resolve_name(":".join([module, *owner]) if owner else module), last)
    with pytest.raises(UnavailableError) as caught:
        FusedMachine()
    assert len(caught.value.reasons) == 1
    assert f"{target} is not there" in str(caught.value)
    assert seam.installed() == ()


def test_a_changed_argument_of_the_fused_norm_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.layers.flashinfer_comm_fusion as comm

    def changed(input_tensor: Any, residual: Any, weight: Any, eps: float, group: Any) -> None: ...

    monkeypatch.setattr(comm, "flashinfer_allreduce_residual_rmsnorm", changed)
    with pytest.raises(UnavailableError, match=r"must take \(input_tensor, .*use_attn_tp_group\), takes .*group\)"):
        FusedMachine()
    assert seam.installed() == ()


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
