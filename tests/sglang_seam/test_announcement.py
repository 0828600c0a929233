"""What an engine says of itself at start, and that the command says the same of a launch to come."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from seam_machine import PLACE, Machine, installed_seam, start

from qwen35 import sglang_plugin
from qwen35.adapters.sglang.seams import installed_release
from qwen35.settings import load_settings


def test_the_engine_says_once_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    settings = load_settings(None, device="cpu", gdn_decode="reference", gdn_fallback="reference64")
    one = sglang_plugin.start(settings, installed_seam(), PLACE, sglang_plugin.make_container(settings, PLACE))
    Machine(draft=2)
    with caplog.at_level(logging.WARNING):
        sglang_plugin.announce(settings, one)
    text = one.announced[0]
    assert text in caplog.text
    assert "decode: reference (QWEN35_GDN_DECODE)" in text
    assert "extend: SGLang's own kernel, counted (QWEN35_GDN_EXTEND is not set)" in text
    assert "reference64 (QWEN35_GDN_FALLBACK), then SGLang's own kernel" in text
    assert "GDN heads 2 (q, k) and 4 (v) on this rank, widths 8 and 6" in text


def test_a_model_without_gdn_layers_is_said(caplog: pytest.LogCaptureFixture) -> None:
    one = start(gdn_decode="reference")
    settings = load_settings(None, device="cpu", gdn_decode="reference", gdn_shadow="reference64:1")
    sglang_plugin.announce(settings, one)
    assert "nothing is routed" in caplog.text
    assert "decode: SGLang's own kernel, uncounted: this model has no Gated DeltaNet layers of Qwen3.5" in caplog.text
    assert "shadow: none" in caplog.text


def test_explain_names_machine_release_model_and_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text", "linear_num_key_heads": 16,'
        ' "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}}'
    )
    monkeypatch.setenv("QWEN35_DEVICE", "cpu")
    monkeypatch.setenv("QWEN35_GDN_EXTEND", "flashinfer")
    monkeypatch.setenv("QWEN35_GDN_VERIFY", "reference")
    text = sglang_plugin.explain(str(tmp_path))
    assert f"SGLang {installed_release()} (tested with 0.5.20 and 0.5.23) on CPU" in text
    assert "extend: flashinfer (QWEN35_GDN_EXTEND), which cannot serve here: " in text
    assert "verify: reference (QWEN35_GDN_VERIFY)" in text
    assert "qwen3_5_moe_text, GDN heads 16 (q, k) and 32 (v)" in text


def test_the_command_finds_the_text_by_its_entry_point() -> None:
    from typer.testing import CliRunner

    from qwen35.cli.sglang_cmd import app

    result = CliRunner().invoke(app, ["explain"])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == sglang_plugin.explain()


def test_explain_says_that_another_family_is_not_routed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "llama is not Qwen3.5: nothing is routed" in sglang_plugin.explain(str(tmp_path))
