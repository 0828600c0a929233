"""Which slot of which pool is no request's, and the plans that come from pools."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from seam_machine import HV, PLACE, H, K, Machine, V, close, installed_seam, start
from test_gdn_calls import ALL, dispatch_extend, extend_two, oracle, own

from fakes import FakeGatedDeltaRule, fake_entry
from qwen35 import sglang_plugin
from qwen35.adapters.sglang.seam_plan import union
from qwen35.container import build
from qwen35.domain.errors import ConfigurationError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import GdnPlan
from qwen35.settings import load_settings


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "page-major"])
def test_checked_mode_serves_the_first_sequence_of_a_pool_that_sglang_gathers(
    strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.srt.layers.attention.linear.gdn_backend as gdn

    monkeypatch.setattr(gdn, "is_cpu", lambda: False)  # only there does SGLang hand on a page-major pool as it is
    one = start(**ALL, checked=True)
    machine = Machine(strided=strided)
    out, call = extend_two(machine)
    close(out[0], oracle.extend(call).out)
    close(machine.states, call.states)
    assert one.container.counters().total("calls", adapter="reference", phase="extend") == 1


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "page-major"])
def test_warm_up_batches_full_of_the_reserved_slot_pass_checked_mode(strided: bool) -> None:
    one = start(**ALL, checked=True)
    machine = Machine(strided=strided)
    states = machine.states.clone()
    packed, a, b = machine.tokens(3)
    machine.metadata([0, 0, 0], [0, 1, 2, 3])
    machine.backend.forward_decode(machine.layer, machine.batch("DECODE", [1, 1, 1]), packed, a, b)
    assert torch.equal(machine.states[1:], states[1:])
    assert one.container.counters().total("calls", adapter="reference") == 1


def test_the_plan_comes_from_the_pools() -> None:
    fake = FakeGatedDeltaRule(0.0)
    names = dict.fromkeys(ALL, "fake")
    container = build(device="cpu", conv="reference", adapters=[fake_entry("fake", fake)], **names)
    start(container, **names)
    Machine(slots=8, draft=3)
    Machine(slots=6)
    g = fake.plans[-1].geometry
    assert (g.key_heads, g.value_heads, g.key_width, g.value_width) == (2, 4, 8, 6)
    assert (fake.plans[-1].max_batch, fake.plans[-1].max_draft, fake.plans[-1].null_slot) == (8, 3, 0)
    assert fake.plans[-1].may_pad


@pytest.mark.parametrize(("chunk", "tokens"), [(48, 48), (-1, 99), (None, 99)])
def test_the_plan_has_room_for_the_largest_extend_and_a_token_of_every_row(chunk: int | None, tokens: int) -> None:
    from sglang.srt.runtime_context import get_schedule

    fake = FakeGatedDeltaRule(0.0)
    names = dict.fromkeys(ALL, "fake")
    start(build(device="cpu", conv="reference", adapters=[fake_entry("fake", fake)], **names), **names)
    with get_schedule().override(chunked_prefill_size=chunk, max_prefill_tokens=99):
        Machine(slots=8)
    assert fake.plans[-1].max_tokens == tokens + 8


def gdn_plan(value_heads: int, null_slot: int | None) -> GdnPlan:
    geometry = GdnGeometry(key_heads=H, value_heads=value_heads, key_width=K, value_width=V)
    return GdnPlan(geometry=geometry, state_dtype=torch.float32, device=torch.device("cpu"), max_batch=8, max_tokens=64,
                   max_draft=0, token_dtype=torch.float32, null_slot=null_slot, may_pad=True)  # fmt: skip


@pytest.mark.parametrize("value_heads", [HV, 2 * HV], ids=["one geometry", "two geometries"])
@pytest.mark.parametrize(("first", "second", "both"), [(0, 0, 0), (0, None, None), (None, 0, None)])
def test_a_slot_is_null_only_where_target_and_draft_agree(
    value_heads: int, first: int | None, second: int | None, both: int | None
) -> None:
    assert union(gdn_plan(HV, first), gdn_plan(value_heads, second)).null_slot == both


# A pool without a null slot beside one that has it


class OneNullSlot(FakeGatedDeltaRule):
    """Writes the null slot for padding, so that all its plans must name the first one's."""

    asked = 0

    def prepare(self, plan: GdnPlan) -> None:
        self.asked += 1
        if self.plans and plan.null_slot != self.plans[0].null_slot:
            raise ConfigurationError(f"null slot requires {self.plans[0].null_slot}, got {plan.null_slot}")
        super().prepare(plan)


REFUSAL = "null slot requires 0, got None"


def start_with_one_null_slot(**settings: Any) -> tuple[Any, OneNullSlot]:
    """On a release that gathers a page-major pool before extend, so that such a pool has no null slot."""
    fake, names = OneNullSlot(0.5), dict.fromkeys(ALL, "fake")
    known = load_settings(None, device="cpu", **names, **settings)
    container = build(known, conv="reference", adapters=[fake_entry("fake", fake)])
    gathers = dataclasses.replace(installed_seam(), gather_switch=None)
    return sglang_plugin.start(known, gathers, PLACE, container), fake


def draft_machine(**sizes: Any) -> Machine:
    """One whose pool is page-major, where the target's is not."""
    return Machine(strided=True, **sizes)


def decode_one(machine: Machine, slots: tuple[int, ...] = (3,)) -> Any:
    packed, a, b = machine.tokens(len(slots))
    machine.metadata(list(slots), list(range(len(slots) + 1)))
    batch = machine.batch("DECODE", [1] * len(slots))
    return machine.backend.forward_decode(machine.layer, batch, packed, a, b)


def test_a_draft_whose_null_slot_the_adapter_refuses_keeps_sglangs_kernels_beside_a_served_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sglang.srt.layers.attention.linear.gdn_backend as gdn

    monkeypatch.setattr(gdn, "is_cpu", lambda: False)  # only there does SGLang hand on a page-major pool as it is
    one, fake = start_with_one_null_slot()
    target, draft = Machine(), draft_machine(slots=20)
    plain, ours = own(draft), own(target)
    assert not draft.dispatcher.extend_uses_state_checkpoints, "SGLang's Triton plan is kept with its kernel"
    assert target.dispatcher.extend_uses_state_checkpoints
    decode_one(draft)
    extend_two(draft)
    assert (plain.calls, fake.calls) == (["packed_decode", "extend"], [])
    decode_one(target)
    dispatch_extend(target, [3], [1])
    assert (ours.calls, len(fake.calls)) == ([], 2)
    counters = one.container.counters()
    assert counters.total("plans_refused", port="gated_delta_rule", reason=REFUSAL) == 1
    assert counters.total("calls", adapter="engine:ChunkKernel") == 2
    assert counters.total("fallbacks") == 0
    Machine(slots=5)
    assert [plan.null_slot for plan in fake.plans] == [0, 0], "what was refused widens no later plan"
    assert fake.plans[-1].max_batch == 8


def test_a_refused_null_slot_is_said_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    one, fake = start_with_one_null_slot()
    Machine()
    with caplog.at_level(logging.WARNING, logger="qwen35"):
        draft_machine()
        draft_machine()
    assert fake.asked == 3
    said = [record.getMessage() for record in caplog.records if REFUSAL in record.getMessage()]
    assert len(said) == len([note for note in one.gdn.notes if REFUSAL in note]) == 1
    assert said[0].endswith("keep SGLang's own kernels")
    assert one.container.counters().total("plans_refused") == 2


def test_strict_stops_the_engine_where_the_adapter_refuses_the_drafts_null_slot() -> None:
    start_with_one_null_slot(sglang_strict=True)
    Machine()
    with pytest.raises(ConfigurationError, match=REFUSAL):
        draft_machine()


class OneModel(FakeGatedDeltaRule):
    """Has room for the calls of one model."""

    def prepare(self, plan: GdnPlan) -> None:
        if self.plans:
            raise ConfigurationError("one model is prepared already")
        super().prepare(plan)


def test_a_backend_that_is_left_alone_gathers_its_pool_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    switch = "requires_contiguous_prefill_state"
    monkeypatch.setattr(GDNAttnBackend, switch, True, raising=False)  # 0.5.20 has none, and always gathers
    names = dict.fromkeys(ALL, "fake")
    settings = load_settings(None, device="cpu", **names)
    container = build(settings, conv="reference", adapters=[fake_entry("fake", OneModel(0.5))])
    release = dataclasses.replace(installed_seam(), gather_switch=switch)
    sglang_plugin.start(settings, release, PLACE, container)
    target, draft = Machine(strided=True), Machine(strided=True)
    assert getattr(target.backend, switch) is False
    assert getattr(draft.backend, switch) is True
    sglang_plugin.uninstall()
    assert type(draft.dispatcher.decode_kernel).__name__ == "TritonGDNKernel"
