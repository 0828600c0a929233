"""Tensors that lie on the CPU and say that they do not, so that what a device's calls go through runs here."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


class Elsewhere(torch.Tensor):
    """Its ``device`` is still the CPU, so that checks compare it with other tensors' as usual."""

    is_cpu = property(lambda _: False)
    is_cuda = property(lambda _: True)


def elsewhere(call: Any) -> Any:
    """``call`` with its state pool and slots elsewhere; they share memory with those of ``call``."""
    changed = {}
    for field in fields(call):
        value = getattr(call, field.name)
        if isinstance(value, torch.Tensor) and field.name in ("states", "slots", "write_slots"):
            changed[field.name] = value.as_subclass(Elsewhere)
        elif is_dataclass(value):
            changed[field.name] = elsewhere(value)
    return replace(call, **changed)
