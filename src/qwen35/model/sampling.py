"""Choosing the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35.domain.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    ``temperature`` 0 takes the likeliest (greedy). Otherwise logits are divided by it, only the ``top_k`` likeliest
    are kept (0: all), of these the fewest whose probabilities reach ``top_p``, and one is drawn. ``seed`` fixes the
    draws: request i of a call draws from its own ``torch.Generator`` seeded with ``seed + i``. Raises
    ``ConfigurationError`` naming the option that is out of range or of another type.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, number in (("temperature", self.temperature), ("top_p", self.top_p)):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ConfigurationError(f"{name} must be a number, got {number!r}")
        for name, whole in (("top_k", self.top_k), ("seed", self.seed)):
            if isinstance(whole, bool) or not isinstance(whole, int):
                raise ConfigurationError(f"{name} must be an int, got {whole!r}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigurationError(f"temperature must be finite and at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ConfigurationError(f"top_k must be at least 0 (0 keeps all tokens), got {self.top_k}")
        if not 0 <= self.seed < 2**62:
            raise ConfigurationError(f"seed must be in 0..2**62 - 1, got {self.seed}")

    def generators(self, requests: int) -> list[torch.Generator]:
        """One generator a request, on the CPU, so that draws are the same on every device."""
        return [torch.Generator().manual_seed(self.seed + i) for i in range(requests)]


def choose(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """The next token [B] int64 for logits [B, vocabulary]; row i draws one number from ``generators[i]``."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    draws = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    probabilities, tokens = _kept(logits, sampling)
    cumulative = probabilities.cumsum(-1)
    point = draws.to(logits.device)[:, None] * cumulative[:, -1:]
    # A point that rounds up to the total would fall past the last token kept.
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    index = torch.minimum(torch.searchsorted(cumulative, point, right=True), last)
    return tokens.gather(-1, index)[:, 0]


def _kept(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities (float64, likeliest first, 0 where cut, not renormalised) and their tokens."""
    scaled, tokens = (logits.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        scaled, tokens = scaled[:, : sampling.top_k], tokens[:, : sampling.top_k]
    probabilities = scaled.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return probabilities.masked_fill(before >= sampling.top_p, 0), tokens
