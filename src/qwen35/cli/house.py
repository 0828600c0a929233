"""From the settings in force and the ``--device`` option to a registry of adapters."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen35.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from qwen35.services.registry import AdapterRegistry
    from qwen35.settings import Settings

#: A command did its work and its answer is no: each says in its help what that is.
EXIT_FINDING = 1
#: As a shell counts a process that Ctrl-C ended.
EXIT_INTERRUPTED = 130
#: What every ``--device`` option says of itself.
DEVICE_HELP = "cpu, cuda, cuda:1; default: what the settings say (auto: a GPU where there is one)."


def command_line(words: Sequence[str], options: Mapping[str, object]) -> str:
    """The command ``words`` with ``options`` by their Python names; those that are None are left out."""
    given = {name: value for name, value in options.items() if value is not None}
    return shlex.join([*words, *(word for name in given for word in (f"--{name.replace('_', '-')}", str(given[name])))])


def settings_in_force(device: str = "", **overrides: Any) -> Settings:
    """Settings of environment and file, with ``device`` and ``overrides`` on top where they are given."""
    from qwen35.settings import load_settings

    given: dict[str, Any] = {name: value for name, value in overrides.items() if value}
    if device:
        given["device"] = device
    return load_settings(None, **given)


def open_registry(settings: Settings) -> AdapterRegistry:
    """Every installed adapter, on the settings' device. Raises ``ConfigurationError`` for one that is not there."""
    from qwen35.services.assembly import make_platform, make_registry

    return make_registry(settings, make_platform(settings), ())


def make_folder(option: str, folder: Path) -> None:
    """Make ``folder`` with its parents. Raises ``ConfigurationError`` where it is a file or cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigurationError(f"{option} must be a folder that can be made, got {folder}: {exc.strerror}") from exc


def refuse_unwritable(option: str, path: Path) -> None:
    """Raise ``ConfigurationError`` where a file at ``path`` could not be written, before there is anything to write."""
    if path.is_dir():
        raise ConfigurationError(f"{option} must be a file, got the folder {path}")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{option} must be a file in a folder that exists, got {path}: make {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(f"{option} must be a file that can be written, got {path}")


def refuse_existing(option: str, paths: Iterable[Path], overwrite: bool) -> None:
    """Raise ``ConfigurationError`` where one of ``paths`` would be lost: before anything is computed."""
    taken = [path for path in paths if path.exists() or path.is_symlink()]
    if taken and not overwrite:
        held = ", ".join(map(str, taken))
        raise ConfigurationError(
            f"{option} already holds {held}: name another folder, or give --overwrite to replace it"
        )


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` whole or not at all: a second Ctrl-C, or a full disk, must not leave half a document."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
