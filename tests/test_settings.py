"""Settings are read once, in one place, and a bad one is a clear error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from qwen35.container import build
from qwen35.domain.errors import ConfigurationError, Qwen35Error, UnknownNameError
from qwen35.settings import LaunchEnvironment, Settings, launch_environment, load_settings, sglang_switched_off


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_defaults_choose_automatically() -> None:
    settings = load_settings()
    assert (settings.gdn_decode, settings.conv) == ("auto", "auto")
    assert (settings.gdn_fallback, settings.checked) == (None, False)


def test_arguments_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen35.toml").write_text('gdn_decode = "a"\ngdn_extend = "a"\nconv = "a"\n')
    monkeypatch.setenv("QWEN35_GDN_DECODE", "b")
    monkeypatch.setenv("QWEN35_GDN_EXTEND", "b")
    settings = load_settings(gdn_decode="c")
    assert (settings.gdn_decode, settings.gdn_extend, settings.conv) == ("c", "b", "a")


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().gdn_decode = "triton"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["gdn_decod", "prefil_split"])
def test_a_misspelt_setting_names_the_nearest(name: str) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean"):
        load_settings(**{name: "x"})


def test_a_misspelt_variable_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_GDN_DECOD", "triton")
    with pytest.raises(UnknownNameError, match="Did you mean 'QWEN35_GDN_DECODE'"):
        load_settings()


@pytest.mark.parametrize("key", ["GDN_DECODE", "Gdn_Decode", "SGLANG_PLUGIN"])
def test_a_key_of_the_file_in_another_case_is_refused_and_names_the_nearest(tmp_path: Path, key: str) -> None:
    (tmp_path / "qwen35.toml").write_text(f'{key} = "off"\n')
    said = rf"unknown setting '{key}' \({re.escape(str(tmp_path))}/qwen35\.toml\).* Did you mean '{key.lower()}'\?"
    for make in (load_settings, Settings):
        with pytest.raises(UnknownNameError, match=said):
            make()
    assert not sglang_switched_off(), "a switch that cannot be read says nothing"


def test_a_bad_value_says_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen35.toml").write_text('dtype = "int4"\nchecked = "perhaps"\n')
    with pytest.raises(ConfigurationError) as both:
        load_settings(prefill_split="sometimes")
    file = tmp_path / "qwen35.toml"
    assert f"dtype = 'int4' ({file}: dtype): Input should be 'auto'" in str(both.value)
    assert f"checked = 'perhaps' ({file}: checked): " in str(both.value)
    assert "prefill_split = 'sometimes': Input" in str(both.value), "an argument needs no origin"
    monkeypatch.setenv("QWEN35_DTYPE", "int8")
    with pytest.raises(ConfigurationError, match=r"dtype = 'int8' \(environment variable QWEN35_DTYPE\): Input"):
        load_settings(checked=True)


def test_a_setting_knows_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen35.toml").write_text('gdn_decode = "a"\ngdn_extend = "a"\nconv = "a"\n')
    monkeypatch.setenv("qwen35_gdn_extend", "b")
    monkeypatch.setenv("QWEN35_GDN_DECODE", "")  # as if it were not there
    settings = load_settings(gdn_verify="c", conv="c")
    expected = {
        "gdn_decode": f"{tmp_path / 'qwen35.toml'}: gdn_decode", "gdn_extend": "environment variable qwen35_gdn_extend",
        "gdn_verify": "", "conv": "", "finalize": "",
    }  # fmt: skip
    assert {name: settings.origin(name) for name in expected} == expected
    again = load_settings(settings, gdn_decode="a", gdn_extend="d")
    assert again.origin("gdn_decode") == expected["gdn_decode"], "the same value"
    assert again.origin("gdn_extend") == ""


@pytest.mark.parametrize(
    ("setting", "value", "kind", "meant"),
    [
        ("gdn_decode", "Auto", "gated_delta_rule adapter", "auto"),
        ("gdn_extend", "TRITON", "gated_delta_rule adapter", "triton"),
        ("gdn_fallback", "Reference", "gated_delta_rule adapter", "reference"),
        ("gdn_shadow", "Reference:0.5", "gated_delta_rule adapter", "reference"),
        ("conv", "AUTO", "short_convolution adapter", "auto"),
        ("finalize", "Off", "finalize_fusion adapter", "off"),
    ],
)
@pytest.mark.parametrize("variable", [True, False])
def test_a_name_in_another_case_is_refused_and_names_what_was_meant_and_where_it_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: bool, setting: str, value: str, kind: str, meant: str
) -> None:
    if variable:
        monkeypatch.setenv(f"QWEN35_{setting.upper()}", value)
        where = f"environment variable QWEN35_{setting.upper()}"
    else:
        (tmp_path / "qwen35.toml").write_text(f'{setting} = "{value}"\n')
        where = f"{tmp_path / 'qwen35.toml'}: {setting}"
    with pytest.raises(UnknownNameError) as refused:
        build(device="cpu")
    said = str(refused.value)
    assert said.startswith(f"unknown {kind} {value.partition(':')[0]!r} ({where}); known: "), said
    assert meant in refused.value.known
    assert said.endswith(f"Did you mean {meant!r}?")


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("gdn_decode", "flashinfer", "gated_delta_rule adapter 'flashinfer' ({}): device requires cuda"),
        ("gdn_fallback", "flashinfer", "gated_delta_rule adapter 'flashinfer' ({}): device requires cuda"),
        ("gdn_fallback", "Auto", "settings: gdn_fallback = 'Auto' ({}): Value error, a fallback must be named"),
        ("gdn_shadow", "reference", "gdn_shadow must be 'ADAPTER:RATE'"),
        ("device", "gpu", "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'gpu' ({})"),
    ],
)
def test_what_cannot_be_had_says_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: str, said: str
) -> None:
    monkeypatch.setenv("QWEN35_DEVICE", "cpu")
    monkeypatch.setenv(f"QWEN35_{setting.upper()}", value)
    where = f"environment variable QWEN35_{setting.upper()}"
    with pytest.raises(Qwen35Error) as refused:
        build()
    assert str(refused.value).startswith(said.format(where))
    assert str(refused.value).count(where) == 1


def test_a_misspelt_line_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "qwen35.toml").write_text('gdn_decoder = "triton"\n')
    with pytest.raises(UnknownNameError, match="gdn_decode"):
        load_settings()


def test_a_bad_value_shows_itself_and_the_allowed_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"prefill_split = 'sometimes'.*'auto', 'on' or 'off'"):
        load_settings(prefill_split="sometimes")


def test_a_fallback_is_named_or_none_and_never_automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    named = "gdn_fallback = 'auto'.*must be named.*'reference'.*or be 'none'"
    with pytest.raises(ConfigurationError, match=named):
        load_settings(gdn_fallback="auto")
    monkeypatch.setenv("QWEN35_GDN_FALLBACK", "auto")
    with pytest.raises(ConfigurationError, match=named):
        load_settings()
    monkeypatch.setenv("QWEN35_GDN_FALLBACK", "None")
    assert load_settings().gdn_fallback is None
    assert load_settings(gdn_fallback="reference").gdn_fallback == "reference"


@pytest.mark.row("I06")
def test_settings_are_read_when_they_are_loaded_and_frozen_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are read anew by every ``load_settings``, never while serving: a container keeps those it was built with."""
    monkeypatch.setenv("QWEN35_CONV", "reference")
    before = build(device="cpu")
    monkeypatch.setenv("QWEN35_CONV", "reference64")
    after = build(device="cpu")
    assert (before.settings().conv, after.settings().conv) == ("reference", "reference64")


@pytest.mark.parametrize("content", [b"gdn_decode = ", b'gdn_decode = "\xff"'], ids=["malformed", "undecodable"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "qwen35.toml").write_bytes(content)
    for make in (load_settings, Settings):
        with pytest.raises(ConfigurationError, match=r"qwen35\.toml of the working directory cannot be read as TOML"):
            make()


def test_settings_made_directly_refuse_alike(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'gdn_decode'"):
        Settings(gdn_decod="x")
    with pytest.raises(ConfigurationError, match=r"prefill_split = 'sometimes'.*'auto', 'on' or 'off'"):
        Settings(prefill_split="sometimes")
    (tmp_path / "qwen35.toml").write_text('gdn_decoder = "triton"\n')
    with pytest.raises(UnknownNameError, match="gdn_decode"):
        Settings()


def test_a_bad_dtype_is_shown_with_the_allowed_ones_in_one_sentence() -> None:
    allowed = "Input should be 'auto', 'float32', 'bfloat16' or 'float16'"
    with pytest.raises(ConfigurationError, match=f"^settings: dtype = 'int4': {allowed}$"):
        Settings(dtype="int4")


@pytest.mark.parametrize("base", ["triton", {"gdn_decode": "triton"}, Settings])
def test_a_base_must_be_settings(base: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"settings must be Settings, got .*build\(gdn_decode="):
        load_settings(base)


def test_given_settings_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Settings(conv="x")
    monkeypatch.setenv("QWEN35_CONV", "y")
    assert load_settings(base, gdn_decode="z").conv == "x"


LAUNCH = ("WORLD_SIZE", "RANK", "LOCAL_RANK")


def launched(monkeypatch: pytest.MonkeyPatch, *values: str | None) -> LaunchEnvironment:
    for name, value in zip(LAUNCH, values, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    return launch_environment()


def test_a_launchers_environment_is_read_and_none_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, None, "3", None) == LaunchEnvironment(rank=0, world_size=1, local_rank=0)
    assert launched(monkeypatch, "1", None, None) == LaunchEnvironment()
    assert launched(monkeypatch, "8", "5", "1") == LaunchEnvironment(rank=5, world_size=8, local_rank=1)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (("two", "0", "0"), "WORLD_SIZE must be a whole number at least 1, .*got 'two'"),
        (("0", "0", "0"), "WORLD_SIZE must be a whole number at least 1, .*got '0'"),
        (("2", None, "0"), "RANK must be a whole number in 0..1, .*got ''"),
        (("2", "2", "0"), "RANK must be a whole number in 0..1, .*got '2'"),
        (("2", "1", "-1"), "LOCAL_RANK must be a whole number in 0..1, .*got '-1'"),
    ],
)
def test_a_launchers_environment_that_cannot_be_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, values: tuple[str | None, ...], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        launched(monkeypatch, *values)
