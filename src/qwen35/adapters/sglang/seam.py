"""Hooks inside SGLang: checked whole before the first one is installed, and switched off as a whole.

SGLang's HookRegistry logs a target that it cannot patch and goes on, and a patch stays until the process ends.
So everything is checked first, every patch goes through a switch of ours, and a patch that did not take turns all of
them off again.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qwen35.domain.errors import UnavailableError

#: Called as ``hook(original, *args, **kwargs)``; what it returns is what the caller of the target gets.
Hook = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Target:
    """A function or value of SGLang: ``path`` is "module:Class.method" and ``signature`` its parameters as
    ``signature_of`` writes them (None: anything that exists). ``fields``: what a class there must declare, as the
    hooks read it of its instances while they serve, where it is too late to give up."""

    path: str
    signature: str | None = None
    fields: tuple[str, ...] = ()


def signature_of(function: Any) -> str:
    """The parameters without annotations and defaults: "(self, a, *, b, **kwargs)"; of a custom operator of torch, what
    its schema names."""
    operator = inspect.unwrap(function)
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return f"({', '.join(argument.name for argument in operator.default._schema.arguments)})"
    parts: list[str] = []
    kinds = inspect.Parameter
    star = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is kinds.VAR_POSITIONAL:
            star = True
            parts.append(f"*{parameter.name}")
        elif parameter.kind is kinds.VAR_KEYWORD:
            parts.append(f"**{parameter.name}")
        else:
            if parameter.kind is kinds.KEYWORD_ONLY and not star:
                star = True
                parts.append("*")
            parts.append(parameter.name)
    return f"({', '.join(parts)})"


def differences(targets: Mapping[str, Target]) -> tuple[str, ...]:
    """What is not as the seam expects it, one sentence a target; imports the targets' modules."""
    return tuple(found for target in targets.values() if (found := _difference(target)) is not None)


def _difference(target: Target) -> str | None:
    try:
        value = pkgutil.resolve_name(target.path)
    except (ImportError, AttributeError) as exc:
        return f"{target.path} is not there ({exc})"
    except Exception as exc:  # noqa: BLE001 - a module of SGLang, or one that it imports, may raise anything
        return f"{target.path} cannot be imported ({said(exc)})"
    lacking = [name for name in target.fields if not _declares(value, name)]
    if lacking:
        return f"{target.path} must have {', '.join(lacking)}"
    if target.signature is None:
        return None
    if not callable(value):
        return f"{target.path} must be a function, got {type(value).__name__}"
    try:
        found = signature_of(value)
    except (TypeError, ValueError) as exc:
        return f"{target.path} must take {target.signature}, does not say what it takes ({exc})"
    return None if found == target.signature else f"{target.path} must take {target.signature}, takes {found}"


def _declares(kind: Any, name: str) -> bool:
    bases = kind.__mro__ if isinstance(kind, type) else ()
    return name in dir(kind) or any(name in inspect.get_annotations(base) for base in bases)


def said(exc: Exception) -> str:
    """Kind and text of somebody else's error in one line."""
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}"


class _Switch:
    """One patched target: passes calls to ``hook``, or straight on where there is none. The ``outliving`` hooks are
    never off."""

    def __init__(self) -> None:
        self.hook: Hook | None = None
        self.outliving: list[Hook] = []

    def around(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        for outliving in self.outliving:
            original = partial(outliving, original)
        hook = self.hook
        return original(*args, **kwargs) if hook is None else hook(original, *args, **kwargs)


#: A patch lives as long as the process, so its switch does too.
_SWITCHES: dict[str, _Switch] = {}


def hook_later(path: str, hook: Hook) -> None:
    """Register ``hook`` with SGLang's registry, which patches at its next ``apply_hooks``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    switch = _SWITCHES.get(path)
    if switch is None:
        switch = _SWITCHES[path] = _Switch()
        # The registry splits off what follows the last dot, so a module's function is named without the colon.
        name = path if "." in path.partition(":")[2] else path.replace(":", ".")
        HookRegistry.register(name, switch.around, HookType.AROUND)
    switch.hook = hook


def install(release: str, targets: Mapping[str, Target], hooks: Mapping[str, Hook]) -> None:
    """Patch every target that ``hooks`` names (by its key in ``targets``), or none of them.

    Raises ``UnavailableError`` naming release, target and difference; SGLang is then as it was.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    found = differences(targets)
    if found:
        raise UnavailableError(f"the seam for SGLang {release}", found)
    fresh = {path: pkgutil.resolve_name(path) for key in hooks if (path := targets[key].path) not in _SWITCHES}
    broken: list[str] = []
    try:
        for key, hook in hooks.items():
            hook_later(targets[key].path, hook)
        HookRegistry.apply_hooks()
    except Exception as exc:  # noqa: BLE001 - SGLang's registry may raise anything, and some hooks are on by then
        broken = [f"SGLang's HookRegistry failed ({said(exc)})"]
    unpatched = [path for path, before in fresh.items() if pkgutil.resolve_name(path) is before]
    if broken or unpatched:
        uninstall()
        for path in unpatched:
            _SWITCHES.pop(path, None)
        reasons = broken or [f"{path} was not patched; SGLang's log says why" for path in unpatched]
        raise UnavailableError(f"the seam for SGLang {release}", reasons)


def uninstall() -> None:
    """Turn every hook off but those that outlive it: patched functions go straight to SGLang's own."""
    for switch in _SWITCHES.values():
        switch.hook = None


def outlive(path: str, hook: Hook) -> None:
    """Call ``hook`` around the patched target ``path`` from now on, whatever is turned off, until the process ends."""
    _SWITCHES[path].outliving.append(hook)


def installed() -> tuple[str, ...]:
    """The targets whose hooks are on; those that outlive an uninstalled plugin are not among them."""
    return tuple(path for path, switch in _SWITCHES.items() if switch.hook is not None)
