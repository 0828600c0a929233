"""What the guard counts, frees and refreshes, and checkpoint offsets, which it has to look for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_guard import DemandingAdapter, build, decode_call, displaced, off, on

from qwen35.domain.capabilities import Phase
from qwen35.ports.gated_delta_rule import CheckpointPlan, ExtendCall, RawGates
from qwen35.services.alignment_guard import AlignmentGuard
from qwen35.services.counters import Counters
from qwen35.services.prometheus import prometheus_text


def test_copies_refreshes_and_bytes_held_are_counted_and_read_as_prometheus_text() -> None:
    container = build(DemandingAdapter())
    rule, counters = container.gated_delta_rule(), container.counters()
    calls = [displaced(decode_call(), {"q", "slots", "A_log"}) for _ in range(2)]
    for call in calls:
        rule.decode(call)
    rule.refresh_parameters()
    assert counters.total("scratch_copies", argument="q") == counters.total("scratch_copies", argument="slots") == 2
    assert counters.total("scratch_copies", argument="A_log") == 0, "parameters are copied once, and elsewhere"
    assert counters.total("refreshes") == 1
    guard = rule.adapters[Phase.DECODE][1]
    held = {name: value for (name, _), value in counters.gauges().items()}
    assert held == {
        "scratch_bytes": guard.scratch_bytes, "scratch_bound_bytes": guard.scratch_bound,
        "parameter_bytes": guard.parameter_bytes,
    }  # fmt: skip
    assert min(held.values()) > 0
    text = prometheus_text(counters)
    for name in ("scratch_copies_total", "refreshes_total", "scratch_bytes", "scratch_bound_bytes", "calls_total"):
        assert f"\nqwen35_{name}{{" in text, text


def test_the_adapters_own_copies_are_refreshed_and_counted_too() -> None:
    adapter = DemandingAdapter()
    adapter.refresh_parameters = lambda: 3  # type: ignore[method-assign]
    guard = AlignmentGuard("demanding", adapter, Counters())  # type: ignore[arg-type]
    call = displaced(decode_call(), {"A_log"})
    guard.decode(call)
    assert guard.refresh_parameters() == 4


def test_closed_it_holds_nothing() -> None:
    guard = AlignmentGuard("demanding", DemandingAdapter(), Counters())  # type: ignore[arg-type]
    guard.decode(displaced(decode_call(), {"q", "A_log"}))
    assert min(guard.scratch_bytes, guard.parameter_bytes) > 0
    guard.close()
    assert guard.scratch_bytes == guard.parameter_bytes == 0


class HoldingAdapter(DemandingAdapter):
    """Has scratch of its own."""

    scratch_bytes, scratch_bound = 1000, 5000


def test_the_gauge_and_the_bound_count_the_adapters_own_scratch() -> None:
    container = build(HoldingAdapter())
    rule, counters = container.gated_delta_rule(), container.counters()
    plain = AlignmentGuard("plain", DemandingAdapter(), Counters())  # type: ignore[arg-type]
    guard = rule.adapters[Phase.DECODE][1]
    for _ in range(2):
        call = displaced(decode_call(), {"q"})
        rule.decode(call)
        plain.decode(call)
        held = {name: value for (name, _), value in counters.gauges().items()}
        assert held["scratch_bytes"] == guard.scratch_bytes == plain.scratch_bytes + 1000
        assert held["scratch_bound_bytes"] == guard.scratch_bound == plain.scratch_bound + 5000


def test_an_adapter_without_a_guard_is_counted_too() -> None:
    adapter = HoldingAdapter()
    adapter.capabilities = dataclasses.replace(adapter.capabilities, byte_alignment=1)
    container = build(adapter)
    assert container.gated_delta_rule().adapters[Phase.DECODE][1] is adapter
    labels = (("adapter", "demanding"),)
    assert container.counters().gauges() == {("scratch_bytes", labels): 1000, ("scratch_bound_bytes", labels): 5000}
    assert 'qwen35_scratch_bytes{adapter="demanding"} 1000.0' in prometheus_text(container.counters())


@pytest.mark.row("D06")
def test_checkpoint_offsets_are_aligned_where_nothing_else_is_off() -> None:
    adapter, r, heads, width = DemandingAdapter(), torch.randn, 16, 16  # so that every row is aligned
    call = displaced(
        ExtendCall(
            q=r(3, 2, width), k=r(3, 2, width), v=r(3, heads, width), states=r(2, heads, width, width),
            gates=RawGates(a=r(3, heads), b=r(3, heads), A_log=r(heads), dt_bias=r(heads)),
            slots=torch.tensor([1, 0]), cu_seqlens=torch.tensor([0, 1, 3]),
        ),
        set(),
    )  # fmt: skip
    for lay in (on, off):
        plan = CheckpointPlan(every=64, starts=lay(torch.zeros(3, dtype=torch.int64)), count=0)
        build(adapter).gated_delta_rule().extend(dataclasses.replace(call, checkpoints=plan))
    assert {c.checkpoints.starts.data_ptr() % 32 for c in adapter.calls} == {0}
    assert len(adapter.calls) == 2
