"""Tensors in the layouts that SGLang's kernels read, without copies where the caller's already are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qwen35.ports.gdn_calls import DecodeCall, VerifyCall
from qwen35.services.scratch import Scratch


def packed_projection(call: DecodeCall, scratch: Scratch) -> Tensor:
    """q, k and v of each row side by side, [B, 2HK + HV*V]: a view where they were cut from one projection, else
    three copies into scratch. Tensors of their own may lie side by side too, where an allocator put them there."""
    batch = call.q.shape[0]
    parts = (call.q, call.k, call.v)
    widths = [x.shape[1] * x.shape[2] for x in parts]
    item, pitch = call.q.element_size(), call.q.stride(0)
    starts = [call.q.data_ptr() + item * sum(widths[:i]) for i in range(3)]
    adjacent = all(
        x.data_ptr() == start and x.stride(0) == pitch and x.stride(1) == x.shape[2]
        for x, start in zip(parts, starts, strict=True)
    )
    if adjacent and (pitch >= sum(widths) or batch == 1) and _one_storage(parts):
        return call.q.as_strided((batch, sum(widths)), (max(pitch, sum(widths)), 1))
    mixed = scratch.take("mixed", (batch, sum(widths)), call.q.dtype, call.q.device)
    for x, part in zip(parts, torch.split(mixed, widths, dim=1), strict=True):
        torch.unflatten(part, 1, x.shape[1:]).copy_(x)
    return mixed


def _one_storage(tensors: Iterable[Tensor]) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def one_pitch(tensor: Tensor) -> Tensor:
    """``tensor`` [B, T, ...] with the stride of its token dimension stated even where T is 1, since the kernel walks
    rows by it."""
    if tensor.shape[1] != 1:
        return tensor
    return tensor.as_strided(tensor.shape, (tensor.stride(0), tensor.stride(0), *tensor.stride()[2:]))


def verify_layout_reasons(call: VerifyCall, gates: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
    """What the recurrent kernel cannot address: it has one stride from token to token over all rows, dense heads,
    and intermediates of whole nodes."""
    batch, draft = call.q.shape[:2]
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v), *gates):
        if batch > 1 and draft > 1 and x.stride(0) != draft * x.stride(1):
            yield f"{name} requires one stride from token to token over all rows, got {x.stride()[:2]}"
        if x.dim() == 4 and x.shape[2] > 1 and x.stride(2) != x.shape[3]:
            yield f"{name} requires dense heads, got stride {x.stride(2)}"
    node = call.states[0].numel() if call.states.shape[0] else 1
    rows, nodes = call.intermediates.stride()[:2]
    whole = call.intermediates.shape[0] < 2 or rows % node == 0
    if not whole or (call.intermediates.shape[1] > 1 and nodes != node):
        yield f"intermediates require dense nodes and rows of whole nodes, got strides {(rows, nodes)}"


def offsets_without_empty(lengths: Iterable[int], like: Tensor) -> Tensor:
    """cu_seqlens of the sequences that have tokens, in a new tensor: the kernel's helpers remember chunk indices by
    the identity of this tensor, not by its values."""
    total, offsets = 0, [0]
    for length in lengths:
        if length:
            total += length
            offsets.append(total)
    return torch.tensor(offsets, dtype=torch.int64, device=like.device)
