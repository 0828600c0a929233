"""What is said of an adapter or device that a setting names: where the setting's value came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qwen35.domain.errors import ConfigurationError, UnavailableError, UnknownNameError
from qwen35.settings import Settings

#: What a setting takes besides the names of adapters.
_WORDS = {
    "gdn_decode": ("auto",), "gdn_extend": ("auto",), "gdn_verify": ("auto",), "gdn_fallback": ("none",),
    "conv": ("auto",), "finalize": ("auto", "off"),
}  # fmt: skip


@contextmanager
def named_by(settings: Settings, setting: str) -> Iterator[None]:
    """Inside, errors of what ``setting`` names say where its value came from, and all that it may be."""
    origin = settings.origin(setting)
    try:
        yield
    except UnknownNameError as exc:
        raise UnknownNameError(exc.kind, exc.name, {*exc.known, *_WORDS.get(setting, ())}, origin) from exc
    except UnavailableError as exc:
        raise UnavailableError(_with(exc.what, origin), exc.reasons) from exc
    except ConfigurationError as exc:
        raise ConfigurationError(_with(str(exc), origin)) from exc


def _with(text: str, origin: str) -> str:
    return f"{text} ({origin})" if origin else text
