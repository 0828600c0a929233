"""The ranks that share one model, and what they say to one another in a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from qwen35.domain.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """``size`` ranks of ``group``, of which this process is ``rank``; the default is one rank alone.

    Every rank makes the same calls in the same order. ``group`` is initialised and destroyed by its owner. Raises
    ``ConfigurationError`` for a rank that is not in the group, or several ranks without one.
    """

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigurationError(f"rank must be in 0..size - 1, got rank {self.rank} and size {self.size}")
        if self.size > 1 and self.group is None:
            raise ConfigurationError(f"{self.size} tensor-parallel ranks need a process group, got None")
        if self.group is not None and (self.group.size(), self.group.rank()) != (self.size, self.rank):
            raise ConfigurationError(
                f"size and rank must be the group's {self.group.size()} and {self.group.rank()}, "
                f"got {self.size} and {self.rank}"
            )

    @property
    def divided(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1

    def all_reduce(self, share: Tensor) -> Tensor:
        """The sum of every rank's ``share``, in its dtype. Overwrites ``share`` and returns it."""
        if self.divided:
            dist.all_reduce(share, group=self.group)
        return share

    def gather(self, share: Tensor) -> Tensor:
        """Every rank's ``share`` [n, width] side by side, in rank order: [n, size * width]."""
        if not self.divided:
            return share
        shares = [torch.empty_like(share) for _ in range(self.size)]
        dist.all_gather(shares, share.contiguous(), group=self.group)
        return torch.cat(shares, dim=-1)
