"""qwen35: one contract between Qwen3.5 serving and the kernels that do its work.

``build()`` returns the wired container, ``close()`` ends one, ``adapter()`` gives one adapter by port and name,
``Settings`` are the options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen35.container import Container, adapter, build, close
    from qwen35.settings import Settings

__all__ = ["Container", "Settings", "__version__", "adapter", "build", "close"]
__version__ = "0.1.0"

_HOMES = dict.fromkeys(("Container", "adapter", "build", "close"), "container") | {"Settings": "settings"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``qwen35.domain`` needs no framework."""
    if name not in _HOMES:
        raise AttributeError(f"module 'qwen35' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"qwen35.{_HOMES[name]}"), name)
