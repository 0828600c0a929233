"""The relay: pool-indexed buffers that carry one step's values to a later one, in any order of payloads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from qwen35.domain.errors import CaptureError, DeviceError, DtypeError, ShapeError, UnknownNameError, ValueRangeError
from qwen35.domain.relay import PADDING_ROW, RelayField, new_fields
from qwen35.ports._device import with_index
from qwen35.ports.support import dtype_name
from qwen35.services.devices import capturing


class Relay:
    """Buffers of ``rows`` rows each, one a field, made when the field is first carried.

    Row 0 is the padding row. In ``checked`` mode indices are read from the device, and a row that is read before it
    was written is an error; otherwise such a row is zero. Nothing else waits for the device. "cuda" is the GPU that is
    current when the relay is made.
    """

    def __init__(
        self, rows: int, device: torch.device | str, checked: bool = False, *,
        inside: Callable[[torch.device], bool] = capturing,
    ) -> None:  # fmt: skip
        if rows < 1:
            raise ValueRangeError(f"rows must be at least 1 (the padding row), got {rows}")
        self._rows, self._device, self._checked, self._inside = rows, with_index(torch.device(device)), checked, inside
        self._fields: dict[str, RelayField] = {}
        self._buffers: dict[str, Tensor] = {}
        self._written: dict[str, Tensor] = {}

    @property
    def fields(self) -> Mapping[str, RelayField]:
        """The fields carried so far."""
        return dict(self._fields)

    def buffer(self, name: str) -> Tensor:
        """The buffer [rows, ...] of a field that was carried; its address never changes."""
        return self._buffers[name]

    def stash(self, indices: Tensor, payload: Mapping[str, Tensor]) -> None:
        """Write row i of each tensor of ``payload`` [B, ...] to row ``indices[i]`` ([B] int32 or int64).

        A field that is absent keeps its rows. An empty batch is a no-op. Raises ``ShapeError``, ``DtypeError``,
        ``DeviceError`` or ``ValueRangeError`` before anything is written, and ``CaptureError`` where a buffer would
        have to be made inside capture.
        """
        if not self._admit(indices):
            return
        for name, rows in payload.items():
            if rows.device != indices.device:
                raise DeviceError(f"relay field {name!r} must be on {indices.device}, got {rows.device}")
            if rows.dim() < 1 or rows.shape[0] != indices.shape[0]:
                raise ShapeError(f"relay field {name!r} must have B = {indices.shape[0]} rows, got {list(rows.shape)}")
        described = {n: RelayField(tuple(t.shape[1:]), dtype_name(t.dtype)) for n, t in payload.items()}
        fresh = new_fields(self._fields, described)
        if fresh and self._inside(self._device):
            raise CaptureError(f"relay fields {sorted(fresh)} are first carried inside capture: carry them once before")
        if self._reads_values(indices):
            self._check_distinct(indices)
        for name in fresh:
            with torch.inference_mode(False):  # or no step outside that mode could write them
                self._buffers[name] = payload[name].new_zeros(self._rows, *payload[name].shape[1:])
                self._written[name] = torch.zeros(self._rows, dtype=torch.bool, device=self._device)
            self._fields[name] = fresh[name]
        for name, rows in payload.items():
            self._buffers[name].index_copy_(0, indices.long(), rows.detach())
            if self._checked:
                self._written[name].index_fill_(0, indices.long(), True)

    def gather(self, indices: Tensor, fields: Collection[str] | None = None) -> dict[str, Tensor]:
        """Rows ``indices`` [B] of ``fields`` (None: every one carried so far), as new tensors [B, ...].

        An empty batch gives empty tensors. Raises ``UnknownNameError`` for a field that was never carried, and in
        checked mode ``ValueRangeError`` for a row that was never written (the padding row apart).
        """
        names = tuple(self._fields if fields is None else fields)
        for name in names:
            if name not in self._fields:
                raise UnknownNameError("relay field", name, self._fields)
        self._admit(indices)
        if self._checked and not self._inside(self._device):
            live = indices[indices != PADDING_ROW].long()
            for name in names:
                missing = live[~self._written[name][live]]
                if missing.numel():
                    raise ValueRangeError(f"relay field {name!r} row {int(missing[0])} is read before it was written")
        return {name: self._buffers[name].index_select(0, indices.long()) for name in names}

    def _admit(self, indices: Tensor) -> bool:
        """Check ``indices``; whether there are any."""
        if indices.dim() != 1:
            raise ShapeError(f"indices must be [B], got {list(indices.shape)}")
        if indices.dtype not in (torch.int32, torch.int64):
            raise DtypeError(f"indices must be int32 or int64, got {dtype_name(indices.dtype)}")
        if _place(indices.device) != _place(self._device):
            raise DeviceError(f"indices must be on {self._device}, got {indices.device}")
        if not indices.numel():
            return False
        if self._reads_values(indices):
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= self._rows:
                raise ValueRangeError(f"indices must be in 0..{self._rows - 1}, got {low if low < 0 else high}")
        return True

    def _reads_values(self, indices: Tensor) -> bool:
        return indices.device.type == "cpu" or (self._checked and not self._inside(self._device))

    def _check_distinct(self, indices: Tensor) -> None:
        live = indices[indices != PADDING_ROW]
        unique, counts = torch.unique(live, return_counts=True)
        if unique.numel() != live.numel():
            raise ValueRangeError(f"indices must be distinct, got {int(unique[counts > 1][0])} more than once")


def _place(device: torch.device) -> tuple[str, int]:
    """What two devices have in common that are one, with their numbers or without."""
    return device.type, device.index or 0
