"""What requests leave behind between forward passes: GDN states, convolution windows, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import DtypeError, ValueRangeError
from qwen35.model.batch import Batch, make_batch
from qwen35.model.config import LayerType, TextConfig


@dataclass(frozen=True, slots=True)
class GdnPool:
    """One GDN layer: ``states`` [N, HV, V, K] and ``windows`` [N, C, W-1] (oldest input first)."""

    states: Tensor
    windows: Tensor


@dataclass(frozen=True, slots=True)
class KvPool:
    """One attention layer: ``keys`` (rotated) and ``values``, [N, max_length, KV heads, head width]."""

    keys: Tensor
    values: Tensor


class Pools:
    """``slots`` places for requests of up to ``max_length`` tokens, and who holds them.

    ``layers`` has one pool a layer. A slot is taken with ``open`` and given back with ``close``; what the last
    holder left in it is never read, since a request starts fresh. Raises ``ValueRangeError`` for sizes under 1 and
    ``DtypeError`` for a ``state_dtype`` that is none.
    """

    def __init__(
        self, config: TextConfig, *, slots: int, max_length: int, device: torch.device, dtype: torch.dtype,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        for name, size in (("slots", slots), ("max_length", max_length)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueRangeError(f"{name} must be an int of at least 1, got {size!r}")
        if not isinstance(state_dtype, torch.dtype):
            raise DtypeError(f"state_dtype must be a torch.dtype, got {state_dtype!r}")
        self.slots, self.max_length, self._device = slots, max_length, device
        self._lengths: dict[int, int] = {}

        def zeros(shape: Sequence[int], of: torch.dtype) -> Tensor:
            return torch.zeros(slots, *shape, dtype=of, device=device)

        def pool(kind: LayerType) -> GdnPool | KvPool:
            if kind is LayerType.ATTENTION:
                shape = (max_length, config.kv_heads, config.head_width)
                return KvPool(zeros(shape, dtype), zeros(shape, dtype))
            g = config.gdn
            states = zeros((g.value_heads, g.value_width, g.key_width), state_dtype)
            return GdnPool(states, zeros((g.conv_channels, config.conv_width - 1), dtype))

        self.layers = tuple(pool(kind) for kind in config.layer_types)

    def open(self) -> int:
        """Take a free slot, whose request has no tokens yet. Raises ``ValueRangeError`` where none is free."""
        for slot in range(self.slots):
            if slot not in self._lengths:
                self._lengths[slot] = 0
                return slot
        raise ValueRangeError(f"all {self.slots} slots are in use; close one first")

    def close(self, slot: int) -> None:
        """Give ``slot`` back. Raises ``ValueRangeError`` where it is not open."""
        self.length(slot)
        del self._lengths[slot]

    def length(self, slot: int) -> int:
        """Tokens that the request in ``slot`` has in the pools."""
        if isinstance(slot, bool) or not isinstance(slot, SupportsIndex) or slot not in self._lengths:
            raise ValueRangeError(f"slot {slot!r} is not open; open: {sorted(self._lengths)}")
        return self._lengths[slot]

    def extend_batch(self, rows: Sequence[int], lengths: Sequence[int]) -> Batch:
        """The batch that adds ``lengths[i]`` tokens to the request in slot ``rows[i]``.

        Raises ``ValueRangeError`` for a slot that is not open or named twice, a length under 1, or a request
        that would outgrow ``max_length``.
        """
        return self._batch(Phase.EXTEND, rows, lengths)

    def decode_batch(self, rows: Sequence[int]) -> Batch:
        """The batch that adds one token to each request; as ``extend_batch``, and none may be fresh."""
        _check_rows(rows)
        for row in rows:
            if not self.length(row):
                raise ValueRangeError(f"slot {row} has no tokens yet; extend it with its prompt first")
        return self._batch(Phase.DECODE, rows, [1] * len(rows))

    def advance(self, batch: Batch) -> None:
        """Count the tokens of ``batch``, which a forward pass has just written."""
        for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True):
            self._lengths[row] = start + length

    def _batch(self, phase: Phase, rows: Sequence[int], lengths: Sequence[int]) -> Batch:
        _check_rows(rows)
        if len(rows) != len(lengths) or not rows:
            raise ValueRangeError(f"a batch must have a length for each slot, got {len(lengths)} for {len(rows)}")
        starts = [self.length(row) for row in rows]
        if len(set(rows)) != len(rows):
            raise ValueRangeError(f"a batch must name each slot once, got {list(rows)}")
        for row, start, length in zip(rows, starts, lengths, strict=True):
            if length < 1:
                raise ValueRangeError(f"slot {row} must be given at least one token, got {length}")
            if start + length > self.max_length:
                raise ValueRangeError(
                    f"slot {row} holds at most max_length = {self.max_length} tokens, got {start} + {length}"
                )
        return make_batch(phase, rows, starts, lengths, self._device)


def _check_rows(rows: object) -> None:
    if not is_list(rows):
        raise ValueRangeError(f"slots must be a list of slots, got {rows!r}")


def is_list(value: object) -> bool:
    """Whether ``value`` is a sequence, and no text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
