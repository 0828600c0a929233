"""A decode whose layout was served is launched without FlashInfer's functions, where that is seen to do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_flashinfer_known import CPU, known, laid_out, want
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elsewhere import elsewhere
from fake_compiled import FakeCompiled, Kernel
from fake_flashinfer import FakeFlashInfer
from flashinfer_bed import BF16, F32, HOPPER, Bed
from qwen35.adapters.flashinfer.compiled import LOOSE, DecodeLayout
from qwen35.adapters.flashinfer.gated_delta_rule import FlashInferGatedDeltaRule
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.gated_delta_rule import DecodeCall
from qwen35.services.scratch import empty_aligned

#: Rows of a plan for which the kernel of many rows is looked at too.
MANY = 256


def bed_over(state: torch.dtype, most: int = MANY, **changes: Any) -> tuple[Bed, FakeCompiled]:
    """A bed whose FlashInfer keeps kernels, prepared."""
    bed = Bed(state, null=0, prepared=False)
    bed.plan = replace(bed.plan, max_batch=most)
    fake = FakeCompiled(FakeFlashInfer(), **changes)
    bed.fake = fake.fake
    bed.adapter = FlashInferGatedDeltaRule(fake.kernels(), bed.rows, HOPPER, AdapterOptions())
    bed.adapter.prepare(bed.plan)
    bed.fake.calls.clear()
    fake.launched.clear()
    return bed, fake


def loose(call: DecodeCall, *, packed: bool = False, padded: bool = False) -> DecodeCall:
    """``call`` as engines lay it out, with tokens of packed projections or a pool whose slots lie apart."""
    call = laid_out(call)
    parts = {name: apart(getattr(call, name)) for name in ("q", "k", "v") if packed}
    if padded:
        parts["states"] = apart(call.states.as_subclass(Tensor))
    return elsewhere(replace(call, **parts))


def apart(rows: Tensor) -> Tensor:
    """The same rows with 16 elements of NaN behind each."""
    size = rows[0].numel()
    room = empty_aligned((rows.shape[0], size + 16), rows.dtype, CPU, 32).fill_(float("nan"))
    return room[:, :size].view(rows.shape).copy_(rows)


def called(bed: Bed) -> int:
    return sum(name == "decode" for name, _ in bed.fake.calls)


@pytest.mark.parametrize("state", [F32, BF16], ids=str)
@pytest.mark.parametrize("slots", [[3], [4, -1, 2], [1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["in place", "write slots"])
def test_the_second_call_of_a_layout_launches_what_the_first_compiled(
    state: torch.dtype, slots: list[int], split: bool
) -> None:
    bed, fake = bed_over(state)
    changes: dict[str, Any] = {}
    if split:
        changes["write_slots"] = torch.tensor([5 if slot >= 0 else -1 for slot in slots[:1]] + slots[1:]).int()
    assert served(bed, fake, known(bed, slots, **changes)) == (0, 1)


def served(bed: Bed, fake: FakeCompiled, call: DecodeCall) -> tuple[int, int]:
    """How often the function was called and its kernel launched for ``call``, which is served right."""
    out, states = want(bed, call)
    bed.fake.calls.clear()
    fake.launched.clear()
    assert torch.equal(bed.adapter.decode(call), out), f"seed {bed.seed}"
    assert torch.equal(call.states, states), f"seed {bed.seed}"
    return called(bed), len(fake.launched)


#: As few rows as leave the kernel of many rows out.
FEW = 4


@pytest.mark.parametrize("split", [False, True], ids=["in place", "write slots"])
@pytest.mark.parametrize(
    ("state", "slots", "packed", "padded"),
    [
        *((state, [4, -1, 2], *lies) for state in (F32, BF16) for lies in ((True, False), (False, True), (True, True))),
        (F32, [3], True, True), (BF16, [3], True, True), (BF16, [1, 2, 3, 4], True, True),
    ],
    ids=str,
)  # fmt: skip
def test_so_does_one_of_a_layout_whose_rows_or_slots_lie_apart(
    state: torch.dtype, slots: list[int], packed: bool, padded: bool, split: bool
) -> None:
    bed, fake = bed_over(state, MANY if len(slots) == 4 else FEW)
    write = {"write_slots": torch.tensor([slot if slot < 0 else slot + 4 for slot in slots]).int()} if split else {}
    first, call = (loose(bed.decode(slots, pool=9, **write), packed=packed, padded=padded) for _ in range(2))
    bed.adapter.decode(first)
    assert served(bed, fake, call) == (0, 1)


def test_a_kernel_that_prepare_has_not_seen_is_not_launched() -> None:
    bed, fake = bed_over(BF16, most=4)
    call = known(bed, [1, 2, 3, 4])
    fake.launched.clear()
    bed.adapter.decode(call)
    assert called(bed) == 1
    assert not fake.launched


def swapped(kernel: Kernel) -> Kernel:
    """Takes q for k."""

    def other(*arguments: Any) -> None:
        shuffled = list(arguments)
        at = 4 if shuffled[1].dim() == 1 else 5  # behind the pool, A_log, a and dt_bias, and the unread corner
        shuffled[at], shuffled[at + 1] = shuffled[at + 1], shuffled[at]
        kernel(*shuffled)

    return other


def refusing(kernel: Kernel) -> Kernel:
    def other(*arguments: Any) -> None:
        raise TypeError("expected 16 arguments")

    return other


@pytest.mark.parametrize("state", [F32, BF16], ids=str)
@pytest.mark.parametrize("altered", [swapped, refusing])
def test_a_kernel_that_does_something_else_is_never_launched(
    state: torch.dtype, altered: Callable[[Kernel], Kernel]
) -> None:
    bed, fake = bed_over(state, altered=altered)
    call = known(bed, [4, -1, 2])
    out, states = want(bed, call)
    fake.launched.clear()
    assert torch.equal(bed.adapter.decode(call), out), f"seed {bed.seed}"
    assert torch.equal(call.states, states), f"seed {bed.seed}"
    assert called(bed) == 1
    assert not fake.launched


def astray_where(loose: str) -> Callable[[Kernel], Kernel]:
    """Takes q for k of tensors that lie so."""

    def altered(kernel: Kernel) -> Kernel:
        wrong = swapped(kernel)

        def other(*arguments: Any) -> None:
            pool, at = arguments[0], 4 if arguments[1].dim() == 1 else 5
            has = {
                "split": arguments[at + 5] is not arguments[at + 6], "packed": not arguments[at].is_contiguous(),
                "padded": not pool.is_contiguous(),
            }  # fmt: skip
            (wrong if has[loose] else kernel)(*arguments)

        return other

    return altered


@pytest.mark.parametrize("state", [F32, BF16], ids=str)
@pytest.mark.parametrize("what", sorted(LOOSE))
def test_one_that_goes_astray_over_some_layouts_alone_is_not_launched_for_those(state: torch.dtype, what: str) -> None:
    bed, fake = bed_over(state, FEW, altered=astray_where(what))
    write = {"write_slots": torch.tensor([7, 8]).int()} if what == "split" else {}
    lies = {"packed": what == "packed", "padded": what == "padded"}
    first, call = (loose(bed.decode([4, 2], pool=9, **write), **lies) for _ in range(2))
    bed.adapter.decode(first)
    assert served(bed, fake, call) == (1, 0)


def test_a_layout_that_prepare_could_not_see_is_served_by_the_function_and_others_are_not() -> None:
    bed, fake = bed_over(BF16, FEW, keeps_padded=False)
    fake.keeps_padded = True
    for padded, direct in ((True, False), (False, True)):
        for _ in range(2):
            call = loose(bed.decode([3]), padded=padded)
            out, _ = want(bed, call)
            bed.fake.calls.clear()
            fake.launched.clear()
            assert torch.equal(bed.adapter.decode(call), out), f"seed {bed.seed}"
        assert (called(bed), len(fake.launched)) == ((0, 1) if direct else (1, 0))


class Operators(TorchDispatchMode):
    """Notes every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("state", [F32, BF16], ids=str)
@pytest.mark.parametrize("slots", [[3], [1, 2, 3]], ids=str)
def test_finding_a_kernel_allocates_nothing_since_a_layout_may_be_seen_first_in_capture(
    state: torch.dtype, slots: list[int]
) -> None:
    bed, fake = bed_over(state, FEW)
    call = bed.decode(slots)
    bed.adapter.decode(call)
    layout = DecodeLayout.of(
        call.q.unsqueeze(1), call.v.unsqueeze(1), call.q.shape[-1] ** -0.5, call.states, split=False, packed=False
    )
    assert fake.compiled is not None
    with Operators() as ran:
        found = fake.compiled.trusted(layout)
    assert found is not None
    assert set(ran.names) <= {"aten::as_strided"}
    if state == BF16:
        never_prepared = fake.kernels().compiled
        assert never_prepared is not None
        with Operators() as ran:
            assert never_prepared.find(layout) is None
        assert not ran.names


@pytest.mark.parametrize(
    ("state", "hidden"),
    [(F32, "_get_compiled_decode_kernel"), (F32, "cuda"), (BF16, "_compiled_kernels_mtp"), (BF16, "_USE_PACKED_FMA")],
    ids=str,
)
def test_a_release_that_keeps_kernels_elsewhere_is_served_by_its_function(state: torch.dtype, hidden: str) -> None:
    bed, fake = bed_over(state, hidden=hidden)
    call = known(bed, [3, 2])
    out, _ = want(bed, call)
    assert torch.equal(bed.adapter.decode(call), out), f"seed {bed.seed}"
    assert called(bed) == 1
    assert not fake.launched


def test_layouts_have_kernels_of_their_own() -> None:
    bed, fake = bed_over(F32)
    known(bed, [3, 2])
    other = laid_out(bed.decode([3, 2], scale=0.5))
    out, _ = want(bed, other)
    bed.fake.calls.clear()
    assert torch.equal(bed.adapter.decode(other), out), f"seed {bed.seed}"
    assert called(bed) == 1, "another scale was compiled anew"
    fake.launched.clear()
    again = laid_out(bed.decode([1, 4], scale=0.5))
    out, _ = want(bed, again)
    assert torch.equal(bed.adapter.decode(again), out), f"seed {bed.seed}"
    assert len(fake.launched) == 1
