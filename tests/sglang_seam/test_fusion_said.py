"""What the plugin says of fusion, relay and shadow, and one clear error where a target moved."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

import pytest
from fusion_machine import FusedMachine, prepared, sglangs_switch
from seam_machine import installed_seam

from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
from qwen35.domain.errors import Qwen35Error, UnavailableError
from qwen35.settings import load_settings

pytestmark = pytest.mark.usefixtures("groups")


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
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_5_text", "linear_num_key_heads": 16, "linear_num_value_heads": 32,'
        ' "linear_key_head_dim": 128, "linear_value_head_dim": 128}'
    )
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
