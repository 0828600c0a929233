"""The alignment guard: a kernel that needs 32 bytes gets them, or the call goes elsewhere with a reason."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import qwen35
from fakes import fake_entry
from qwen35.container import Container
from qwen35.domain.capabilities import Phase, Support
from qwen35.domain.errors import DeviceError, UnsupportedError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    GdnCall,
    GdnPlan,
    RawGates,
    ReplayPlan,
    VerifyCall,
)
from qwen35.services.scratch import empty_aligned

H, HV, K, V, N = 2, 4, 8, 16, 5


class DemandingAdapter:
    """The float32 reference behind a kernel's demand: it fails on any tensor that is not 32-byte aligned."""

    def __init__(self) -> None:
        self._inner = qwen35.adapter("gated_delta_rule", "reference", device="cpu")
        self.capabilities = dataclasses.replace(self._inner.capabilities, byte_alignment=32)
        self.addresses: list[dict[str, int]] = []
        self.calls: list[GdnCall] = []
        self.prepare = self._inner.prepare
        self.refresh_parameters, self.close = self._inner.refresh_parameters, self._inner.close

    def _demand(self, call: GdnCall) -> None:
        named = dict(tensors(call))
        for name, tensor in named.items():
            assert tensor.data_ptr() % 32 == 0, f"{name} is {tensor.data_ptr() % 32} bytes off"
        self.addresses.append({name: tensor.data_ptr() for name, tensor in named.items()})
        self.calls.append(call)

    def supports(self, call: GdnCall) -> Support:
        off = [f"{name} is {t.data_ptr() % 32} bytes off" for name, t in tensors(call) if t.data_ptr() % 32]
        return Support.of(*self._inner.supports(call).reasons, *off)

    def decode(self, call: DecodeCall):
        self._demand(call)
        return self._inner.decode(call)

    def extend(self, call: ExtendCall):
        self._demand(call)
        return self._inner.extend(call)

    def verify(self, call: VerifyCall):
        self._demand(call)
        return self._inner.verify(call)

    def commit(self, call: CommitCall):
        self._demand(call)
        return self._inner.commit(call)


def tensors(value: object) -> Iterator[tuple[str, Tensor]]:
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        inner = getattr(value, field.name)
        if isinstance(inner, Tensor):
            yield field.name, inner
        elif dataclasses.is_dataclass(inner):
            yield from tensors(inner)


def off(tensor: Tensor) -> Tensor:
    """An equal tensor whose address is one element past a multiple of 32 bytes."""
    base = empty_aligned((tensor.numel() + 32,), tensor.dtype, tensor.device, 32)
    view = base[1 : tensor.numel() + 1].view(tensor.shape)
    view.copy_(tensor)
    assert view.data_ptr() % 32
    return view


def on(tensor: Tensor) -> Tensor:
    aligned = empty_aligned(tensor.shape, tensor.dtype, tensor.device, 32)
    return aligned.copy_(tensor)


def displaced(call, names: set[str]):
    """``call`` with the tensors called ``names`` misaligned and every other one aligned."""
    changes = {}
    for field in dataclasses.fields(call):
        value = getattr(call, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = off(value) if field.name in names else on(value)
        elif dataclasses.is_dataclass(value):
            changes[field.name] = displaced(value, names)
    return dataclasses.replace(call, **changes)


def decode_call(batch: int = 3) -> DecodeCall:
    r, pool = torch.randn, max(N, 2 * batch)
    order = torch.randperm(pool).int()
    return DecodeCall(
        q=r(batch, H, K), k=r(batch, H, K), v=r(batch, HV, V), states=r(pool, HV, V, K),
        gates=RawGates(a=r(batch, HV), b=r(batch, HV), A_log=r(HV), dt_bias=r(HV)),
        slots=order[:batch].clone(), write_slots=order[batch : 2 * batch].clone(),
        out=torch.full((batch, HV, V), float("nan")),
    )  # fmt: skip


def extend_call() -> ExtendCall:
    r, t = torch.randn, 7
    return ExtendCall(
        q=r(t, H, K), k=r(t, H, K), v=r(t, HV, V), states=r(N, HV, V, K), slots=torch.tensor([3, 1], dtype=torch.int32),
        gates=RawGates(a=r(t, HV), b=r(t, HV), A_log=r(HV), dt_bias=r(HV)), cu_seqlens=torch.tensor([0, 3, 7]),
        fresh=torch.tensor([False, True]), out=torch.full((t, HV, V), float("nan")),
    )  # fmt: skip


def verify_call() -> VerifyCall:
    r, b, t = torch.randn, 2, 3
    return VerifyCall(
        q=r(b, t, H, K), k=r(b, t, H, K), v=r(b, t, HV, V), states=r(N, HV, V, K), slots=torch.tensor([3, 1]),
        gates=RawGates(a=r(b, t, HV), b=r(b, t, HV), A_log=r(HV), dt_bias=r(HV)), rows=torch.tensor([1, 0]),
        intermediates=r(2, t, HV, V, K), parents=torch.tensor([[-1, 0, 0]] * 2),
        out=torch.full((b, t, HV, V), float("nan")),
    )  # fmt: skip


def build(adapter: DemandingAdapter, **settings: str) -> Container:
    names = dict.fromkeys(("gdn_decode", "gdn_extend", "gdn_verify"), "demanding")
    return qwen35.build(device="cpu", adapters=[fake_entry("demanding", adapter)], **(names | settings))  # type: ignore[arg-type]


def served(rule, call):
    """The output of ``call`` through ``rule``, of whatever phase."""
    if isinstance(call, DecodeCall):
        return rule.decode(call)
    return rule.extend(call).out if isinstance(call, ExtendCall) else rule.verify(call)


READ_ONLY = ["q", "k", "v", "a", "b", "A_log", "dt_bias", "slots", "out"]
CALLS = [
    (decode_call, [*READ_ONLY, "write_slots"]),
    (extend_call, [*READ_ONLY, "cu_seqlens", "fresh"]),
    (verify_call, [*READ_ONLY, "rows", "parents"]),
]


@pytest.mark.case("C10")
@pytest.mark.case("C11")
@pytest.mark.case("C12")
@pytest.mark.row("D02")
@pytest.mark.row("D05")
@pytest.mark.row("D06")
@pytest.mark.row("D19")
@pytest.mark.parametrize(("make", "name"), [(make, name) for make, names in CALLS for name in names])
def test_a_misaligned_argument_gives_the_aligned_result(make, name: str) -> None:
    seed = torch.seed()
    call, adapter = make(), DemandingAdapter()
    rule = build(adapter).gated_delta_rule()
    aligned, moved = displaced(call, set()), displaced(call, {name})
    want, got = served(rule, aligned), served(rule, moved)
    assert torch.equal(want, got), f"seed {seed}"
    assert got is moved.out
    assert torch.equal(aligned.states, moved.states)
    assert getattr(adapter.calls[0], "q") is aligned.q, "an aligned call is handed on as it is"  # noqa: B009


@pytest.mark.parametrize(("make", "name"), [(make, name) for make, names in CALLS for name in names])
def test_what_the_guard_aligns_is_supported(make, name: str) -> None:
    adapter, moved = DemandingAdapter(), displaced(make(), {name})
    assert build(adapter).gated_delta_rule().supports(moved)
    assert not adapter.supports(moved), "the kernel itself declines it"
    assert not adapter.calls, "a question launches nothing"


@pytest.mark.parametrize("name", ["q", "b", "dt_bias", "slots", "out"])
def test_a_misaligned_argument_on_another_device_is_refused_and_not_copied(name: str) -> None:
    call = displaced(decode_call(), set())
    at = call.gates if name in ("b", "dt_bias") else call
    shape = getattr(at, name).shape
    base = torch.empty((shape[0] + 1) * 999, dtype=getattr(at, name).dtype, device="meta")
    strides = (997, shape[2], 1) if len(shape) == 3 else (997, 1)[-len(shape) :]
    elsewhere = base[1:].as_strided(shape, strides, storage_offset=1)
    bad = dataclasses.replace(at, **{name: elsewhere})
    bad = bad if at is call else dataclasses.replace(call, gates=bad)
    before = call.states.clone()
    with pytest.raises(DeviceError, match=name):
        build(DemandingAdapter()).gated_delta_rule().decode(bad)
    assert torch.equal(before, call.states)


@pytest.mark.case("C13")
@pytest.mark.row("D03")
def test_arguments_of_equal_shape_never_share_scratch() -> None:
    adapter, call = DemandingAdapter(), decode_call()
    rule = build(adapter).gated_delta_rule()
    want = served(rule, displaced(call, set()))
    got = served(rule, displaced(call, {"q", "k", "a", "b", "A_log", "dt_bias", "slots", "write_slots", "v"}))
    assert torch.equal(want, got)
    assert len(set(adapter.addresses[-1].values())) == len(adapter.addresses[-1])


def test_scratch_has_one_address_for_an_argument_and_is_refreshed_by_each_call() -> None:
    adapter = DemandingAdapter()
    rule = build(adapter).gated_delta_rule()
    plan = GdnPlan(
        geometry=GdnGeometry(key_heads=H, value_heads=HV, key_width=K, value_width=V), state_dtype=torch.float32,
        device=torch.device("cpu"), max_batch=4, max_tokens=16, max_draft=2, token_dtype=torch.float32,
    )  # fmt: skip
    rule.prepare(plan)
    for batch in (3, 1, 4, 2):
        call = decode_call(batch)
        want = served(rule, displaced(call, set()))
        assert torch.equal(want, served(rule, displaced(call, {"q"})))
    assert len({a["q"] for a in adapter.addresses[1::2]}) == 1


@pytest.mark.case("C14")
@pytest.mark.row("D07")
@pytest.mark.row("D08")
def test_a_parameter_updated_in_place_is_seen_after_a_refresh_at_the_same_address() -> None:
    adapter = DemandingAdapter()
    rule = build(adapter).gated_delta_rule()
    call = displaced(decode_call(), {"A_log"})
    before = call.states.clone()
    rule.decode(call)
    call.states.copy_(before)
    call.gates.A_log.data.copy_(torch.randn(HV))
    rule.refresh_parameters()
    got = rule.decode(call).clone()
    call.states.copy_(before)
    cold = build(DemandingAdapter()).gated_delta_rule().decode(call)
    assert torch.equal(got, cold)
    assert adapter.addresses[0]["A_log"] == adapter.addresses[1]["A_log"]


@pytest.mark.row("D07")
def test_layers_with_equal_parameters_have_separate_copies() -> None:
    adapter, call = DemandingAdapter(), decode_call()
    rule = build(adapter).gated_delta_rule()
    for _ in range(2):
        rule.decode(displaced(call, {"A_log", "dt_bias"}))
    assert adapter.addresses[0]["A_log"] != adapter.addresses[1]["A_log"]


@pytest.mark.case("C15")
@pytest.mark.row("D10")
@pytest.mark.row("D11")
def test_a_misaligned_pool_goes_to_the_fallback_with_the_original_tensors(caplog: pytest.LogCaptureFixture) -> None:
    container = build(DemandingAdapter(), gdn_fallback="reference")
    rule, call = container.gated_delta_rule(), decode_call()
    aligned, moved = displaced(call, set()), displaced(call, {"states"})
    want = rule.decode(aligned)
    with caplog.at_level(logging.WARNING, logger="qwen35"):
        assert torch.equal(want, rule.decode(moved))
        assert torch.equal(aligned.states, moved.states), "the state is updated in place"
        rule.decode(moved)
    assert len(caplog.records) == 1
    reason = "states requires 32-byte alignment, got 4 bytes off"
    kind = "states requires 32-byte alignment"
    assert container.counters().total("fallbacks", reason=kind, mode="eager") == 2
    decision = next(d for d in rule.decisions if d.phase is Phase.DECODE)
    assert (decision.adapter, decision.reasons) == ("reference", (reason,))


@pytest.mark.row("D10")
def test_a_misaligned_pool_without_a_fallback_is_an_error_and_nothing_is_written() -> None:
    rule = build(DemandingAdapter()).gated_delta_rule()
    call = displaced(verify_call(), {"intermediates"})
    before = call.intermediates.clone()
    assert not rule.supports(call)
    with pytest.raises(UnsupportedError, match="intermediates requires 32-byte alignment"):
        rule.verify(call)
    assert torch.equal(call.intermediates, before)
    assert call.out is not None
    assert call.out.isnan().all()


def test_a_pool_whose_slot_stride_breaks_alignment_counts_as_misaligned() -> None:
    call = displaced(decode_call(), set())
    wide = empty_aligned((N, HV * V * K + 1), torch.float32, torch.device("cpu"), 32).normal_()
    odd = wide[:, : HV * V * K].view(N, HV, V, K)
    support = build(DemandingAdapter()).gated_delta_rule().supports(dataclasses.replace(call, states=odd))
    assert support.reasons == ("states requires 32-byte alignment, got 4 bytes off",)


@pytest.mark.row("D01")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)])
def test_aligned_allocation(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    made = empty_aligned(shape, dtype, torch.device("cpu"), 32)
    assert (made.shape, made.dtype, made.is_contiguous()) == (torch.Size(shape), dtype, True)
    assert made.data_ptr() % 32 == 0
    assert made.untyped_storage().nbytes() - made.numel() * made.element_size() < 32


def test_many_unplanned_batch_sizes_cost_no_more_than_the_stated_bound() -> None:
    container = build(DemandingAdapter())
    rule = container.gated_delta_rule()
    guard = rule.adapters[Phase.DECODE][1]
    for batch in range(1, 60):
        rule.decode(displaced(decode_call(batch), {"A_log", "q"}))
        assert guard.scratch_bytes <= guard.scratch_bound
    largest = decode_call(64)
    sizes = sum(t.numel() * t.element_size() for _, t in tensors(largest))
    assert guard.scratch_bound < 40 * sizes


@pytest.mark.row("D12")
def test_a_branch_is_compared_before_a_replay() -> None:
    rule = build(DemandingAdapter()).gated_delta_rule()
    pool = torch.randn(N, HV, V, K)
    support = rule.before_replay(ReplayPlan(phase=Phase.DECODE, states=pool))
    assert support.reasons == ("no decode was captured",)


def test_refusals_that_differ_in_the_value_alone_are_one_kind(caplog: pytest.LogCaptureFixture) -> None:
    adapter = DemandingAdapter()
    container = build(adapter, gdn_fallback="reference")
    rule = container.gated_delta_rule()
    call = displaced(decode_call(), set())
    size = call.states.numel()
    with caplog.at_level(logging.WARNING, logger="qwen35"):
        for elements in (1, 2, 3, 5):
            base = empty_aligned((size + 32,), torch.float32, torch.device("cpu"), 32)
            states = base[elements : elements + size].view(call.states.shape).copy_(call.states)
            rule.decode(dataclasses.replace(call, states=states))
    assert len([r for r in caplog.records if "serves instead of" in r.getMessage()]) == 1
    assert container.counters().total("fallbacks", reason="states requires 32-byte alignment") == 4
