"""Seeded tensors, poisoned memory, and comparisons of bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

#: Gap between paged slots: whole 32-byte units in every dtype.
PAGE_GAP = 16


def generator(seed: int, device: torch.device) -> torch.Generator:
    """A generator on ``device``, from which every tensor of a case is drawn in a fixed order."""
    return torch.Generator(device=device).manual_seed(seed)


def normal(shape: Sequence[int], source: torch.Generator) -> Tensor:
    """Standard normal float32."""
    return torch.randn(*shape, generator=source, device=source.device)


def uniform(shape: Sequence[int], low: float, high: float, source: torch.Generator) -> Tensor:
    """Uniform float32 in low..high."""
    return torch.rand(*shape, generator=source, device=source.device) * (high - low) + low


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, NaN payloads and signs of zero included."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


@dataclass(frozen=True, slots=True)
class Slab:
    """A buffer and the view of it that a call is given: gaps of the buffer belong to nobody."""

    base: Tensor
    view: Tensor

    def clone(self) -> Slab:
        """The same layout over a copy of the whole buffer."""
        base = self.base.clone()
        return Slab(base, base.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()))

    def restore(self, saved: Slab) -> None:
        """Copy the whole buffer back from ``saved``."""
        self.base.copy_(saved.base)


def slab(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, lead: int, gap: int = 0) -> Slab:
    """A NaN-filled buffer and its view of ``shape``, whose dimension ``lead - 1`` is ``gap`` elements longer
    than the dense rest. ``lead`` counts the dimensions before the dense tail."""
    rest = tuple(shape[lead:])
    strides: list[int] = []
    step = 1
    for size in reversed(rest):
        strides.insert(0, step)
        step *= size
    step += gap
    for size in reversed(tuple(shape[:lead])):
        strides.insert(0, step)
        step *= size
    size = prod(shape[:lead]) * (prod(rest) + gap)
    base = torch.full((size,), float("nan"), dtype=dtype, device=device)
    return Slab(base, base.as_strided(tuple(shape), tuple(strides)))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out uninitialised is NaN (or the largest integer) inside: scratch and outputs that
    an adapter forgets to write show."""
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
