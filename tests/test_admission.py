"""An admission looks closely once for each layout, and tells every other layout from those that it knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elsewhere import Elsewhere, elsewhere
from qwen35.domain.capabilities import Support
from qwen35.domain.errors import ContractError, DeviceError, DtypeError, ShapeError, UnsupportedError
from qwen35.ports.admission import Admission
from qwen35.ports.gated_delta_rule import (
    CheckpointPlan,
    CommitCall,
    DecodeCall,
    ExtendCall,
    LogGates,
    RawGates,
    VerifyCall,
)
from qwen35.ports.short_convolution import ConvDecodeCall

H, HV, K, V, N = 1, 2, 8, 4, 6


def gates(*lead: int) -> RawGates:
    return RawGates(a=torch.randn(*lead, HV), b=torch.randn(*lead, HV), A_log=torch.randn(HV), dt_bias=torch.randn(HV))


def tokens(*lead: int) -> dict[str, Any]:
    return {
        "q": torch.randn(*lead, H, K), "k": torch.randn(*lead, H, K), "v": torch.randn(*lead, HV, V),
        "gates": gates(*lead), "states": torch.randn(N, HV, V, K), "slots": torch.arange(lead[0], dtype=torch.int32),
    }  # fmt: skip


def decode(batch: int = 2) -> Any:
    return elsewhere(DecodeCall(**tokens(batch)))


def extend(count: int = 5) -> Any:
    """Two sequences of ``count`` tokens together, the first of two."""
    facts = tokens(count) | {"slots": torch.tensor([1, 4]), "cu_seqlens": torch.tensor([0, 2, count])}
    return elsewhere(ExtendCall(**facts, seq_lens_host=(2, count - 2)))


def checkpoints(every: int, *starts: int) -> CheckpointPlan:
    return elsewhere(CheckpointPlan(every=every, starts=torch.tensor(starts), count=starts[-1]))


def verify() -> Any:
    return elsewhere(VerifyCall(**tokens(2, 3), intermediates=torch.randn(2, 3, HV, V, K)))


def commit() -> Any:
    made = verify()
    return CommitCall(states=made.states, slots=made.slots, intermediates=made.intermediates, last=made.slots.clone())


def conv_decode() -> Any:
    windows = torch.randn(N, 5, 3).as_subclass(Elsewhere)
    slots = torch.arange(2, dtype=torch.int32)
    return ConvDecodeCall(x=torch.randn(2, 5), weight=torch.randn(5, 4), windows=windows, slots=slots)


class Desk:
    """An admission and how often it had to look closely."""

    def __init__(self) -> None:
        self.looks, self.settled, self.answer = 0, 0, Support.of()
        self._admission = Admission("the desk", self._supports, settle=self._settle)

    def admit(self, call: Any) -> Any:
        return self._admission(call, type(call))

    def _supports(self, _: Any) -> Support:
        self.looks += 1
        return self.answer

    def _settle(self, _: Any) -> int:
        self.settled += 1
        return self.settled


@pytest.mark.parametrize("make", [decode, extend, verify, commit, conv_decode])
def test_a_layout_is_looked_at_once(make: Callable[[], Any]) -> None:
    desk = Desk()
    assert [desk.admit(make()) for _ in range(3)] == [1, 1, 1]
    assert desk.looks == 1


def test_layouts_take_turns_and_keep_what_was_settled() -> None:
    desk = Desk()
    calls = [decode(2), decode(3), verify(), commit(), replace(decode(2), scale=0.5)]
    calls.append(replace(decode(2), gates=LogGates(g=torch.zeros(2, HV), beta=torch.zeros(2, HV))))
    calls.append(replace(decode(2), out=torch.empty(2, HV, V)))
    calls.append(elsewhere(replace(decode(2), write_slots=torch.arange(2, 4))))
    first = [desk.admit(call) for call in calls]
    assert first == list(range(1, 9))
    assert [desk.admit(call) for call in calls] == first
    assert [desk.admit(call) for call in reversed(calls)] == first[::-1]
    assert desk.looks == len(calls)


def test_an_extend_is_known_until_another_comes() -> None:
    """Prompts seldom have the same lengths twice: they would drive out what decodes come again and again with."""
    desk = Desk()
    admitted = [desk.admit(call) for call in (extend(5), decode(), extend(5), extend(6), extend(5), decode())]
    assert admitted == [1, 2, 1, 3, 4, 2]


def other_gates(call: Any) -> Any:
    count = call.q.shape[0]
    return replace(call, gates=LogGates(g=torch.zeros(count, HV), beta=torch.ones(count, HV)))


OTHERS: dict[str, Any] = {
    "gates of the other kind": other_gates,
    "gates in half precision": lambda call: replace(call, gates=replace(call.gates, a=call.gates.a.half())),
    "parameters in half precision": lambda call: replace(
        call, gates=replace(call.gates, dt_bias=call.gates.dt_bias.half())
    ),
    "offsets of 32 bits": lambda call: replace(call, cu_seqlens=call.cu_seqlens.int()),
    "lengths": lambda call: replace(call, seq_lens_host=(3, 2), cu_seqlens=torch.tensor([0, 3, 5])),
    "no lengths": lambda call: replace(call, seq_lens_host=None),
    "scale": lambda call: replace(call, scale=0.5),
    "scale in integers": lambda call: replace(call, scale=1),
    "fresh": lambda call: elsewhere(replace(call, fresh=torch.ones(2, dtype=torch.bool))),
    "write slots": lambda call: elsewhere(replace(call, write_slots=call.slots + 1)),
    "checkpoints": lambda call: replace(call, checkpoints=checkpoints(1, 0, 2, 5)),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_what_the_host_knows_tells_one_extend_from_another(change: Any) -> None:
    desk, call = Desk(), replace(extend(), scale=1.0)
    other = change(call)
    assert [desk.admit(one) for one in (call, other, other, call)] == [1, 2, 2, 3]


def test_another_number_of_checkpoints_is_another_extend() -> None:
    """By the tokens between them alone, and by their count alone, whose values a device would keep to itself."""
    desk, call = Desk(), replace(extend(), cu_seqlens=torch.tensor([0, 4, 5]), seq_lens_host=(4, 1))
    plans = [checkpoints(2, 0, 2, 2), checkpoints(2, 0, 2, 2), checkpoints(3, 0, 1, 1), checkpoints(4, 0, 1, 1)]
    assert [desk.admit(replace(call, checkpoints=plan)) for plan in plans] == [1, 1, 2, 3]
    with pytest.raises(ContractError, match="with count 1, got"):
        desk.admit(replace(call, checkpoints=replace(plans[-1], count=2)))


def test_lengths_that_are_equal_and_no_ints_are_refused_after_their_layout_was_seen() -> None:
    desk, call, lengths = Desk(), extend(), [2, 3]
    desk.admit(replace(call, seq_lens_host=lengths))
    for bad, message in (((2.0, 3), r"\[0\] must be an int"), (torch.tensor([2, 3]), "tuple or list")):
        with pytest.raises(ContractError, match=message):
            desk.admit(replace(call, seq_lens_host=bad))
    lengths[0] = 1
    with pytest.raises(ContractError, match="must add up to T = 5, got 4"):
        desk.admit(replace(call, seq_lens_host=lengths))
    with pytest.raises(ContractError, match="checkpoints must be a CheckpointPlan"):
        desk.admit(replace(call, checkpoints=(1, 2)))


def test_a_call_whose_values_the_host_sees_is_looked_at_each_time() -> None:
    desk = Desk()
    for _ in range(2):
        desk.admit(DecodeCall(**tokens(2)))
    assert desk.looks == 2


def test_another_kind_of_call_is_refused_also_where_its_own_kind_was_admitted() -> None:
    admit = Admission("the desk", lambda _: Support.of())
    for call in (decode(), commit()):
        admit(call, type(call))
        with pytest.raises(ContractError, match=r"the desk requires a VerifyCall, got (Decode|Commit)Call"):
            admit(call, VerifyCall)
    with pytest.raises(ContractError, match="the desk requires a DecodeCall, got NoneType"):
        admit(None, DecodeCall)


def test_what_is_not_supported_is_not_remembered() -> None:
    desk = Desk()
    desk.answer = Support.of("no")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="DecodeCall for the desk: no"):
            desk.admit(decode())
    assert (desk.looks, desk.settled) == (2, 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_another_autograd_mode_is_the_same_layout(mode: Callable[[], Any]) -> None:
    desk, call = Desk(), decode()
    desk.admit(call)
    with mode():
        desk.admit(call)
        desk.admit(decode())
    assert desk.looks == 1


class Untouchable(torch.Tensor):
    """A value that the host must not ask for: it may lie on a device."""

    def __bool__(self) -> bool:
        raise AssertionError("the host waits for a device")

    __eq__ = __ne__ = __bool__  # type: ignore[assignment]
    __hash__ = torch.Tensor.__hash__


ONE = torch.ones(1).as_subclass(Untouchable)
#: What was admitted, and what looks like it to ``==``.
LIKE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("scale", {"scale": 1.0}, {"scale": True}), ("scale", {"scale": 1.0}, {"scale": ONE}),
    ("gates", {}, {"gates": SimpleNamespace(**{name: torch.randn(5, HV) for name in ("a", "b", "A_log", "dt_bias")})}),
    ("seq_lens_host", {"seq_lens_host": (2, 3)}, {"seq_lens_host": (ONE, 3)}),
    ("seq_lens_host", {"seq_lens_host": (2, 3)}, {"seq_lens_host": ONE}),
    ("checkpoints", {"checkpoints": checkpoints(1, 0, 2, 5)},
     {"checkpoints": SimpleNamespace(every=1, count=5, starts=torch.tensor([0, 2, 5]))}),
    ("checkpoints", {"checkpoints": checkpoints(1, 0, 2, 5)},
     {"checkpoints": SimpleNamespace(starts=torch.tensor([0, 2, 5]))}),
    ("checkpoints.every", {"checkpoints": checkpoints(1, 0, 2, 5)},
     {"checkpoints": replace(checkpoints(1, 0, 2, 5), every=ONE)}),
    ("checkpoints.count", {"checkpoints": checkpoints(1, 0, 2, 5)},
     {"checkpoints": replace(checkpoints(1, 0, 2, 5), count=5.0)}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "good", "bad"), LIKE, ids=range(len(LIKE)))
def test_what_equals_the_admitted_and_is_of_another_type_is_refused(
    name: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    desk, call = Desk(), replace(extend(), **good)
    desk.admit(call)
    with pytest.raises(ContractError, match=name):
        desk.admit(replace(call, **bad))


@pytest.mark.parametrize("scale", [True, ONE, [1.0]], ids=["bool", "tensor", "list"])
@pytest.mark.parametrize("make", [decode, extend, verify])
def test_a_scale_of_another_type_is_refused_in_every_phase(make: Callable[[], Any], scale: Any) -> None:
    desk, call = Desk(), replace(make(), scale=1.0)
    desk.admit(call)
    with pytest.raises(ContractError, match="scale"):
        desk.admit(replace(call, scale=scale))


BAD: list[tuple[str, Any, type[ContractError]]] = [
    ("q", lambda t: t.to("meta"), DeviceError), ("q", lambda t: t.double(), DtypeError),
    ("k", lambda t: t[..., :4], ShapeError), ("v", lambda t: t.half(), DtypeError),
    ("v", lambda t: torch.stack([t, t], -1)[..., 0], ContractError), ("v", lambda t: t.tolist(), ContractError),
    ("states", lambda t: t.transpose(2, 3), ContractError), ("states", lambda t: t.half(), DtypeError),
    ("slots", lambda t: t.float(), DtypeError), ("slots", lambda t: t.to("meta"), DeviceError),
    ("out", lambda _: torch.empty(2, HV, V + 1), ShapeError), ("scale", lambda _: float("nan"), ContractError),
    ("write_slots", lambda _: torch.zeros(3, dtype=torch.int32), ShapeError),
]  # fmt: skip


@pytest.mark.parametrize("make", [decode, extend])
@pytest.mark.parametrize(("name", "change", "error"), BAD)
def test_what_a_check_refuses_is_refused_after_the_layout_was_seen(
    name: str, change: Any, error: type[ContractError], make: Callable[[], Any]
) -> None:
    desk, call = Desk(), make()
    desk.admit(call)
    with pytest.raises(error, match=name):
        desk.admit(replace(call, **{name: change(getattr(call, name))}))
    assert desk.admit(call) == 1


@pytest.mark.parametrize("make", [decode, extend])
@pytest.mark.parametrize("name", ["a", "b", "A_log", "dt_bias"])
def test_gates_are_looked_at_as_closely(name: str, make: Callable[[], Any]) -> None:
    desk, call = Desk(), make()
    desk.admit(call)
    for change, error in ((lambda t: t[..., :1], ShapeError), (lambda t: t.to("meta"), DeviceError)):
        bad = replace(call.gates, **{name: change(getattr(call.gates, name))})
        with pytest.raises(error, match=name):
            desk.admit(replace(call, gates=bad))
    with pytest.raises(ContractError):
        desk.admit(replace(call, gates=None))


def test_another_activation_is_another_layout() -> None:
    desk = Desk()
    assert desk.admit(conv_decode()) == 1
    assert desk.admit(replace(conv_decode(), activation=None)) == 2
    assert desk.admit(conv_decode()) == 1
