"""Seeded tensors, poisoned memory, and comparisons of bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


def slabs_apart(
    shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype], device: torch.device, *, lead: int,
    heads: bool = False, rows: bool = False,
) -> dict[str, Slab]:  # fmt: skip
    """NaN-filled slabs in which no stride but the last dimension's is dense, or that of another slab.

    ``lead`` counts the dimensions before what belongs to one token; the last of them is always spread. ``heads``: what
    belongs to a token is too, where that is a matrix; ``rows``: so is the first of two leading ones. Strides are
    multiples of ``PAGE_GAP``. Each buffer is large enough for the strides of every other slab, so that one taken for
    another reads NaN or a wrong value, and nothing outside.
    """
    used: set[int] = set()

    def own(least: int) -> int:
        stride = -(-least // PAGE_GAP) * PAGE_GAP + PAGE_GAP
        while stride in used:
            stride += PAGE_GAP
        used.add(stride)
        return stride

    strides = {}
    for name, shape in shapes.items():
        tail = list(torch.empty(tuple(shape[lead:]), device="meta").stride())
        if heads and len(tail) == 2:
            tail[0] = own(shape[-1])
        steps = [own(shape[lead] * tail[0])]
        for size in reversed(shape[1:lead]):
            whole = size * steps[0]
            steps.insert(0, own(whole) if rows else whole)
        strides[name] = (*steps, *tail)
    # As far as the largest sizes reach by the longest stride of the same kind: leading, of heads, dense.
    leading = sum(max(shape[i] for shape in shapes.values()) for i in range(lead))
    room = (
        leading * max(stride for s in strides.values() for stride in s[:lead])
        + max(shape[lead] for shape in shapes.values()) * max(s[lead] for s in strides.values())
        + max(prod(shape[lead:]) for shape in shapes.values())
    )
    made = {}
    for name, shape in shapes.items():
        base = torch.full((room,), float("nan"), dtype=dtypes[name], device=device)
        made[name] = Slab(base, base.as_strided(tuple(shape), strides[name]))
    return made


class Guards(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory of floating point that is made on ``device`` inside has ``elements`` of NaN behind it. ``broken`` tells
    behind which of it something was written: a kernel wrote past the end of what its adapter had made."""

    _MAKERS = frozenset({
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros",
        "full", "full_like", "new_full",
    })  # fmt: skip

    def __init__(self, elements: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._elements, self._device = elements, device
        self._guarded: list[tuple[tuple[int, ...], Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make what ``func`` makes, over a larger buffer."""
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in self._MAKERS:
            return made
        if made.device != self._device or not made.is_floating_point():
            return made
        size = 1 + sum((n - 1) * stride for n, stride in zip(made.shape, made.stride(), strict=True))
        size = size if made.numel() else 0
        base = torch.full((size + self._elements,), float("nan"), dtype=made.dtype, device=made.device)
        self._guarded.append((tuple(made.shape), base[size:]))
        return base.as_strided(made.shape, made.stride()).copy_(made)

    def broken(self) -> list[tuple[int, ...]]:
        """Shapes of the buffers past whose end something was written."""
        return [shape for shape, guard in self._guarded if not bool(guard.isnan().all())]


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
