"""What ``qwen35 sglang explain`` says is what a launch with the same settings does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_install import pretend_release
from typer.testing import CliRunner

from fakes import FakeGatedDeltaRule, fake_entry
from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seam_choices import IDLE, phase_choices
from qwen35.adapters.sglang.seam_model import ModelFacts
from qwen35.cli.main import app
from qwen35.domain.capabilities import Capabilities, Phase
from qwen35.domain.errors import ConfigurationError, UnknownNameError
from qwen35.domain.geometry import GdnGeometry
from qwen35.services.platform import detect_platform
from qwen35.services.registry import AdapterRegistry
from qwen35.settings import ENVIRONMENT_PREFIX, Settings, load_settings

SIZES: dict[str, Any] = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
TEXT: dict[str, Any] = {"model_type": "qwen3_5_moe_text", **SIZES}
PAGE = Path(__file__).parents[2] / "docs" / "sglang.md"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters that need a GPU are refused here whatever the machine has, and no launch has chosen a state dtype."""
    monkeypatch.setenv("QWEN35_DEVICE", "cpu")
    monkeypatch.delenv("SGLANG_MAMBA_SSM_DTYPE", raising=False)


def explained(directory: Path, config: object) -> list[str]:
    (directory / "config.json").write_text(json.dumps(config))
    return [line.strip() for line in sglang_plugin.explain(str(directory)).splitlines()]


def line_of(lines: list[str], beginning: str) -> str:
    (found,) = [line for line in lines if line.startswith(f"{beginning}:")]
    return found


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ([], "the file"),
        ({"text_config": None}, "text_config"),
        ({"text_config": "qwen"}, "text_config"),
        ({"model_type": 35}, "model_type"),
        (TEXT | {"linear_key_head_dim": "128"}, "linear_key_head_dim"),
        (TEXT | {"linear_num_key_heads": True}, "linear_num_key_heads"),
        ({name: size for name, size in TEXT.items() if name != "linear_num_value_heads"}, "linear_num_value_heads"),
        (TEXT | {"linear_num_key_heads": 5}, "linear_num_key_heads"),
        (TEXT | {"linear_value_head_dim": 0}, "linear_value_head_dim"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_models_configuration_is_named_with_the_key(tmp_path: Path, config: object, key: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{re.escape(str(tmp_path))}/config\.json.*{key}"):
        explained(tmp_path, config)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match=re.escape(str(tmp_path / "config.json"))):
        sglang_plugin.explain(str(tmp_path))


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("QWEN35_GDN_SHADOW", "nobody:0.5", "unknown gated_delta_rule adapter 'nobody'"),
        ("QWEN35_GDN_SHADOW", "reference:2", "rate of gdn_shadow"),
        ("QWEN35_CONV", "bogus", "unknown short_convolution adapter 'bogus'"),
        ("QWEN35_GDN_FALLBACK", "nobody", "unknown gated_delta_rule adapter 'nobody'"),
    ],
)
def test_what_does_not_exist_is_an_error_of_both(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match=says):
        sglang_plugin.register()
    assert seam.installed() == ()
    with pytest.raises(ConfigurationError, match=says):
        sglang_plugin.explain()


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("gdn_decode", "Auto", "Did you mean 'auto'"),
        ("gdn_verify", "flashinfer", "device requires cuda"),
        ("gdn_shadow", "reference", "must be 'ADAPTER:RATE'"),
        ("finalize", "OFF", "Did you mean 'off'"),
        ("device", "gpu", "device must be 'auto'"),
        ("dtype", "int4", "Input should be 'auto'"),
    ],
)
def test_an_error_names_the_file_and_key_that_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, says: str
) -> None:
    if setting == "device":
        monkeypatch.delenv("QWEN35_DEVICE")
    more = "" if setting == "gdn_decode" else 'gdn_decode = "reference"\n'
    (tmp_path / "qwen35.toml").write_text(f'{setting} = "{value}"\n{more}')
    with pytest.raises(SystemExit) as ended:
        sglang_plugin.register()
    try:
        explained = sglang_plugin.explain()
    except ConfigurationError as exc:
        explained = str(exc)
    for text in (str(ended.value), explained):
        assert f"({tmp_path / 'qwen35.toml'}: {setting})" in text
        assert says in text


def test_a_switch_in_another_case_is_no_switch_and_no_silence(tmp_path: Path) -> None:
    (tmp_path / "qwen35.toml").write_text("SGLANG_PLUGIN = false\n")
    with pytest.raises(SystemExit, match=r"unknown setting 'SGLANG_PLUGIN'.*Did you mean 'sglang_plugin'"):
        sglang_plugin.register()
    with pytest.raises(UnknownNameError, match="Did you mean 'sglang_plugin'"):
        sglang_plugin.explain()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("QWEN35_GDN_DECODE", "triton"),
        ("QWEN35_GDN_FALLBACK", "triton"),
        ("QWEN35_GDN_SHADOW", "triton:0.5"),
        ("QWEN35_FINALIZE", "triton"),
    ],
)
@pytest.mark.parametrize("release", [None, "0.5.99"])
def test_an_adapter_that_this_machine_lacks_ends_the_launch_in_the_words_of_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, release: str | None
) -> None:
    if release is not None:
        pretend_release(tmp_path, monkeypatch, release)
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as caught:
        sglang_plugin.register()
    text = sglang_plugin.explain()
    assert f"the launch ends: {str(caught.value).removeprefix('qwen35: ')}" in text
    assert "runs as if" not in text


def test_strict_ends_the_launch_where_the_release_is_untested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_release(tmp_path, monkeypatch, "0.5.99")
    assert "runs as if the plugin were not there" in sglang_plugin.explain()
    monkeypatch.setenv("QWEN35_SGLANG_STRICT", "1")
    assert "the launch ends: QWEN35_SGLANG_STRICT is set" in sglang_plugin.explain()


def test_a_phase_that_cannot_be_served_says_that_the_launch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_GDN_DECODE", "triton")
    text = sglang_plugin.explain()
    decode = next(line for line in text.splitlines() if line.startswith("  decode: "))
    assert decode.endswith("; the launch ends")
    assert "what a chosen adapter refuses" not in text


@pytest.mark.parametrize(
    ("more", "then"),
    [
        ({}, "SGLang's own kernel serves"),
        ({"QWEN35_SGLANG_STRICT": "1"}, "the launch ends (QWEN35_SGLANG_STRICT)"),
        ({"QWEN35_SGLANG_STRICT": "1", "QWEN35_GDN_FALLBACK": "reference64"}, "the launch ends (QWEN35_SGLANG_STRICT)"),
    ],
)
def test_a_model_that_the_adapter_refuses_says_who_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, str], then: str
) -> None:
    monkeypatch.setenv("QWEN35_GDN_DECODE", "reference")
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    lines = explained(tmp_path, TEXT | {"mamba_ssm_dtype": "float16"})  # a state dtype that no adapter of ours takes
    decode = line_of(lines, "decode")
    assert "which cannot serve here: " in decode
    assert decode.endswith(f"; {then}")
    assert not any(line.startswith("the launch ends") for line in lines)


def test_a_phase_that_the_adapter_does_not_offer_says_who_serves_it() -> None:
    settings = load_settings(None, device="cpu", gdn_verify="fake")
    fake = FakeGatedDeltaRule(0.0)
    fake.capabilities = Capabilities(phases=frozenset({Phase.DECODE}))
    registry = AdapterRegistry(detect_platform("cpu"), None, [fake_entry("fake", fake)])
    verify = phase_choices(settings, registry, None)[2].text()
    assert "which cannot serve here: verify is not offered" in verify
    assert verify.endswith("; SGLang's own kernel serves")
    with_fallback = load_settings(None, device="cpu", gdn_verify="fake", gdn_fallback="fake")
    again = phase_choices(with_fallback, registry, None)[2].text()
    assert again == verify, "what lacks the phase is no fallback for it"


def test_an_adapter_that_cannot_be_made_says_so_without_a_model_too() -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError("no symbol")

    registry = AdapterRegistry(
        detect_platform("cpu"), None, [replace(fake_entry("fake", FakeGatedDeltaRule(0.0)), create=fails)]
    )
    decode = phase_choices(load_settings(None, device="cpu", gdn_decode="fake"), registry, None)[0].text()
    assert "its factory failed with RuntimeError: no symbol" in decode
    assert decode.endswith("the launch ends")


def test_a_model_that_only_the_fallback_takes_says_that_it_serves() -> None:
    settings = load_settings(None, device="cpu", gdn_decode="reference", gdn_fallback="fake", sglang_strict=True)
    fake = FakeGatedDeltaRule(0.0)
    fake.capabilities = Capabilities(state_dtypes=frozenset({"float16"}))
    registry = AdapterRegistry(detect_platform("cpu"), None, [fake_entry("fake", fake)])
    geometry = GdnGeometry(key_heads=16, value_heads=32, key_width=128, value_width=128)
    facts = ModelFacts(
        family="qwen3_5_moe_text", geometry=geometry, state_dtype=torch.float16, state_source="mamba_ssm_dtype"
    )
    decode = phase_choices(settings, registry, facts)[0].text()
    assert "which cannot serve here: " in decode
    assert decode.endswith("; fake (QWEN35_GDN_FALLBACK) serves")


def test_the_fusion_of_a_dense_model_is_sglangs_unless_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_FINALIZE", "reference")
    config = TEXT | {"model_type": "qwen3_5_text"}
    assert line_of(explained(tmp_path, config), "fusion").endswith("; SGLang's own choice is kept")
    monkeypatch.setenv("QWEN35_SGLANG_STRICT", "1")
    assert line_of(explained(tmp_path, config), "fusion").endswith("; the launch ends (QWEN35_SGLANG_STRICT)")


@pytest.mark.parametrize("named", [True, False])
def test_of_another_family_no_phase_says_that_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if named:
        monkeypatch.setenv("QWEN35_GDN_DECODE", "reference")
        monkeypatch.setenv("QWEN35_GDN_SHADOW", "reference64:0.5")
    lines = explained(tmp_path, SIZES | {"model_type": "qwen3_next"})
    idle = "; reference (QWEN35_GDN_DECODE) serves nothing" if named else ""
    decode = f"decode: SGLang's own kernel, uncounted: qwen3_next is not Qwen3.5{idle}"
    assert line_of(lines, "decode") == decode
    assert line_of(lines, "shadow").startswith("shadow: none")
    assert "nothing is routed" in line_of(lines, "model")


def test_the_state_dtype_is_what_sglang_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_STATE_DTYPE", "bfloat16")
    assert "state torch.float32 (SGLang's default; --mamba-ssm-dtype" in line_of(explained(tmp_path, TEXT), "model")
    config = {"model_type": "qwen3_5_moe", "text_config": TEXT | {"mamba_ssm_dtype": "bfloat16"}}
    assert "state torch.bfloat16 (mamba_ssm_dtype; " in line_of(explained(tmp_path, config), "model")
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float16")
    assert "state torch.float16 (SGLANG_MAMBA_SSM_DTYPE; " in line_of(explained(tmp_path, config), "model")


def test_the_state_dtype_is_read_as_sglang_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from sglang.srt.configs.mamba_utils import mamba2_state_dtype

    for said in (None, "bfloat16", "float8"):
        for ordered in (None, "float16", "float8"):
            if ordered is not None:
                monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", ordered)
            else:
                monkeypatch.delenv("SGLANG_MAMBA_SSM_DTYPE", raising=False)
            config = SimpleNamespace() if said is None else SimpleNamespace(mamba_ssm_dtype=said)
            expected = mamba2_state_dtype(config).temporal
            text = TEXT if said is None else TEXT | {"mamba_ssm_dtype": said}
            assert f"state {expected} (" in line_of(explained(tmp_path, text), "model"), (said, ordered)


def documented() -> dict[str, tuple[str, str]]:
    """The settings table of the page: default and meaning by variable."""
    table = PAGE.read_text().partition("| variable | default | meaning |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    assert len(rows) == len(table.strip().splitlines()) - 1, "a row of another shape"
    return {variable: (default, meaning) for variable, default, meaning in rows}


def test_the_page_lists_every_setting_with_its_default() -> None:
    expected = {
        ENVIRONMENT_PREFIX + name.upper(): "none" if field.default is None else str(field.default).lower()
        for name, field in Settings.model_fields.items()
    }
    assert {variable: default for variable, (default, _) in documented().items()} == expected


def test_the_page_says_which_settings_do_nothing_inside_sglang() -> None:
    says = {variable for variable, (_, meaning) in documented().items() if "nothing inside SGLang" in meaning}
    assert says == {ENVIRONMENT_PREFIX + name.upper() for name in IDLE}


def test_an_unknown_name_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_CONV", "tritn")
    with pytest.raises(UnknownNameError, match="Did you mean 'triton'"):
        sglang_plugin.explain()


@pytest.mark.parametrize(
    ("variables", "code", "says"),
    [
        ({}, 0, "SGLang's own kernel"),
        ({"QWEN35_GDN_DECODE": "reference"}, 0, "decode: reference"),
        ({"QWEN35_SGLANG_PLUGIN": "off", "QWEN35_GDN_DECODE": "triton"}, 0, "not installed"),
        ({"QWEN35_GDN_DECODE": "triton"}, 1, "the launch ends: gated_delta_rule adapter 'triton'"),
        ({"QWEN35_FINALIZE": "reference", "QWEN35_SGLANG_STRICT": "1"}, 1, "; the launch ends (QWEN35_SGLANG_STRICT)"),
        ({"QWEN35_GDN_DECODE": "nobody"}, 2, "unknown gated_delta_rule adapter 'nobody'"),
        ({"QWEN35_DTYPE": "int4"}, 2, "(environment variable QWEN35_DTYPE)"),
    ],
)
def test_the_exit_code_says_whether_a_launch_would_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], code: int, says: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.json").write_text(json.dumps(TEXT | {"model_type": "qwen3_5_text"}))
    result = CliRunner().invoke(app, ["sglang", "explain", "--model", str(tmp_path)])
    assert result.exit_code == code, result.output
    assert says in result.output
