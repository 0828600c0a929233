"""Checks of the convolution calls; the rules are those of ``gdn_checks``."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.domain.errors import DtypeError, ShapeError, ValueRangeError
from qwen35.ports import _checks as check
from qwen35.ports._aliasing import Named, apart, no_overlap
from qwen35.ports.conv_calls import ConvCommitCall, ConvDecodeCall, ConvExtendCall, ConvVerifyCall

_TokenCall = ConvDecodeCall | ConvExtendCall | ConvVerifyCall


def check_conv_decode(call: ConvDecodeCall, values: bool = False) -> None:
    """Raise a ``ContractError`` where ``call`` does not meet the contract."""
    check.kind("decode", call, ConvDecodeCall)
    (batch,) = _tokens(call, 1, "[B, C]")
    _slots(call.slots, call.write_slots, batch, call.windows, values)
    if values or call.windows.is_cpu:
        index = (("slots", call.slots), ("write_slots", call.write_slots))
        apart((("out", call.out), ("windows", call.windows)), (*_inputs(call), *index))


def check_conv_extend(call: ConvExtendCall, values: bool = False) -> None:
    """Raise a ``ContractError`` where ``call`` does not meet the contract."""
    check.kind("extend", call, ConvExtendCall)
    (tokens,) = _tokens(call, 1, "[T, C]")
    check.rank("cu_seqlens", call.cu_seqlens, 1, "[S+1]")
    sequences = call.cu_seqlens.shape[0] - 1
    if sequences < 0:
        raise ShapeError("cu_seqlens must be [S+1] with at least one entry, got none")
    on = call.windows.device
    check.vector("cu_seqlens", call.cu_seqlens, sequences + 1, on, check.INDEX_DTYPES, "[S+1]")
    if call.seq_lens_host is not None:
        check.host_lengths(call.seq_lens_host, sequences, tokens)
    if call.fresh is not None:
        check.vector("fresh", call.fresh, sequences, on, (torch.bool,), "[S]")
    if values or check.host_values(call.cu_seqlens):
        check.offsets(call.cu_seqlens, tokens, call.seq_lens_host)
    _slots(call.slots, call.write_slots, sequences, call.windows, values)
    if values or call.windows.is_cpu:
        index: list[Named] = [("slots", call.slots), ("write_slots", call.write_slots), ("fresh", call.fresh)]
        index.append(("cu_seqlens", call.cu_seqlens))
        apart((("out", call.out), ("windows", call.windows)), (*_inputs(call), *index))


def check_conv_verify(call: ConvVerifyCall, values: bool = False) -> None:
    """Raise a ``ContractError`` where ``call`` does not meet the contract."""
    check.kind("verify", call, ConvVerifyCall)
    batch, draft = _tokens(call, 2, "[B, T, C]")
    _intermediates(call.intermediates, call.windows)
    if call.intermediates.shape[1] < draft:
        raise ShapeError(f"intermediates must hold T >= {draft} nodes, got {call.intermediates.shape[1]}")
    check.vector("slots", call.slots, batch, call.windows.device, check.INDEX_DTYPES, "[B]")
    if call.parents is not None:
        check.shape("parents", call.parents, (batch, draft), "[B, T]")
    read = values or check.host_values(call.slots, call.rows, call.parents)
    if read:
        check.in_range("slots", call.slots, -1, call.windows.shape[0], "-1 or a slot")
    check.rows_and_parents(call.rows, call.parents, call.slots, call.intermediates.shape[0], read)
    if values or call.windows.is_cpu:
        index = (("slots", call.slots), ("rows", call.rows), ("parents", call.parents))
        written = (("out", call.out), ("intermediates", call.intermediates))
        apart(written, (("windows", call.windows), *_inputs(call), *index))


def check_conv_commit(call: ConvCommitCall, values: bool = False) -> None:
    """Raise a ``ContractError`` where ``call`` does not meet the contract."""
    check.kind("commit", call, ConvCommitCall)
    _windows(call.windows)
    _intermediates(call.intermediates, call.windows)
    check.rank("slots", call.slots, 1, "[B]")
    batch = call.slots.shape[0]
    check.vector("last", call.last, batch, call.windows.device, check.INDEX_DTYPES, "[B]")
    check.vector("slots", call.slots, batch, call.windows.device, check.INDEX_DTYPES, "[B]")
    rows, nodes = call.intermediates.shape[:2]
    check.rows_and_parents(call.rows, None, call.slots, rows, values=False)
    if values or check.host_values(call.slots, call.rows, call.last):
        check.commit_values(call.slots, call.last, call.rows, call.windows.shape[0], rows, nodes)
        index = (("slots", call.slots), ("last", call.last), ("rows", call.rows))
        apart((("windows", call.windows),), (("intermediates", call.intermediates), *index))


def _windows(windows: Tensor) -> None:
    check.rank("windows", windows, 3, "[N, C, W-1]")
    check.dtype("windows", windows, check.TOKEN_DTYPES)
    check.sizes("windows", windows, (("C", windows.shape[1], 1), ("W", windows.shape[2] + 1, 2)))
    check.dense_tail("windows", windows, 2)


def _intermediates(intermediates: Tensor, windows: Tensor) -> None:
    check.rank("intermediates", intermediates, 4, "[R, T, C, W-1]")
    if intermediates.shape[2:] != windows.shape[1:]:
        raise ShapeError(
            f"intermediates must end in the windows' [C, W-1] = {list(windows.shape[1:])}, "
            f"got {list(intermediates.shape)}"
        )
    check.dtype("intermediates", intermediates, (windows.dtype,))
    check.device("intermediates", intermediates, windows.device)
    check.dense_tail("intermediates", intermediates, 2)


def _tokens(call: _TokenCall, lead: int, why: str) -> tuple[int, ...]:
    _windows(call.windows)
    x, weight, on = call.x, call.weight, call.windows.device
    check.rank("x", x, lead + 1, why)
    channels = x.shape[-1]
    check.rank("weight", weight, 2, "[C, W]")
    check.sizes("weight", weight, (("C", weight.shape[0], 1), ("W", weight.shape[1], 2)))
    check.shape("weight", weight, (channels, weight.shape[1]), "[C, W]")
    check.shape("windows", call.windows, (call.windows.shape[0], channels, weight.shape[1] - 1), "[N, C, W-1]")
    check.dtype("x", x, check.TOKEN_DTYPES)
    check.dtype("weight", weight, check.TOKEN_DTYPES)
    check.device("weight", weight, on)
    check.last_contiguous("weight", weight)
    if call.bias is not None:
        check.vector("bias", call.bias, channels, on, check.TOKEN_DTYPES, "[C]")
    if call.activation not in ("silu", None):
        raise ValueRangeError(f"activation must be 'silu' or None, got {call.activation!r}")
    for name, tensor in (("x", x), ("out", call.out)):
        if tensor is None:
            continue
        check.shape(name, tensor, x.shape, why)
        if tensor.dtype != x.dtype:
            raise DtypeError(f"{name} must be {x.dtype} like x, got {tensor.dtype}")
        check.device(name, tensor, on)
        check.last_contiguous(name, tensor)
    if call.out is not None:
        no_overlap("out", call.out)
    return tuple(x.shape[:lead])


def _inputs(call: _TokenCall) -> tuple[Named, ...]:
    """What every call of tokens only reads."""
    return (("x", call.x), ("weight", call.weight), ("bias", call.bias))


def _slots(slots: Tensor, write_slots: Tensor | None, size: int, windows: Tensor, values: bool) -> None:
    check.vector("slots", slots, size, windows.device, check.INDEX_DTYPES, "one a sequence")
    if write_slots is not None:
        check.vector("write_slots", write_slots, size, windows.device, check.INDEX_DTYPES, "one a sequence")
    if values or check.host_values(slots, write_slots):
        check.slot_values(slots, write_slots, windows.shape[0])
