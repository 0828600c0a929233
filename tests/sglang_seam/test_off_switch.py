"""The plugin's own switch is read before everything else, and off is off."""

from __future__ import annotations

from pathlib import Path

import pytest
from seam_machine import installed_seam

from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam


def test_the_plugin_can_be_turned_off_by_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_SGLANG_PLUGIN", "off")
    sglang_plugin.register()
    assert seam.installed() == ()


@pytest.mark.parametrize("switch", ["environment", "file"])
@pytest.mark.parametrize(
    ("variable", "value"),
    [("QWEN35_GDN_PREFILL", "x"), ("QWEN35_CHECKED", "perhaps"), ("QWEN35_GDN_DECODE", "nobody"),
     ("QWEN35_DEVICE", "tpu")],
)  # fmt: skip
def test_off_comes_before_every_other_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    if switch == "environment":
        monkeypatch.setenv("QWEN35_SGLANG_PLUGIN", "off")
    else:
        (tmp_path / "qwen35.toml").write_text('sglang_plugin = false\ngdn_prefill = "x"\n')
    sglang_plugin.register()
    assert seam.installed() == ()
    text = sglang_plugin.explain("/not/a/model")
    assert "not installed: QWEN35_SGLANG_PLUGIN is off" in text
    assert "SGLang runs as if the plugin were not there" in text


def test_off_in_the_environment_comes_before_a_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen35.toml").write_bytes(b"sglang_plugin = = \xff")
    with pytest.raises(SystemExit, match=r"qwen35\.toml"):
        sglang_plugin.register()
    monkeypatch.setenv("QWEN35_SGLANG_PLUGIN", "off")
    sglang_plugin.register()
    assert seam.installed() == ()
    assert "QWEN35_SGLANG_PLUGIN is off" in sglang_plugin.explain()


def test_on_in_the_environment_comes_before_off_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen35.toml").write_text("sglang_plugin = false\n")
    monkeypatch.setenv("QWEN35_SGLANG_PLUGIN", "true")
    sglang_plugin.register()
    assert seam.installed() == (installed_seam().targets["scheduler"].path,)


def test_a_switch_that_cannot_be_read_ends_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_SGLANG_PLUGIN", "perhaps")
    with pytest.raises(SystemExit, match="sglang_plugin = 'perhaps'"):
        sglang_plugin.register()


@pytest.mark.parametrize(
    "value", [None, "", "none", "qwen35", "other, qwen35 ", "other,,", ",", " ", "QWEN35", "qwen35.sglang_plugin"]
)
def test_explain_says_whether_sglangs_loader_would_load_the_plugin(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins_by_group

    monkeypatch.setenv("QWEN35_GDN_DECODE", "reference")
    if value is None:
        monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("SGLANG_PLUGINS", value)
    loaded = "qwen35" in load_plugins_by_group(GENERAL_PLUGINS_GROUP)
    text = sglang_plugin.explain()
    assert (f"not installed: SGLANG_PLUGINS = {value!r} does not name qwen35" in text) is not loaded, text
    assert ("SGLang runs as if the plugin were not there" in text) is not loaded, text
    assert ("decode: reference" in text) is loaded, text


def test_what_sglang_does_not_load_cannot_end_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    monkeypatch.setenv("QWEN35_SGLANG_PLUGIN", "off")
    monkeypatch.setenv("QWEN35_GDN_DECODE", "nobody")
    said = sglang_plugin.explained()
    assert not said.ends
    for why in ("QWEN35_SGLANG_PLUGIN is off", "SGLANG_PLUGINS = 'none' does not name qwen35"):
        assert f"not installed: {why}" in said.text
