"""Words of the command line into sizes, dtypes and names. Every refusal shows what came and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qwen35.domain.errors import ConfigurationError, UnknownNameError
from qwen35.domain.geometry import GdnGeometry, public_geometry

if TYPE_CHECKING:
    import torch

_MOST_DIGITS = 18
_AUTO = "auto"
_STATE_DTYPES = ("float32", "bfloat16")
_TOKEN_DTYPES = ("float32", "bfloat16", "float16")


def names(option: str, text: str) -> tuple[str, ...]:
    """``"a, b"`` to ``("a", "b")``; empty text to none."""
    parts = [part.strip() for part in text.split(",")]
    if text.strip() and not all(parts):
        raise ConfigurationError(f"{option} must be names joined by commas, got {text!r}")
    return tuple(dict.fromkeys(part for part in parts if part))


def sizes(option: str, text: str) -> tuple[int, ...]:
    """``"1,8,64"`` to positive integers; empty text to none."""
    return tuple(_size(option, part, text) for part in text.split(",") if text.strip())


def pairs(option: str, text: str) -> tuple[tuple[int, int], ...]:
    """``"8x4,64x2"`` to pairs of positive integers; empty text to none."""
    found = []
    for part in text.split(",") if text.strip() else ():
        left, cross, right = part.partition("x")
        if not cross:
            raise ConfigurationError(f"{option} must be BATCHxDRAFT pairs joined by commas (8x4,64x4), got {text!r}")
        found.append((_size(option, left, text), _size(option, right, text)))
    return tuple(found)


def length_sets(option: str, text: str) -> tuple[tuple[int, ...], ...]:
    """``"1x2048;16x1024,7"`` to one tuple of sequence lengths a set; empty text to none."""
    sets = []
    for part in text.split(";") if text.strip() else ():
        lengths: list[int] = []
        for term in part.split(","):
            count, cross, length = term.partition("x")
            if cross:
                lengths += [_size(option, length, text)] * _size(option, count, text)
            else:
                lengths.append(_size(option, count, text))
        sets.append(tuple(lengths))
    return tuple(sets)


def _size(option: str, word: str, text: str) -> int:
    if not is_whole(word.strip()) or int(word) < 1:
        raise ConfigurationError(f"{option} must be made of positive integers, got {word.strip()!r} in {text!r}")
    return int(word)


def is_whole(word: str) -> bool:
    """Whether ``word`` is a whole number in ASCII digits, at least 0 and of a length that fits 64 bits."""
    return word.isascii() and word.isdecimal() and len(word) <= _MOST_DIGITS


def geometry(model: Path | None, name: str, tp: int) -> tuple[str, GdnGeometry]:
    """A name for reports and one rank's geometry: of the checkpoint ``model``, or of a public geometry."""
    if model is None:
        return name, public_geometry(name).gdn.shard(tp)
    from qwen35.model.config import read_config

    return model.name, read_config(model).gdn.shard(tp)


def state_dtype(name: str) -> torch.dtype:
    """The dtype of a state pool."""
    return _dtype("--state-dtype", name, _STATE_DTYPES)


def token_dtype(name: str, device_type: str) -> torch.dtype:
    """The dtype of tokens; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == _AUTO:
        name = "bfloat16" if device_type == "cuda" else "float32"
    return _dtype("--dtype", name, (_AUTO, *_TOKEN_DTYPES))


def _dtype(option: str, name: str, allowed: tuple[str, ...]) -> torch.dtype:
    import torch

    by_name = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in allowed:
        raise UnknownNameError(option, name, allowed)
    return by_name[name]
