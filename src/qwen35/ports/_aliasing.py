"""Whether tensors share memory: exact for every stride, and two comparisons of addresses where they lie apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen35.domain.errors import LayoutError

Named = tuple[str, Tensor | None]


def no_overlap(name: str, tensor: Tensor) -> None:
    """No two elements of ``tensor`` share an address, so far as its strides nest (all usual views do)."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach and tensor.numel():
                raise LayoutError(
                    f"{name} must not overlap itself, got shape {list(tensor.shape)} with strides {tensor.stride()}"
                )
            reach += (size - 1) * stride


def apart(written: Sequence[Named], read: Sequence[Named]) -> None:
    """No tensor that a call writes shares an element with another of its tensors. Looks at addresses."""
    spans = [(name, tensor, *_span(tensor)) for name, tensor in (*written, *read) if tensor is not None]
    count = sum(tensor is not None for _, tensor in written)
    for i, (name, tensor, start, end) in enumerate(spans[:count]):
        for other_name, other, other_start, other_end in spans[i + 1 :]:
            if start < other_end and other_start < end and _share(tensor, other):
                raise LayoutError(f"{name}, which the call writes, must not share memory with {other_name}")


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and the one past the last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether some byte belongs to both: columns of one projection and pages of one buffer do not share any."""
    (starts, length), (others, other_length) = _runs(a), _runs(b)
    others = others.sort().values
    first = torch.searchsorted(others, starts - other_length, right=True)
    return bool((first < torch.searchsorted(others, starts + length)).any())


def _runs(tensor: Tensor) -> tuple[Tensor, int]:
    """Addresses of the dense runs of bytes that make up ``tensor``, and the bytes of one."""
    length, dims = 1, tensor.dim()
    while dims and (tensor.shape[dims - 1] == 1 or tensor.stride(dims - 1) == length):
        dims -= 1
        length *= tensor.shape[dims]
    starts = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape[:dims], tensor.stride()[:dims], strict=True):
        starts = (starts[:, None] + torch.arange(size) * stride).flatten()
    return tensor.data_ptr() + starts * tensor.element_size(), length * tensor.element_size()
