"""The safetensors files of a checkpoint directory: what is in them, before any tensor is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from qwen35.domain.errors import CheckpointError
from qwen35.model.config import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, under the name that it has there; ``dtype`` is safetensors' ("BF16")."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str


def list_tensors(directory: Path) -> list[Stored]:
    """Every tensor of a checkpoint ``directory``, from model.safetensors or from the files that its index names.

    Raises ``CheckpointError`` naming the file where one is missing, truncated or corrupted, and where index and
    files disagree.
    """
    if (directory / SINGLE).is_file():
        return _header(directory / SINGLE)
    if not (directory / INDEX).is_file():
        raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}")
    where = _weight_map(directory / INDEX)
    names = sorted(set(where.values()))
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise CheckpointError(f"{directory / INDEX} names files that are missing: {', '.join(absent)}")
    stored = [tensor for name in names for tensor in _header(directory / name)]
    found = Counter((tensor.name, tensor.path.name) for tensor in stored)
    problems = [f"{name} is not in {file}" for name, file in where.items() if (name, file) not in found]
    problems += [f"{name} of {file} is not in the index" for name, file in found if where.get(name) != file]
    if problems:
        raise CheckpointError(f"{directory / INDEX} does not agree with its files: {'; '.join(problems)}")
    return stored


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """``path`` as an open safetensors file; its errors, here and inside, become ``CheckpointError``."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(f"{path} cannot be read, it is truncated or corrupted: {exc}") from exc


def _header(path: Path) -> list[Stored]:
    with opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return [Stored(name, path, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()]


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name to file name."""
    given = read_json(path).get("weight_map")
    if not isinstance(given, dict) or not given:
        raise CheckpointError(f"{path} has no weight_map")
    for name, file in given.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name} must be in a .safetensors file beside it, got {file!r}")
    return given
