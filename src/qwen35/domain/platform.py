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

    def below(self, least: tuple[int, int]) -> tuple[str, ...]:
        """The reason against a platform whose compute capability is under ``least``; none: it is not."""
        if self.compute_capability is not None and self.compute_capability >= least:
            return ()
        wanted, got = (c and ".".join(map(str, c)) for c in (least, self.compute_capability))
        return (f"compute capability requires at least {wanted}, got {got}",)
