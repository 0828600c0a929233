"""The cheap question whether tensors look like known ones never says yes of others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from qwen35.ports._layout import LayoutCheck, compiled_check, layout_check, plain_check

CHECKS = [plain_check, compiled_check, layout_check]
Make = Callable[[Sequence[Tensor]], LayoutCheck]


def facts(tensor: Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def drawn(source: random.Random) -> Tensor:
    """One of a few hundred layouts, many of which differ in one thing."""
    shape = [source.choice([1, 2, 3]) for _ in range(source.choice([1, 2, 3]))]
    strides = [source.choice([1, 2, 4]) for _ in shape]
    dtype = source.choice([torch.bfloat16, torch.float16, torch.float32, torch.int32])
    made = torch.empty(64, dtype=dtype, device=source.choice(["cpu", "meta"])).as_strided(shape, strides)
    return torch.nn.Parameter(made, requires_grad=False) if source.random() < 0.2 else made


@pytest.mark.parametrize("make", CHECKS)
def test_yes_is_said_exactly_of_equal_layouts(make: Make, seed: int) -> None:
    source = random.Random(seed)
    seen = {True: 0, False: 0}
    for _ in range(1500):
        known, other = drawn(source), drawn(source)
        if source.random() < 0.3:
            other = known.new_empty(64).as_strided(known.shape, known.stride())
            other = torch.nn.Parameter(other, requires_grad=False) if type(known) is torch.nn.Parameter else other
        same = facts(known) == facts(other)
        assert make([known])(other) is same, (facts(known), facts(other))
        seen[same] += 1
    assert min(seen.values()) > 100, seen


@pytest.mark.parametrize("make", CHECKS)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_every_tensor_counts(make: Make, at: int) -> None:
    def tensors() -> list[Tensor]:
        return [torch.empty(2, 3), torch.empty(4, dtype=torch.int32), torch.empty(2, 3)]

    check, others = make(tensors()), tensors()
    assert check(*others) is True
    for wrong in (others[at].double(), others[at][:1], others[at].to("meta"), None, "q"):
        changed: list[object] = [*others]
        changed[at] = wrong
        assert check(*changed) is False


@pytest.mark.parametrize("make", CHECKS)
def test_another_autograd_mode_gives_no_wrong_yes(make: Make) -> None:
    known, other = torch.empty(2, 3), torch.empty(3, 2)
    check = make([known])
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not check(other)
            assert make([torch.empty(2, 3)])(torch.empty(2, 3)) is True


def test_this_torch_has_the_fast_one() -> None:
    assert layout_check is compiled_check
