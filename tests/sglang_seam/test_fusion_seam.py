"""All-reduce + residual + norm inside SGLang: which launches our adapter serves, and when it is prepared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from finalize_fakes import FakeFusion
from fusion_machine import (
    ENGINE,
    EPS,
    HIDDEN,
    TP,
    FusedMachine,
    Group,
    assert_left_to_sglang,
    gate,
    launch,
    model_runner,
    prepared,
    sglangs_switch,
)
from seam_machine import installed_seam

from qwen35 import sglang_plugin
from qwen35.domain.errors import ConfigurationError, UnavailableError, UnsupportedError

pytestmark = pytest.mark.usefixtures("groups")


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
    assert list(machine.reasons("fusions_declined")) == ([] if gate(m) else ["m requires 1..2048"])


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


def test_a_strict_launch_of_another_family_is_an_error() -> None:
    machine = FusedMachine(strict=True)
    machine.runner = model_runner(model_type="llama")
    with pytest.raises(UnsupportedError, match=r"fusion by fake: llama is not Qwen3\.5"):
        machine.warm_up()
    machine.runner = model_runner(model_type="llama", draft=True)
    machine.warm_up()  # of a draft model nothing is asked
    silent = FusedMachine(finalize="auto", strict=True)
    silent.runner = model_runner(model_type="llama")
    silent.warm_up()


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
    says = r"finalize = 'fake'.*rank 0: RuntimeError: no peer memory; rank 1"
    with pytest.raises(UnavailableError, match=says) as caught:
        machine.warm_up()
    assert not isinstance(caught.value, RuntimeError), "SGLang would call that a failed capture"
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
