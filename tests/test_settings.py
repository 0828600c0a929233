"""Settings are read once, in one place, and a bad one is a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qwen35.container import build
from qwen35.domain.errors import ConfigurationError, UnknownNameError
from qwen35.settings import LaunchEnvironment, Settings, launch_environment, load_settings


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
