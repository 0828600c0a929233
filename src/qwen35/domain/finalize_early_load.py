"""The early load of the shared expert's output, as a rewrite of a kernel configuration.

A configuration is dataclasses within dataclasses: ``profiles``, each with ``finalize_routes`` and
``all_reduce_routes``; routes have ``targets``, a target has a ``preset``. Finalize presets that own the field
``load_shared_expert_before_pdl`` may load before the preceding kernel has finished.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from qwen35.domain.errors import ConfigurationError

FLAG = "load_shared_expert_before_pdl"

Config = TypeVar("Config")


def with_early_shared_load(config: Config, *, speculative: bool) -> Config:
    """``config`` with the flag set in every finalize preset that owns it.

    Pure and idempotent: the input is left alone, targets without the flag and all-reduce routes stay the
    identical objects. Under speculation ``config`` itself comes back: alternating draft and verify replays
    could read a shared buffer that is not finished. Raises ``ConfigurationError`` where no preset owns it.
    """
    if speculative:
        return config
    found, profiles = 0, []
    root: Any = config
    for profile in root.profiles:
        targets = []
        for target in profile.finalize_routes.targets:
            if _owns_flag(target.preset):
                found += 1
                target = replace(target, preset=replace(target.preset, **{FLAG: True}))
            targets.append(target)
        routes = replace(profile.finalize_routes, targets=tuple(targets))
        profiles.append(replace(profile, finalize_routes=routes))
    if not found:
        raise ConfigurationError(f"early shared-expert load requires a finalize preset with {FLAG}, found none")
    return replace(root, profiles=tuple(profiles))  # type: ignore[no-any-return]


def _owns_flag(preset: object) -> bool:
    return is_dataclass(preset) and any(field.name == FLAG for field in fields(preset))
