"""One forward pass: which tokens of which requests, and the index tensors that every layer shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from qwen35.domain.capabilities import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """S requests with T new tokens in all, packed one after another without padding.

    On the host: ``rows`` (pool slots), ``starts`` (tokens already in the pools) and ``lengths`` (new tokens), one a
    request. On the device: ``slots`` [S] int32, ``cu_seqlens`` [S+1] int32, ``fresh`` [S] bool (nothing in the pools
    yet), ``positions`` and ``token_slots`` [T] int64, ``ends`` [S] int64 (the row of each request's last token).
    ``phase`` is DECODE (one token a request, none fresh) or EXTEND.
    """

    phase: Phase
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: Tensor
    cu_seqlens: Tensor
    fresh: Tensor
    positions: Tensor
    token_slots: Tensor
    ends: Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths)


def make_batch(
    phase: Phase, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], device: torch.device
) -> Batch:
    """The batch of these requests on ``device``. ``Pools.extend_batch`` and ``decode_batch`` check and call it."""
    ends = [0, *accumulate(lengths)]
    positions = [p for start, n in zip(starts, lengths, strict=True) for p in range(start, start + n)]
    token_rows = [row for row, n in zip(rows, lengths, strict=True) for _ in range(n)]

    def on_device(values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        phase=phase, rows=tuple(rows), starts=tuple(starts), lengths=tuple(lengths),
        slots=on_device(rows, torch.int32), cu_seqlens=on_device(ends, torch.int32),
        fresh=on_device([start == 0 for start in starts], torch.bool),
        positions=on_device(positions, torch.int64), token_slots=on_device(token_rows, torch.int64),
        ends=on_device([end - 1 for end in ends[1:]], torch.int64),
    )  # fmt: skip
