"""A decode whose layout was seen before goes the short way, and whatever differs from it is still told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import qwen35
from elsewhere import elsewhere
from fakes import fake_entry
from flashinfer_bed import BF16, F32, HV, Bed, H, W
from qwen35.adapters.flashinfer.parameters import Float32
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import (
    ClosedError,
    ContractError,
    DeviceError,
    DtypeError,
    Qwen35Error,
    ShapeError,
)
from qwen35.ports.admission import DecodesKnown
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, LogGates, RawGates
from qwen35.services.parameter_copies import ParameterCopies
from qwen35.services.scratch import empty_aligned

CPU = torch.device("cpu")


def aligned(tensor: Tensor) -> Tensor:
    return empty_aligned(tensor.shape, tensor.dtype, CPU, 32).copy_(tensor)


def laid_out(call: DecodeCall, **rows: int) -> DecodeCall:
    """``call`` as engines lay it out, elsewhere: every address aligned, and a and b with rows of 32 bytes."""
    gates, batch = call.gates, call.q.shape[0]

    def wide(gate: Tensor) -> Tensor:
        return empty_aligned((batch, 16), gate.dtype, CPU, 32)[:, :HV].copy_(gate)

    parts = {name: aligned(getattr(call, name)) for name in ("q", "k", "v", "states", "slots")}
    parts |= {n: aligned(t) for n in ("out", "write_slots") if (t := getattr(call, n)) is not None}
    parameters = {name: aligned(getattr(gates, name)) for name in ("A_log", "dt_bias")}
    return elsewhere(replace(call, **parts, gates=RawGates(a=wide(gates.a), b=wide(gates.b), **parameters)))


def known(bed: Bed, slots: list[int], **changes: Any) -> DecodeCall:
    """A call whose layout ``bed``'s adapter has served before."""
    bed.adapter.decode(laid_out(bed.decode(slots, **changes)))
    call = laid_out(bed.decode(slots, **changes))
    bed.fake.calls.clear()
    return call


def want(bed: Bed, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Output and pool after ``call`` by a cold adapter, whose checks see everything."""
    cold = Bed(bed.state, null=bed.plan.null_slot, pad=bed.plan.may_pad)
    states = torch.clone(call.states).as_subclass(Tensor)
    parts = {n: t.as_subclass(Tensor) for n in ("slots", "write_slots") if (t := getattr(call, n)) is not None}
    return cold.adapter.decode(replace(call, states=states, out=None, **parts)), states


def same(bed: Bed, call: DecodeCall, serve: Callable[[DecodeCall], Tensor | None]) -> None:
    out, states = want(bed, call)
    got = serve(call)
    assert got is not None, "the layout was seen before"
    assert torch.equal(got, out), f"seed {bed.seed}"
    assert torch.equal(call.states, states), f"seed {bed.seed}"


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("state", "null"), [(F32, None), (BF16, 0)])
@pytest.mark.parametrize("given", [False, True])
def test_the_short_way_does_the_same(state: torch.dtype, null: int | None, batch: int, given: bool) -> None:
    bed = Bed(state, null=null)
    slots = [4, -1, 2][:batch]
    changes = {"out": torch.empty(batch, HV, W, dtype=BF16)} if given else {}
    call = known(bed, slots, **changes)
    out, states = want(bed, call)
    got = bed.adapter.decode_known(call)
    assert got is not None, "the layout was seen before"
    assert (got is call.out) == given
    assert torch.equal(got, out), f"seed {bed.seed}"
    live = [s for s in range(6) if s != null]
    assert torch.equal(call.states[live], states[live]), f"seed {bed.seed}"
    assert got.is_contiguous()


def test_write_slots_take_the_short_way_too() -> None:
    bed = Bed(BF16, null=0)
    call = known(bed, [3, 2], write_slots=torch.tensor([5, -1], dtype=torch.int32))
    out, states = want(bed, call)
    got = bed.adapter.decode_known(call)
    assert got is not None
    assert torch.equal(got, out), f"seed {bed.seed}"
    assert torch.equal(call.states[1:], states[1:]), f"seed {bed.seed}"


def test_views_of_a_packed_projection_take_the_short_way() -> None:
    bed, batch = Bed(), 2

    def packed() -> DecodeCall:
        rows = empty_aligned((batch, (2 * H + HV) * W), BF16, CPU, 32).copy_(bed.randn(batch, (2 * H + HV) * W))
        q, k, v = rows.split([H * W, H * W, HV * W], dim=1)
        views = {"q": q.view(batch, H, W), "k": k.view(batch, H, W), "v": v.view(batch, HV, W)}
        return replace(laid_out(bed.decode([1, 3])), **views)

    bed.adapter.decode(packed())
    call = packed()
    out, states = want(bed, call)
    got = bed.adapter.decode_known(call)
    assert got is not None
    assert got.is_contiguous()
    assert torch.equal(got, out)
    assert torch.equal(call.states, states)


def shifted(tensor: Tensor) -> Tensor:
    """Equal, one element past a multiple of 32 bytes."""
    room = empty_aligned((tensor.numel() + 1,), tensor.dtype, CPU, 32)
    return room[1:].view(tensor.shape).copy_(tensor)


def spread(tensor: Tensor) -> Tensor:
    """Equal, with gaps in the last dimension."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


#: Changes of a layout seen before that no adapter may take, by argument.
BAD: list[tuple[str, Callable[[Tensor], Any], type[Qwen35Error]]] = [
    ("q", lambda t: t.to("meta"), DeviceError), ("q", lambda t: t.half(), DtypeError),
    ("k", lambda t: t[..., :-16], ShapeError), ("k", spread, ContractError), ("v", lambda t: t.float(), DtypeError),
    ("v", lambda t: t[:1], ShapeError), ("v", lambda t: t.to("meta"), DeviceError),
    ("states", lambda t: t.half(), DtypeError), ("states", lambda t: t.transpose(2, 3), ContractError),
    ("states", lambda t: t[:, :1], ShapeError), ("slots", lambda t: t.float(), DtypeError),
    ("slots", lambda t: t[:1], ShapeError), ("slots", lambda t: t.to("meta"), DeviceError),
    ("slots", lambda t: t.tolist(), Qwen35Error), ("q", lambda _: None, Qwen35Error),
    ("a", lambda t: t[:, :1], ShapeError), ("a", lambda t: t.to("meta"), DeviceError),
    ("b", lambda t: t[:1], ShapeError), ("b", lambda t: t.to("meta"), DeviceError),
    ("A_log", lambda t: t[:1], ShapeError), ("A_log", lambda t: t.to("meta"), DeviceError),
    ("dt_bias", lambda t: t.to(torch.int32), DtypeError), ("dt_bias", lambda t: t.to("meta"), DeviceError),
    ("out", lambda _: torch.empty(2, HV, W), DtypeError),
    ("out", lambda _: torch.empty(2, HV, W, dtype=BF16, device="meta"), DeviceError),
    ("out", lambda _: torch.empty(2, HV, W + 1, dtype=BF16), ShapeError),
    ("write_slots", lambda _: torch.zeros(3, dtype=torch.int32), ShapeError),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error"), BAD)
def test_what_a_check_refuses_is_refused_after_the_layout_was_seen(
    name: str, change: Callable[[Tensor], Any], error: type[Qwen35Error]
) -> None:
    bed = Bed()
    call = known(bed, [4, 2])
    if name in ("a", "b", "A_log", "dt_bias"):
        bad = replace(call, gates=replace(call.gates, **{name: change(getattr(call.gates, name))}))
    else:
        bad = replace(call, **{name: change(getattr(call, name))})
    before = torch.clone(call.states)
    assert bed.adapter.decode_known(bad) is None
    with pytest.raises(error, match=name if error is not Qwen35Error else None):
        bed.adapter.decode(bad)
    assert not bed.fake.calls, "nothing was launched"
    assert torch.equal(before, call.states)
    same(bed, call, bed.adapter.decode_known)


@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b", "states", "out"])
def test_an_address_that_is_off_is_refused_after_the_layout_was_seen(name: str) -> None:
    bed = Bed()
    call = known(bed, [4, 2], out=torch.empty(2, HV, W, dtype=BF16))
    at = call.gates if name in ("a", "b") else call
    moved = shifted(getattr(at, name).contiguous())
    if name in ("a", "b"):
        room = empty_aligned((2, 16), BF16, CPU, 32)
        moved = room[:, 1 : 1 + HV].copy_(getattr(at, name))
        assert moved.stride() == getattr(at, name).stride()
    bad = replace(at, **{name: moved})
    bad = elsewhere(bad if at is call else replace(call, gates=bad))
    assert bed.adapter.decode_known(bad) is None
    with pytest.raises(Qwen35Error, match=f"{name} requires 32-byte alignment"):
        bed.adapter.decode(bad)
    assert not bed.fake.calls
    same(bed, call, bed.adapter.decode_known)


def test_log_gates_are_refused_after_raw_ones_were_seen() -> None:
    bed = Bed()
    call = known(bed, [4, 2])
    bad = replace(call, gates=LogGates(g=torch.zeros(2, HV), beta=torch.zeros(2, HV)))
    assert bed.adapter.decode_known(bad) is None
    with pytest.raises(Qwen35Error, match="decode gates require raw, got log"):
        bed.adapter.decode(bad)
    assert not bed.fake.calls


@pytest.mark.parametrize("scale", [True, torch.ones(1), [1.0]], ids=["bool", "tensor", "list"])
@pytest.mark.parametrize("latest", [True, False])
def test_a_scale_of_another_type_is_refused_after_its_layout_was_seen(scale: Any, latest: bool) -> None:
    """Of the layout of the latest call, and of one before it."""
    bed = Bed(F32)
    call = laid_out(bed.decode([4]))
    bed.adapter.decode(replace(call, scale=1.0))
    if not latest:
        bed.adapter.decode(laid_out(bed.decode([4, 2])))
    with pytest.raises(ContractError, match="scale"):
        bed.adapter.decode(replace(call, scale=scale))


@pytest.mark.parametrize("scale", [0.5, 0.0])
def test_another_scale_is_another_layout(scale: float) -> None:
    bed = Bed()
    call = replace(known(bed, [4]), scale=scale)
    assert bed.adapter.decode_known(call) is None
    same(bed, call, bed.adapter.decode)
    assert bed.fake.latest("decode")["scale"] == scale


def test_an_extend_of_the_same_layout_is_no_decode() -> None:
    bed = Bed(F32)
    call = known(bed, [4, 2])
    shared = {name: getattr(call, name) for name in ("q", "k", "v", "gates", "states", "slots")}
    extend = ExtendCall(**shared, cu_seqlens=torch.tensor([0, 1, 2]))
    for serve in (bed.adapter.decode, Bed(F32).adapter.decode):
        with pytest.raises(ContractError, match="DecodeCall, got ExtendCall"):
            serve(extend)
    with pytest.raises(ContractError, match="VerifyCall, got DecodeCall"):
        bed.adapter.verify(call)  # type: ignore[arg-type]
    assert bed.adapter.decode_known(extend) is None
    assert not bed.fake.calls


def test_layouts_take_turns() -> None:
    bed = Bed()
    for slots in ([4], [4, 2], [4], [1, 2, 3], [4, 2]):
        same(bed, laid_out(bed.decode(slots)), bed.adapter.decode)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_after_one_call_in_another_autograd_mode_the_short_way_is_open_there(mode: Callable[[], Any]) -> None:
    bed = Bed()
    call = known(bed, [4, 2])
    with mode():
        same(bed, laid_out(bed.decode([3, 1])), bed.adapter.decode)
        same(bed, laid_out(bed.decode([3, 1])), bed.adapter.decode_known)
        same(bed, call, bed.adapter.decode)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_every_layer_has_its_own_parameters(dtype: torch.dtype, off: bool, asks: bool) -> None:
    bed = Bed()
    layers = []
    for _ in range(3):
        dt_bias = bed.randn(HV, dtype=dtype)
        dt_bias = (shifted if off else aligned)(dt_bias).requires_grad_(asks)
        layers.append(dt_bias)
    for _ in range(2):
        for dt_bias in layers:
            call = laid_out(bed.decode([4, 2]))
            call = replace(call, gates=replace(call.gates, dt_bias=dt_bias))
            same(bed, call, bed.adapter.decode)
            taken = bed.fake.latest("decode")["dt_bias"]
            assert (taken.dtype, taken.data_ptr() % 32, taken.requires_grad) == (F32, 0, False)
    assert bed.adapter.decode_known(call) is not None


def test_a_parameter_updated_in_place_is_seen_after_a_refresh() -> None:
    bed = Bed()
    call = known(bed, [4, 2])
    assert call.gates.dt_bias.dtype == BF16, "so that a copy is made"
    bed.adapter.decode(call)
    call.gates.dt_bias.data.copy_(bed.randn(HV, dtype=BF16))
    assert bed.adapter.refresh_parameters() == 1, "that of the first call is gone"
    same(bed, call, bed.adapter.decode_known)


class FirstSeenInCapture(ParameterCopies):
    """Copies that are asked for inside capture until ``inside`` is false."""

    inside = True

    def take(self, source: Tensor, capturing: bool, dtype: torch.dtype | None = None) -> Tensor:
        return super().take(source, capturing or self.inside, dtype)


@pytest.mark.row("D09")
def test_a_copy_that_only_a_graph_fills_is_not_remembered() -> None:
    """A capture records the filling and does not run it; here the copy is spoilt to stand for that."""
    copies, parameter = FirstSeenInCapture(32), torch.randn(HV, dtype=BF16)
    copies.reserve(HV * 4, CPU)
    taken = Float32(copies, parameter)
    taken(parameter).fill_(float("nan"))
    copies.inside = False
    assert torch.equal(taken(parameter), parameter.float())
    assert torch.equal(taken(parameter), parameter.float())


@pytest.mark.row("D07")
def test_a_parameter_that_lies_where_a_freed_one_lay_is_not_served_its_copy() -> None:
    """Two arrays of one memory stand for an allocator that gives an address again."""
    copies, memory = ParameterCopies(32), torch.randn(HV + 1).numpy()
    parameter = torch.from_numpy(memory)[1:]
    taken = Float32(copies, parameter)
    taken(parameter)
    del parameter
    memory += 1.0
    another = torch.from_numpy(memory)[1:]
    assert torch.equal(taken(another), another)
    assert taken(another) is taken(another)
    assert len(copies) == 1


def test_another_plan_and_a_closed_adapter_know_nothing() -> None:
    bed = Bed()
    call = known(bed, [4, 2])
    bed.adapter.prepare(replace(bed.plan, max_batch=5))
    assert bed.adapter.decode_known(call) is None
    bed.adapter.decode(call)
    assert bed.adapter.decode_known(call) is not None
    bed.adapter.close()
    assert bed.adapter.decode_known(call) is None
    with pytest.raises(ClosedError):
        bed.adapter.decode(call)


def test_rows_that_are_off_are_left_to_the_guard() -> None:
    """a with rows of 3 elements: the adapter alone serves it, the guard aligns it first."""
    bed = Bed()
    call = laid_out(bed.decode([4, 2]))
    gapped = empty_aligned((2, HV + 1), call.gates.a.dtype, CPU, 32)[:, :HV].copy_(call.gates.a)
    call = replace(call, gates=replace(call.gates, a=gapped))
    bed.adapter.decode(call)
    assert bed.adapter.decode_known(call) is None
    same(bed, call, bed.adapter.decode)


@pytest.mark.row("D02")
def test_short_rows_without_gaps_are_known() -> None:
    """a and b of 2 heads in bfloat16 have rows of 4 bytes, and so would their copies."""
    bed = Bed()

    def dense() -> DecodeCall:
        call = laid_out(bed.decode([4, 2]))
        return replace(call, gates=replace(call.gates, a=aligned(call.gates.a), b=aligned(call.gates.b)))

    bed.adapter.decode(dense())
    same(bed, dense(), bed.adapter.decode_known)


def test_the_branch_is_that_of_the_latest_call() -> None:
    bed = Bed()
    call = known(bed, [4, 2])
    bed.adapter.decode(replace(call, slots=shifted(call.slots)))
    assert bed.adapter.branches[Phase.DECODE] == "pool by index, indices converted"
    bed.adapter.decode(call)
    assert bed.adapter.branches[Phase.DECODE] == "pool by index"


def test_behind_the_guard_a_known_layout_is_still_realigned_and_a_pool_that_is_off_refused() -> None:
    bed = Bed()
    assert isinstance(bed.adapter, DecodesKnown)
    names = dict.fromkeys(("gdn_decode", "gdn_extend", "gdn_verify"), "flashinfer-fake")
    container = qwen35.build(device="cpu", adapters=[fake_entry("flashinfer-fake", bed.adapter)], **names)  # type: ignore[arg-type]
    rule = container.gated_delta_rule()
    for _ in range(2):
        same(bed, laid_out(bed.decode([4, 2])), rule.decode)
    for name in ("q", "v"):
        call = laid_out(bed.decode([4, 2]))
        out, states = want(bed, call)
        got = rule.decode(replace(call, **{name: shifted(getattr(call, name))}))
        assert torch.equal(got, out), f"seed {bed.seed}"
        assert torch.equal(call.states, states), f"seed {bed.seed}"
    call = laid_out(bed.decode([4, 2]))
    bed.fake.calls.clear()
    with pytest.raises(Qwen35Error, match="states requires 32-byte alignment"):
        rule.decode(elsewhere(replace(call, states=shifted(call.states))))
    assert not bed.fake.calls
    assert container.counters().total("calls", mode="eager", adapter="flashinfer-fake") == 4
    assert container.counters().total("refusals") == 1
