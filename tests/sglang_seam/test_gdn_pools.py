"""Which slot of which pool is no request's, and the plans that come from pools."""

from __future__ import annotations

import pytest
import torch
from seam_machine import HV, H, K, Machine, V, close, start
from test_gdn_calls import ALL, extend_two, oracle

from fakes import FakeGatedDeltaRule, fake_entry
from qwen35.adapters.sglang.seam_plan import union
from qwen35.container import build
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import GdnPlan


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
