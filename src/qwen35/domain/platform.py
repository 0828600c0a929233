"""The machine, as a frozen value that is passed in and never looked up again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """``device`` is what tensors live on ("cpu", "cuda", "cuda:1")."""

    device: str
    device_name: str
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int = 0

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]
