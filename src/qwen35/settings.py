"""The only place where our environment variables and files are read.

Precedence: arguments, then environment (``QWEN35_GDN_DECODE`` and so on), then ``qwen35.toml`` in the working
directory, then the defaults below. Settings are frozen; the container reads them once, when it is built. Each one knows
where its value came from, for errors. Variables are read in any case; keys of the file are lower case, as the settings
are, and names of adapters are as they are listed: another case is an error that names the nearest.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from qwen35.domain.errors import ConfigurationError, UnknownNameError

ENVIRONMENT_PREFIX = "QWEN35_"
FILE = "qwen35.toml"
#: The setting that switches the plugin inside SGLang off, whatever else is set.
SGLANG_SWITCH = "sglang_plugin"
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


class Settings(BaseSettings):
    """What can be chosen. An adapter is named as ``qwen35 doctor`` lists it; "auto" takes the best usable one.

    A fallback and a shadow are never chosen automatically: they are named, or there is none.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, toml_file=FILE, frozen=True, extra="forbid", env_ignore_empty=True
    )

    gdn_decode: str = Field("auto", description="adapter of the gated delta rule for decode")
    gdn_extend: str = Field("auto", description="adapter for extend (prefill)")
    gdn_verify: str = Field("auto", description="adapter for verify and commit")
    gdn_fallback: str | None = Field(None, description="named adapter for what the chosen one refuses; None: an error")
    gdn_shadow: str | None = Field(None, description="'ADAPTER:RATE', a second adapter run on copies of sampled calls")
    conv: str = Field("auto", description="adapter of the short convolution")
    finalize: str = Field("auto", description="adapter of the fused finalize")
    prefill_split: Literal["auto", "on", "off"] = Field("auto", description="FlashInfer's sequence-split prefill")
    device: str = Field("auto", description="'cpu', 'cuda', 'cuda:1'; auto: a GPU where there is one")
    dtype: DtypeName = Field("auto", description="of weights and tokens; auto: bfloat16 on a GPU")
    state_dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the GDN state pool")
    checked: bool = Field(False, description="check values on the device too; synchronises at every eager call")
    sglang_plugin: bool = Field(True, description="hook into SGLang where it loads our plugin")
    sglang_untested: bool = Field(False, description="try a release of SGLang that no test has seen")
    sglang_strict: bool = Field(False, description="stop SGLang where seam or model do not fit; else it runs alone")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, **values: Any) -> None:
        """Raises ``UnknownNameError`` for a setting that does not exist and ``ConfigurationError`` for a value that is
        not valid or a file that cannot be read."""
        try:
            super().__init__(**values)
        except ValidationError as exc:
            raise _translated(exc, values) from exc
        self._origins.update({name: _origin(name) for name in self.model_fields_set if name not in values})

    def origin(self, name: str) -> str:
        """Where the value of the setting ``name`` came from: "environment variable QWEN35_GDN_DECODE" or
        "/path/qwen35.toml: gdn_decode"; "" for an argument or a default."""
        return self._origins.get(name, "")

    @field_validator("gdn_fallback", "gdn_shadow", mode="before")
    @classmethod
    def _none_is_none(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.lower() in ("", "none") else value

    @field_validator("gdn_fallback")
    @classmethod
    def _fallback_is_named(cls, value: str | None) -> str | None:
        if value is not None and value.casefold() == "auto":
            raise ValueError(
                "a fallback must be named (such as 'reference'), or be 'none'; 'auto' is a choice for the adapter that "
                "serves, and would hide who serves what it refuses"
            )
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, environment, qwen35.toml, in this order."""
        try:
            file_settings = TomlConfigSettingsSource(settings_cls)
        except (OSError, ValueError) as exc:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
            raise ConfigurationError(f"{FILE} of the working directory cannot be read as TOML: {exc}") from exc
        for key in file_settings.toml_data:
            if key not in cls.model_fields:  # in another case the pydantic releases part ways: some would read it
                raise UnknownNameError("setting", key, cls.model_fields, _file())
        return init_settings, env_settings, file_settings


def load_settings(base: Settings | None = None, **overrides: Any) -> Settings:
    """Settings from the environment and file, or ``base``, with ``overrides`` on top; what ``base`` says too keeps its
    origin.

    Raises ``UnknownNameError`` for a setting that does not exist and ``ConfigurationError``, showing the value
    and what is allowed, for one that is not valid, for a file that cannot be read and a ``base`` of another type.
    """
    if base is not None and not isinstance(base, Settings):
        raise ConfigurationError(
            f"settings must be Settings, got {base!r}; name an adapter by its setting: build(gdn_decode=...)"
        )
    for name in overrides:
        if name not in Settings.model_fields:
            raise UnknownNameError("setting", name, Settings.model_fields)
    if base is None:
        _refuse_unknown_variables()
        return Settings(**overrides)
    before = base.model_dump()
    settings = Settings(**{**before, **overrides})
    after = settings.model_dump()
    settings._origins.update({name: base.origin(name) for name in before if after[name] == before[name]})
    return settings


def sglang_switched_off() -> bool:
    """Whether ``sglang_plugin`` says off, read by itself: from the environment, else from qwen35.toml.

    Nothing else is looked at and nothing raises, so that a bad setting cannot end a launch that wants no plugin. A
    switch that cannot be read says nothing; ``load_settings`` then says what is wrong with it.
    """
    values = {name.lower(): value for name, value in os.environ.items()}
    value: Any = values.get((ENVIRONMENT_PREFIX + SGLANG_SWITCH).lower())
    try:
        if not value:
            value = tomllib.loads(Path(FILE).read_text(encoding="utf-8")).get(SGLANG_SWITCH, True)
        return not TypeAdapter(bool).validate_python(value)
    except (OSError, ValueError):  # TOMLDecodeError, UnicodeDecodeError and ValidationError are ValueErrors
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """What a launcher such as torchrun told this process: one of ``world_size``, ``local_rank`` on its host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def launch_environment() -> LaunchEnvironment:
    """From WORLD_SIZE, RANK and LOCAL_RANK; without WORLD_SIZE one process by itself.

    Raises ``ConfigurationError`` naming the variable that is missing or not a number in its range.
    """
    if "WORLD_SIZE" not in os.environ:
        return LaunchEnvironment()
    size = _launch_number("WORLD_SIZE", least=1)
    if size == 1:
        return LaunchEnvironment()
    rank, local = _launch_number("RANK", most=size - 1), _launch_number("LOCAL_RANK", most=size - 1)
    return LaunchEnvironment(rank=rank, world_size=size, local_rank=local)


def _launch_number(variable: str, least: int = 0, most: int | None = None) -> int:
    text = os.environ.get(variable, "")
    if text.isascii() and text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    allowed = f"at least {least}" if most is None else f"in {least}..{most}"
    raise ConfigurationError(
        f"environment variable {variable} must be a whole number {allowed}, as torchrun sets it, got {text!r}"
    )


def _refuse_unknown_variables() -> None:
    known = {(ENVIRONMENT_PREFIX + name).upper() for name in Settings.model_fields}
    for variable in os.environ:
        if variable.upper().startswith(ENVIRONMENT_PREFIX) and variable.upper() not in known:
            raise UnknownNameError("environment variable", variable, known)


def _file() -> str:
    return str(Path(FILE).absolute())


def _origin(name: str) -> str:
    """Of a setting that was given, and not as an argument."""
    for variable, value in os.environ.items():
        if value and variable.upper() == (ENVIRONMENT_PREFIX + name).upper():
            return f"environment variable {variable}"
    return f"{_file()}: {name}"


def _translated(exc: ValidationError, given: dict[str, Any]) -> ConfigurationError:
    lines = []
    for error in exc.errors():
        name = str(error["loc"][0])
        if error["type"] == "extra_forbidden":
            return UnknownNameError("setting", name, Settings.model_fields)
        origin = "" if name in given else f" ({_origin(name)})"
        lines.append(f"{'.'.join(map(str, error['loc']))} = {error['input']!r}{origin}: {error['msg']}")
    return ConfigurationError("settings: " + "; ".join(lines))
