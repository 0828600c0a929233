"""Fused norms inside SGLang: what our adapter serves, what goes to SGLang's own function, and never a wrong sum."""

from __future__ import annotations

import pytest
import torch
from fusion_machine import (
    ENGINE,
    EPS,
    HIDDEN,
    TP,
    FusedMachine,
    Group,
    fused,
    gate,
    gate_function,
    gemma,
    launch,
    model_runner,
    prepared,
    run_step,
)
from seam_machine import close, installed_seam

from qwen35 import sglang_plugin
from qwen35.adapters.sglang.seam_choices import requested_fusion
from qwen35.adapters.sglang.seam_fusion_facts import FORWARD_MODES

pytestmark = pytest.mark.usefixtures("groups")


@pytest.mark.row("B13")
@pytest.mark.parametrize("mode", sorted(FORWARD_MODES))
def test_forward_modes_that_fuse(mode: str) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    machine, fuses = prepared(), mode in ("DECODE", "EXTEND", "TARGET_VERIFY")
    assert run_step(machine.runner, ForwardMode[mode], lambda: gate(4)) is fuses
    if not fuses:
        (reason,) = machine.reasons("fusions_declined")
        assert reason == "forward mode requires decode, extend or target verify"
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
        "fusion requires the target model": 2,
        "attention input requires to be whole on every rank": 1,
    }
    assert machine.reasons("fallbacks") == {"fusion requires the target model": 1}


def test_calls_that_the_workspace_cannot_take_go_to_sglangs_own_function() -> None:
    machine = prepared()
    residual, weight = torch.randn(4, HIDDEN), torch.ones(HIDDEN)
    fused(torch.randn(2049, HIDDEN), torch.randn(2049, HIDDEN), weight)
    cases = {
        "m requires 1..2048": (torch.randn(0, HIDDEN), torch.randn(0, HIDDEN), weight),
        "local must be [m, D] = [4, 16]": (torch.randn(4, 8), torch.randn(4, 8), torch.ones(8)),
        "local must be contiguous": (torch.randn(HIDDEN, 4).t(), residual, weight),
        "residual must be contiguous": (torch.randn(4, HIDDEN), torch.randn(HIDDEN, 4).t(), weight),
        "local must be float32": (residual.bfloat16(), residual.bfloat16(), weight.bfloat16()),
        "gamma must be float32": (residual, residual, weight.bfloat16()),
        "input requires [m, D]": (residual[None], residual[None], weight),
    }
    for reason, (x, total, gamma) in cases.items():
        before = machine.reasons("fallbacks")
        norm, _ = fused(x, total, gamma)
        after = machine.reasons("fallbacks")
        (new,) = (label for label in after if after[label] != before.get(label))
        assert new.startswith(reason)
        assert bool((norm == 7.0).all()), "SGLang's own function answered"
    assert not machine.fused
    assert len(ENGINE.calls) == len(cases) + 1
    assert machine.reasons("fallbacks")["m requires 1..2048"] == 2, "too many and none are one kind"


def test_another_eps_is_another_norm() -> None:
    machine = prepared()
    x = torch.randn(4, HIDDEN)
    fused(x, x, torch.ones(HIDDEN), eps=1e-5)
    assert machine.reasons("fallbacks") == {"eps requires 1e-06": 1}
    assert not machine.fused


@pytest.mark.row("B16")
def test_a_sum_over_another_group_is_left_to_sglang() -> None:
    with launch(tp_size=4, attn_tp_size=4, moe_dp_size=2, moe_tp_size=2):
        machine = prepared()
        machine.norm(4, attention=False)
        assert not machine.fused
        assert list(machine.reasons("fallbacks")) == ["sum requires the tensor-parallel group of 4 ranks"]
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
