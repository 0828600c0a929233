"""Whether tensors look exactly like those of a call that was admitted before, asked as cheaply as torch allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor

LayoutCheck = Callable[..., bool]


def plain_check(tensors: Sequence[Tensor]) -> LayoutCheck:
    """``layout_check`` by public functions alone: exact, and five times as slow."""
    known = [(type(tensor), _facts(tensor)) for tensor in tensors]

    def same(*others: Tensor) -> bool:
        return all(
            type(other) is kind and _facts(other) == facts for other, (kind, facts) in zip(others, known, strict=True)
        )

    return same


def compiled_check(tensors: Sequence[Tensor]) -> LayoutCheck:
    """``layout_check`` by the comparison that torch.compile guards its graphs with. Raises where torch has none."""
    guards = import_module("torch._C._dynamo.guards")
    check: LayoutCheck = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _facts(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _compiled_works() -> bool:
    """Whether this torch's comparison is there and tells what we need told; it is no public interface of torch."""
    like, other = torch.empty(2, 3), torch.empty(2, 3)
    unlike = (other[:1], other.t(), other.int(), other.to("meta"), other.view(2, 1, 3), other[:, ::2], None)
    try:
        check = compiled_check([like])
        return check(other) is True and not any(check(tensor) for tensor in unlike)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return False


#: A function of as many tensors as the pattern has that says whether each has the type, dtype, device, shape and
#: strides of its own in the pattern, which is not retained. It may say no of equal layouts (in another autograd mode,
#: or where one tensor is given twice), never yes of different ones.
layout_check: Callable[[Sequence[Tensor]], LayoutCheck] = compiled_check if _compiled_works() else plain_check
