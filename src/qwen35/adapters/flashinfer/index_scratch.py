"""Where the index launch of a decode or verify writes, found once for each stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35.ports.gdn_calls import DecodeCall, VerifyCall
from qwen35.services.devices import capturing

_Call = DecodeCall | VerifyCall


@dataclass(frozen=True, slots=True)
class IndexScratch:
    """Where the index launch writes: slots to read and to write [B], and gate inputs [B, T, HV] that are limited."""

    read: Tensor
    write: Tensor
    clamped: Tensor | None


class IndexPlaces:
    """The index scratch of calls of one layout, by stream: ``make`` finds that of the current one.

    It is found once and remembered, but for calls inside capture, by which scratch learns what a graph holds.
    """

    __slots__ = ("_device", "_make", "_places")

    def __init__(self, make: Callable[[_Call], IndexScratch], device: torch.device) -> None:
        self._make, self._device = make, device
        self._places: dict[int, IndexScratch] = {}

    def __call__(self, call: _Call, stream: int) -> IndexScratch:
        """Where the index launch of ``call`` writes. ``stream``: the current one."""
        place = self._places.get(stream)
        if place is None or capturing(self._device):
            place = self._places[stream] = self._make(call)
        return place
