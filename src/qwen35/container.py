"""The only place where adapters meet services."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from dependency_injector import containers, providers

from qwen35.domain.errors import ConfigurationError
from qwen35.ports.adapter import AdapterEntry
from qwen35.services.assembly import (
    make_finalize,
    make_gated_delta_rule,
    make_platform,
    make_registry,
    make_short_convolution,
)
from qwen35.services.counters import Counters
from qwen35.services.finalize_registry import PROCESS_WORKSPACES
from qwen35.services.platform import detect_platform
from qwen35.services.registry import AdapterRegistry
from qwen35.settings import Settings, load_settings


class Container(containers.DeclarativeContainer):
    """Every object of a running library, each made once."""

    settings = providers.Dependency(instance_of=Settings)
    extra_adapters = providers.Object(())
    platform = providers.Singleton(make_platform, settings)
    counters = providers.Singleton(Counters)
    registry = providers.Singleton(make_registry, settings, platform, extra_adapters)
    gated_delta_rule = providers.Singleton(make_gated_delta_rule, settings, registry, counters)
    short_convolution = providers.Singleton(make_short_convolution, settings, registry, counters)
    workspaces = providers.Object(PROCESS_WORKSPACES)
    finalize = providers.Singleton(make_finalize, settings, registry, counters, workspaces)


def build(settings: Settings | None = None, *, adapters: Iterable[AdapterEntry] = (), **overrides: Any) -> Container:
    """The wired container.

    ``settings`` (None: environment and ``qwen35.toml``) with ``overrides`` of single settings on top;
    ``adapters`` are known besides the installed ones (fakes, experiments). Services are made at once, so an
    unknown or unusable choice raises here: ``ConfigurationError`` or ``UnavailableError``. ``close`` ends it.
    """
    entries = tuple(adapters)
    for entry in entries:
        if not isinstance(entry, AdapterEntry):
            raise ConfigurationError(f"adapters must be AdapterEntry objects, got {entry!r}")
    container = Container(settings=load_settings(settings, **overrides), extra_adapters=providers.Object(entries))
    container.gated_delta_rule()
    container.short_convolution()
    container.finalize()
    return container


def close(container: Container) -> None:
    """End a container that ``build`` made: free scratch and parameter copies, destroy the workspace of the fused
    finalize, close every adapter that was made. Idempotent.

    All of it is closed before an error of any part travels on. Later calls of the services raise ``ClosedError``, those
    of the fused finalize ``NotPreparedError``.
    """
    with ExitStack() as last_first:
        last_first.callback(container.registry().close)
        last_first.callback(container.finalize().close)
        last_first.callback(container.short_convolution().close)
        last_first.callback(container.gated_delta_rule().close)


def adapter(port: str, name: str, *, device: str = "auto") -> Any:
    """A new adapter by port and name: ``adapter("gated_delta_rule", "triton")``.

    It is the caller's to ``close()``. Raises ``UnknownNameError`` or, where it cannot be used on this machine,
    ``UnavailableError``.
    """
    return AdapterRegistry(detect_platform(device)).adapter(port, name)
