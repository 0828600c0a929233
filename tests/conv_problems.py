"""Random short convolution calls, poisoned where nothing may be read, and the comparisons that their tests share."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from qwen35.domain.errors import UnsupportedError
from qwen35.ports.conv_calls import Activation, ConvCommitCall, ConvDecodeCall, ConvExtendCall, ConvVerifyCall

C = TypeVar("C", ConvDecodeCall, ConvExtendCall, ConvVerifyCall, ConvCommitCall)
NAN = float("nan")
#: Elements between the end of a slot's window and the next slot, as in page-major pools.
PAGE_GAP = 5


@dataclass(kw_only=True)
class ConvProblem:
    """Draws the tensors of calls; every draw of one ``seed`` is the same. ``token`` and so on are dtypes."""

    seed: int
    channels: int = 24
    width: int = 4
    pool: int = 9
    token: torch.dtype = torch.float32
    window: torch.dtype = torch.float32
    weights: torch.dtype = torch.float32
    index: torch.dtype = torch.int32
    bias: bool = True
    activation: Activation = "silu"
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def tokens(self, *lead: int) -> Tensor:
        """A view of a projection whose other columns are NaN."""
        wide = torch.full((*lead, self.channels + 7), NAN, dtype=self.token, device=self.device)
        wide[..., 3 : 3 + self.channels] = self.normal(*lead, self.channels, dtype=self.token)
        return wide[..., 3 : 3 + self.channels]

    def windows(self, *lead: int, poisoned: bool = False) -> Tensor:
        """Windows [*lead, C, W-1] with a gap of NaN after each of the first dimension; all NaN if ``poisoned``."""
        inner = (*lead[1:], self.channels, self.width - 1)
        size = torch.Size(inner).numel()
        flat = torch.full((lead[0], size + PAGE_GAP), NAN, dtype=self.window, device=self.device)
        view = flat[:, :size].view(lead[0], *inner)
        if not poisoned:
            view.copy_(self.normal(*lead, self.channels, self.width - 1, dtype=self.window))
        return view

    def indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=self.index, device=self.device)

    def pool_for(self, slots: list[int]) -> Tensor:
        """A pool in which only the slots that are read hold numbers."""
        pool, drawn = self.windows(self.pool, poisoned=True), self.windows(self.pool)
        live = [slot for slot in slots if slot >= 0]
        pool[live] = drawn[live]
        return pool

    def parameters(self) -> dict[str, Any]:
        bias = self.normal(self.channels, dtype=self.weights) if self.bias else None
        weight = self.normal(self.channels, self.width, dtype=self.weights)
        return {"weight": weight, "bias": bias, "activation": self.activation}

    def out(self, *lead: int) -> Tensor:
        """A poisoned output, a view like the tokens."""
        return torch.full((*lead, self.channels + 7), NAN, dtype=self.token, device=self.device)[..., : self.channels]

    def decode(self, slots: list[int], write_slots: list[int] | None = None) -> ConvDecodeCall:
        batch = len(slots)
        return ConvDecodeCall(
            x=self.tokens(batch), windows=self.pool_for(slots), slots=self.indices(slots), out=self.out(batch),
            write_slots=None if write_slots is None else self.indices(write_slots), **self.parameters(),
        )  # fmt: skip

    def extend(
        self, slots: list[int], lengths: list[int], fresh: list[bool] | None = None,
        write_slots: list[int] | None = None,
    ) -> ConvExtendCall:  # fmt: skip
        """Slots that a fresh sequence starts over hold NaN."""
        started = fresh or [False] * len(slots)
        total, offsets = sum(lengths), [0, *accumulate(lengths)]
        return ConvExtendCall(
            x=self.tokens(total), slots=self.indices(slots), cu_seqlens=self.indices(offsets), out=self.out(total),
            windows=self.pool_for([slot for slot, new in zip(slots, started, strict=True) if not new]),
            fresh=None if fresh is None else torch.tensor(fresh, device=self.device),
            write_slots=None if write_slots is None else self.indices(write_slots), **self.parameters(),
        )  # fmt: skip

    def verify(
        self, slots: list[int], draft: int, rows: list[int] | None = None, parents: list[list[int]] | None = None
    ) -> ConvVerifyCall:
        """Intermediates are poisoned and hold a row and a node more than needed."""
        return ConvVerifyCall(
            x=self.tokens(len(slots), draft), windows=self.pool_for(slots), slots=self.indices(slots),
            intermediates=self.windows(len(slots) + 1, draft + 1, poisoned=True), out=self.out(len(slots), draft),
            rows=None if rows is None else self.indices(rows),
            parents=None if parents is None else torch.tensor(parents, dtype=self.index, device=self.device),
            **self.parameters(),
        )  # fmt: skip

    def commit(self, slots: list[int], last: list[int], rows: list[int] | None = None) -> ConvCommitCall:
        return ConvCommitCall(
            windows=self.windows(self.pool), slots=self.indices(slots), last=self.indices(last),
            intermediates=self.windows(len(slots) + 1, max(last) + 1),
            rows=None if rows is None else self.indices(rows),
        )  # fmt: skip


def fresh_seed() -> int:
    """A seed that no run has seen; tests put it into every assertion message."""
    return random.SystemRandom().randrange(2**31)


def copied(call: C, device: str | None = None) -> C:
    """The same call on tensors of its own, strides kept, on ``device`` (None: where they are)."""
    changes = {}
    for field in fields(call):
        value = getattr(call, field.name)
        if isinstance(value, Tensor):
            base = value if value._base is None else value._base
            changes[field.name] = (
                base.clone().to(device or base.device)
                .as_strided(value.shape, value.stride(), value.storage_offset())
            )  # fmt: skip
    return replace(call, **changes)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal bit by bit, NaN included."""
    whole = [t.contiguous().cpu().view(torch.uint8) if t.numel() else t.cpu() for t in (left, right)]
    return left.dtype == right.dtype and torch.equal(*whole)


def refused(action: Any, *arguments: Any) -> tuple[str, ...]:
    """The reasons of the ``UnsupportedError`` that ``action`` raises; empty if it raises none."""
    try:
        action(*arguments)
    except UnsupportedError as error:
        return error.reasons
    return ()
