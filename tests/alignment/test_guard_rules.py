"""One rule for each role of an argument, and what a misaligned call costs: nothing where the contract refuses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_guard import DemandingAdapter, displaced, served
from torch import Tensor

from fakes import FakeGatedDeltaRule
from pretended_capture import capture
from qwen35.domain.alignment import padded
from qwen35.domain.errors import ShapeError, UnsupportedError, ValueRangeError
from qwen35.ports.gated_delta_rule import CommitCall, DecodeCall, ExtendCall, GdnCall, RawGates, VerifyCall
from qwen35.services.alignment_guard import SPARE, AlignmentGuard
from qwen35.services.counters import Counters
from qwen35.services.scratch import MAX_STREAMS, empty_aligned

#: Rows of every float32 tensor are multiples of 32 bytes, so that nothing is off but what is put off.
H, HV, K, V, N = 2, 8, 16, 8, 5


def guarded(adapter: object | None = None) -> tuple[AlignmentGuard, Counters]:
    counters = Counters()
    return AlignmentGuard("demanding", adapter or DemandingAdapter(), counters), counters  # type: ignore[arg-type]


def tokens(*rows: int) -> dict[str, Any]:
    """Inputs and an output of ``rows``."""
    r = torch.randn
    return {
        "q": r(*rows, H, K), "k": r(*rows, H, K), "v": r(*rows, HV, V), "states": r(N, HV, V, K),
        "gates": RawGates(a=r(*rows, HV), b=r(*rows, HV), A_log=r(HV), dt_bias=r(HV)),
        "out": torch.full((*rows, HV, V), float("nan")),
    }  # fmt: skip


def decode_call() -> DecodeCall:
    return DecodeCall(**tokens(3), slots=torch.tensor([3, 1, 0]), write_slots=torch.tensor([2, -1, 4]))


def extend_call() -> ExtendCall:
    return ExtendCall(**tokens(7), slots=torch.tensor([3, 1]), cu_seqlens=torch.tensor([0, 3, 7]))


def verify_call() -> VerifyCall:
    return VerifyCall(**tokens(2, 3), slots=torch.tensor([3, 1]), intermediates=torch.randn(2, 3, HV, V, K))


def commit_call() -> CommitCall:
    return CommitCall(
        states=torch.randn(N, HV, V, K), intermediates=torch.randn(2, 3, HV, V, K), slots=torch.tensor([3, 1]),
        last=torch.tensor([2, 0]), rows=torch.tensor([1, 0]),
    )  # fmt: skip


def serve(guard: AlignmentGuard, call: GdnCall) -> None:
    if isinstance(call, CommitCall):
        guard.commit(call)
    else:
        served(guard, call)


@pytest.mark.row("D02")
@pytest.mark.row("D05")
@pytest.mark.parametrize("name", ["q", "v", "a", "slots", "write_slots", "out"])
def test_an_input_and_an_output_go_through_scratch_and_through_nothing_else(name: str) -> None:
    guard, counters = guarded()
    guard.decode(displaced(decode_call(), {name}))
    assert counters.total("scratch_copies") == counters.total("scratch_copies", argument=name) == 1
    assert guard.scratch_bytes > 0
    assert guard.parameter_bytes == 0


def test_what_lay_in_an_output_is_not_copied() -> None:
    class Looks(DemandingAdapter):
        out = torch.empty(0)

        def decode(self, call):  # type: ignore[no-untyped-def]
            self.out = call.out.clone()
            return super().decode(call)

    adapter = Looks()
    guard, _ = guarded(adapter)
    first, second = (displaced(decode_call(), {"out"}) for _ in range(2))
    guard.decode(first)
    guard.decode(second)
    assert torch.equal(adapter.out, first.out), "scratch still holds the call before"


@pytest.mark.row("D07")
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_a_parameter_has_a_copy_of_its_own_and_no_scratch(name: str) -> None:
    guard, counters = guarded()
    guard.decode(displaced(decode_call(), {name}))
    assert counters.total("scratch_copies") == guard.scratch_bytes == 0
    assert guard.parameter_bytes == padded(HV * 4, 32)


@pytest.mark.row("D10")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (decode_call, "states"), (extend_call, "states"), (verify_call, "states"), (verify_call, "intermediates"),
        (commit_call, "states"), (commit_call, "intermediates"),
    ],
)  # fmt: skip
def test_a_mutable_tensor_is_refused_before_anything_is_copied(make: Callable[[], GdnCall], name: str) -> None:
    guard, counters = guarded()
    call = displaced(make(), {name, "q", "last"})
    reason = f"{name} requires 32-byte alignment, got 4 bytes off"
    assert guard.supports(call).reasons == (f"{name} is 4 bytes off", reason), "the adapter's reason and the guard's"
    with pytest.raises(UnsupportedError) as refused:
        serve(guard, call)
    assert refused.value.reasons == (reason,)
    assert guard.scratch_bytes == guard.parameter_bytes == counters.total("scratch_copies") == 0


@pytest.mark.row("D02")
@pytest.mark.parametrize("name", ["slots", "rows", "last"])
def test_a_misaligned_commit_gives_the_aligned_result(name: str) -> None:
    guard, call = guarded()[0], commit_call()
    aligned, moved = displaced(call, set()), displaced(call, {name})
    guard.commit(aligned)
    guard.commit(moved)
    assert torch.equal(aligned.states, moved.states)
    assert not torch.equal(aligned.states, call.states)


BAD: list[tuple[Callable[[], GdnCall], str, Callable[[Tensor], Tensor], type[Exception]]] = [
    (decode_call, "q", lambda _: torch.zeros(1000, 4, 1000), ShapeError),
    (extend_call, "q", lambda _: torch.zeros(1000, 4, 1000), ShapeError),
    (verify_call, "q", lambda _: torch.zeros(1000, 4, 1000), ShapeError),
    (decode_call, "slots", lambda slots: slots + N, ValueRangeError),
    (extend_call, "cu_seqlens", lambda lengths: lengths + 1, ValueRangeError),
    (commit_call, "last", lambda last: last + 3, ValueRangeError),
]


@pytest.mark.parametrize(("make", "name", "spoil", "error"), BAD)
def test_a_misaligned_call_off_the_contract_leaves_nothing_held(
    make: Callable[[], GdnCall], name: str, spoil: Callable[[Tensor], Tensor], error: type[Exception]
) -> None:
    guard, counters = guarded()
    call = make()
    call = dataclasses.replace(call, **{name: spoil(getattr(call, name))})
    with pytest.raises(error):
        serve(guard, displaced(call, {"q", "k", "v", "a", "A_log", "slots", "last"}))
    assert guard.scratch_bytes == guard.parameter_bytes == counters.total("scratch_copies") == 0
    assert guard.scratch_bound == 0, "what was refused does not raise the bound"


def test_an_aligned_call_is_the_adapters_to_check() -> None:
    """The guard's own check is for what it would copy; the usual call does not pay for it."""
    adapter = FakeGatedDeltaRule(1.0)
    adapter.capabilities = dataclasses.replace(adapter.capabilities, byte_alignment=32)
    guard, _ = guarded(adapter)
    call = displaced(decode_call(), set())
    off_the_contract = dataclasses.replace(call, slots=call.slots[:1])
    guard.decode(off_the_contract)
    assert adapter.calls == [off_the_contract]


@pytest.mark.row("D03")
def test_an_extend_makes_nothing_ready_that_only_a_capture_would_take() -> None:
    guard, _ = guarded()
    guard.extend(displaced(extend_call(), {"q"}))
    extend = 7 * H * K * 4
    assert guard.scratch_bytes == extend, "one buffer: prefills are large"
    assert guard.scratch_bound == MAX_STREAMS * extend
    guard.decode(displaced(decode_call(), {"q"}))
    assert guard.scratch_bytes == extend + (1 + SPARE) * 3 * H * K * 4


def test_copies_are_counted_apart_inside_capture() -> None:
    guard, counters = guarded()
    call = displaced(decode_call(), {"q", "out"})
    guard.decode(call)
    with capture():
        for _ in range(2):
            guard.decode(call)
    for argument in ("q", "out"):
        counted = [counters.total("scratch_copies", argument=argument, mode=mode) for mode in ("eager", "captured")]
        assert counted == [1, 2]


@pytest.mark.row("D02")
@pytest.mark.parametrize("make", [decode_call, extend_call, verify_call])
def test_rows_without_gaps_are_not_copied_however_short_and_rows_with_gaps_are(make: Callable[[], Any]) -> None:
    """a and b of 8 heads in bfloat16 have rows of 16 bytes where 32 are asked for, and so would their copies."""

    def cast(call: Any, gap: int) -> Any:
        def rows(gate: Tensor) -> Tensor:
            room = empty_aligned((*gate.shape[:-1], HV + gap), torch.bfloat16, torch.device("cpu"), 32)
            return room[..., :HV].copy_(gate)

        return dataclasses.replace(call, gates=dataclasses.replace(call.gates, a=rows(call.gates.a), b=call.gates.b))

    guard, counters = guarded()
    for _ in range(2):
        serve(guard, cast(make(), 0))
    assert counters.total("scratch_copies") == 0
    serve(guard, cast(make(), 4))
    assert counters.total("scratch_copies", argument="a") == 1
    assert counters.total("scratch_copies") == 1
