"""Small checks from which the call checks are made. Each raises with the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from qwen35.domain.errors import (
    ContractError,
    DeviceError,
    DtypeError,
    LayoutError,
    ShapeError,
    ValueRangeError,
)
from qwen35.ports._aliasing import no_overlap

INDEX_DTYPES = (torch.int32, torch.int64)
TOKEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def tensor(name: str, value: object) -> None:
    """``value`` is a tensor at all. ``rank`` and ``shape`` ask this first."""
    if not isinstance(value, Tensor):
        raise ContractError(f"{name} must be a tensor, got {type(value).__name__}")


def kind(phase: str, call: object, expected: type) -> None:
    """``call`` is a call object of its phase. Every check of a call asks this first."""
    if not isinstance(call, expected):
        raise ContractError(f"{phase} requires a {expected.__name__}, got {type(call).__name__}")


def integer(name: str, value: object, least: int) -> None:
    """``value`` is an int (no bool, no float) of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueRangeError(f"{name} must be an int >= {least}, got {value!r}")


def finite(name: str, value: object) -> None:
    """``value`` is None or a finite number."""
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueRangeError(f"{name} must be None or a finite number, got {value!r}")


def shape(name: str, value: Tensor, expected: Sequence[int], why: str) -> None:
    """``value`` has exactly the ``expected`` sizes, whose meaning ``why`` spells ("[B, H, K]")."""
    tensor(name, value)
    if value.shape != torch.Size(expected):
        raise ShapeError(f"{name} must be {why} = {list(expected)}, got {list(value.shape)}")


def rank(name: str, value: Tensor, dims: int, why: str) -> None:
    tensor(name, value)
    if value.dim() != dims:
        raise ShapeError(f"{name} must be {why}, got shape {list(value.shape)}")


def sizes(name: str, value: Tensor, least: Sequence[tuple[str, int, int]]) -> None:
    """Each (size's letter, its value, the least it may be) holds."""
    for letter, size, lowest in least:
        if size < lowest:
            got = f"{letter} = {size} in shape {list(value.shape)}"
            raise ShapeError(f"{name} must have {letter} >= {lowest}, got {got}")


def dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise DtypeError(f"{name} must be {names}, got {str(tensor.dtype).removeprefix('torch.')}")


def device(name: str, tensor: Tensor, expected: torch.device) -> None:
    if tensor.device != expected:
        raise DeviceError(f"{name} must be on {expected} like the states, got {tensor.device}")


def last_contiguous(name: str, tensor: Tensor) -> None:
    """Tokens may be views of a packed projection: only the last dimension must be contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise LayoutError(
            f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}; call .contiguous() on it"
        )


def dense_tail(name: str, tensor: Tensor, dims: int) -> None:
    """The last ``dims`` dimensions are dense; the ones before may have any stride that does not overlap."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[-dims:]), reversed(tensor.stride()[-dims:]), strict=True):
        if size > 1 and stride != expected:
            raise LayoutError(f"{name} must be dense in its last {dims} dimensions, got strides {tensor.stride()}")
        expected *= size
    no_overlap(name, tensor)


def vector(name: str, tensor: Tensor, size: int, on: torch.device, dtypes: Sequence[torch.dtype], why: str) -> None:
    """A dense one-dimensional index or flag tensor of ``size`` entries."""
    shape(name, tensor, (size,), why)
    dtype(name, tensor, dtypes)
    device(name, tensor, on)
    if size > 1 and tensor.stride(0) != 1:
        raise LayoutError(f"{name} must be contiguous, got stride {tensor.stride(0)}")


def host_values(*tensors: Tensor | None) -> bool:
    """Whether the host knows the values of all of these without waiting for a device."""
    return all(t is None or t.device.type == "cpu" for t in tensors)


def in_range(name: str, tensor: Tensor, low: int, high: int, what: str, live: Tensor | None = None) -> None:
    """Every value (of the ``live`` ones) is in low..high-1. Reads the values: host tensors or checked mode only."""
    bad = (tensor < low) | (tensor >= high)
    if live is not None:
        bad &= live
    if bool(bad.any()):
        where = int(bad.flatten().nonzero()[0])
        value = int(tensor.flatten()[where])
        raise ValueRangeError(f"{name}[{where}] must be {what} in {low}..{high - 1}, got {value}")


def distinct(name: str, values: Tensor, live: Tensor) -> None:
    """No two live entries are equal. Reads the values."""
    used = values[live]
    unique, counts = torch.unique(used, return_counts=True)
    if unique.numel() != used.numel():
        twice = int(unique[counts > 1][0])
        raise ValueRangeError(f"{name} must be distinct among live rows, got {twice} more than once")


def offsets(cu_seqlens: Tensor, tokens: int, seq_lens_host: tuple[int, ...] | None) -> None:
    """cu_seqlens starts at 0, never decreases, ends at ``tokens`` and agrees with the host's lengths."""
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueRangeError(f"cu_seqlens must start at 0, got {values[0]}")
    for i, (left, right) in enumerate(pairwise(values)):
        if right < left:
            raise ValueRangeError(f"cu_seqlens must not decrease, got {left} then {right} at {i + 1}")
    if values[-1] != tokens:
        raise ValueRangeError(f"cu_seqlens must end at T = {tokens}, got {values[-1]}")
    if seq_lens_host is not None:
        lengths = tuple(b - a for a, b in pairwise(values))
        if lengths != tuple(seq_lens_host):
            raise ValueRangeError(
                f"seq_lens_host must equal cu_seqlens' lengths {list(lengths)}, got {list(seq_lens_host)}"
            )


def host_lengths(seq_lens_host: object, sequences: int, tokens: int) -> None:
    """The lengths that the host gave are ints, one a sequence, not negative, and add up to ``tokens``."""
    if not isinstance(seq_lens_host, tuple | list):
        # A tensor may lie on a device, where looking at its values would synchronise.
        raise ContractError(
            f"seq_lens_host must be a tuple or list of ints, got {type(seq_lens_host).__name__}: give the lengths that "
            "the host knows, or None"
        )
    for i, length in enumerate(seq_lens_host):
        if type(length) is not int:
            raise ContractError(
                f"seq_lens_host[{i}] must be an int, got {type(length).__name__}: convert the lengths by int() where "
                "they are known on the host, or give None"
            )
    if len(seq_lens_host) != sequences:
        raise ShapeError(f"seq_lens_host must have S = {sequences} lengths, got {len(seq_lens_host)}")
    if sequences and min(seq_lens_host) < 0:
        raise ValueRangeError(f"seq_lens_host must not be negative, got {min(seq_lens_host)}")
    if sum(seq_lens_host) != tokens:
        raise ValueRangeError(f"seq_lens_host must add up to T = {tokens}, got {sum(seq_lens_host)}")


def rows_and_parents(rows: Tensor | None, parents: Tensor | None, slots: Tensor, capacity: int, values: bool) -> None:
    """Shapes of ``rows`` and ``parents``, and with ``values`` their ranges over live rows."""
    batch = slots.shape[0]
    if rows is not None:
        vector("rows", rows, batch, slots.device, INDEX_DTYPES, "[B]")
    elif batch > capacity:
        raise ShapeError(f"intermediates must have R >= B = {batch} rows where rows is None, got {capacity}")
    if parents is not None:
        dtype("parents", parents, INDEX_DTYPES)
        device("parents", parents, slots.device)
        last_contiguous("parents", parents)
    if not values:
        return
    live = slots >= 0
    if rows is not None:
        in_range("rows", rows, 0, capacity, "a row of intermediates", live)
        distinct("rows", rows, live)
    if parents is not None and parents.numel():
        node = torch.arange(parents.shape[1], device=parents.device)
        bad = ((parents < -1) | (parents >= node)) & live[:, None]
        if bool(bad.any()):
            row, at = (int(i) for i in bad.nonzero()[0])
            raise ValueRangeError(f"parents[{row}, {at}] must be in -1..{at - 1}, got {int(parents[row, at])}")


def slot_values(slots: Tensor, write_slots: Tensor | None, pool: int) -> None:
    """Slots are -1 or in the pool; no live row writes what another live row writes or reads. Reads the values."""
    in_range("slots", slots, -1, pool, "-1 or a slot")
    if write_slots is None:
        distinct("slots", slots, slots >= 0)
        return
    in_range("write_slots", write_slots, -1, pool, "-1 or a slot")
    live = slots >= 0
    written = torch.where(live, write_slots.to(slots.dtype), -1)
    distinct("write_slots", written, written >= 0)
    clash = (written[:, None] == slots[None, :]) & live[:, None] & live[None, :]
    if bool(clash.fill_diagonal_(False).any()):
        i, j = (int(n) for n in clash.nonzero()[0])
        raise ValueRangeError(
            f"write_slots[{i}] = {int(written[i])} is read by row {j}: which comes first is not defined; "
            "write a slot that no other row reads"
        )


def commit_values(slots: Tensor, last: Tensor, rows: Tensor | None, pool: int, capacity: int, nodes: int) -> None:
    """What a commit copies is in range, and no slot is written twice; rows that copy nothing may hold anything.

    Several rows may copy from one row of the intermediates. Reads the values.
    """
    copies = (slots != -1) & (last != -1)
    in_range("slots", slots, 0, pool, "-1 or a slot", copies)
    in_range("last", last, 0, nodes, "-1 or a node", copies)
    if rows is not None:
        in_range("rows", rows, 0, capacity, "a row of intermediates", copies)
    distinct("slots", slots, copies)
