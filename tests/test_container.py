"""The container chooses, routes, falls back where told to, and says why."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest
import torch

import qwen35
from fakes import FakeGatedDeltaRule, decode_call, fake_entry
from qwen35.domain.capabilities import Clause, Phase
from qwen35.domain.errors import (
    ClosedError,
    ConfigurationError,
    UnavailableError,
    UnknownNameError,
    UnsupportedError,
    ValueRangeError,
)
from qwen35.ports.gated_delta_rule import ExtendCall, GatedDeltaRule
from qwen35.ports.short_convolution import ConvDecodeCall, ShortConvolution
from qwen35.services.counters import Counters
from qwen35.services.gated_delta_rule import GatedDeltaRuleService
from qwen35.services.prometheus import prometheus_text
from qwen35.services.short_convolution import ShortConvolutionService

PORT = "gated_delta_rule"


def test_services_and_adapters_implement_their_ports() -> None:
    container = qwen35.build(device="cpu")
    assert isinstance(container.gated_delta_rule(), GatedDeltaRule)
    assert isinstance(container.short_convolution(), ShortConvolution)
    assert container.gated_delta_rule() is container.gated_delta_rule()
    assert isinstance(qwen35.adapter("gated_delta_rule", "reference64", device="cpu"), GatedDeltaRule)


@pytest.mark.row("D30")
def test_phases_are_routed_each_for_itself() -> None:
    one, two = FakeGatedDeltaRule(1.0), FakeGatedDeltaRule(2.0)
    entries = [fake_entry("one", one), fake_entry("two", two)]
    rule = qwen35.build(device="cpu", adapters=entries, gdn_decode="one", gdn_extend="two", gdn_verify="two")
    assert float(rule.gated_delta_rule().decode(decode_call()).max()) == 1.0
    assert (len(one.calls), len(two.calls)) == (1, 0)


@pytest.mark.row("D30")
@pytest.mark.parametrize("setting", ["gdn_decode", "gdn_extend", "gdn_verify", "gdn_fallback", "conv"])
def test_an_unknown_adapter_lists_the_known_ones_and_the_nearest(setting: str) -> None:
    with pytest.raises(UnknownNameError, match=r"known: .*reference.*Did you mean 'reference'"):
        qwen35.build(device="cpu", **{setting: "refrence"})


def test_an_unknown_port_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"known: .*gated_delta_rule"):
        qwen35.adapter("gated_delta", "reference", device="cpu")


def test_a_named_adapter_that_is_not_usable_is_refused_with_its_reasons() -> None:
    entry = fake_entry("mine", FakeGatedDeltaRule(1.0), unusable=("device requires tpu, got cpu",))
    for fallback in (None, "reference"):  # a fallback serves refused calls; it stands in for no adapter
        with pytest.raises(UnavailableError, match="device requires tpu, got cpu"):
            qwen35.build(device="cpu", adapters=[entry], gdn_decode="mine", gdn_fallback=fallback)


@pytest.mark.row("D28")
def test_the_automatic_choice_takes_the_best_rank_and_says_why_not_the_others() -> None:
    deviating = FakeGatedDeltaRule(1.0, deviations={Clause.PRECISION: "beta is rounded"})
    entries = [
        fake_entry("absent", FakeGatedDeltaRule(3.0), rank=99, unusable=("not installed",)),
        fake_entry("deviating", deviating, rank=98),
        fake_entry("best", FakeGatedDeltaRule(2.0), rank=97),
    ]
    container = qwen35.build(device="cpu", adapters=entries)
    choice = container.registry().choose("gated_delta_rule", "auto")
    assert choice.name == "best"
    assert choice.rejected["absent"] == ("not installed",)
    assert choice.rejected["deviating"] == ("deviates from precision: beta is rounded",)
    named = qwen35.build(device="cpu", adapters=entries, gdn_decode="deviating")
    assert float(named.gated_delta_rule().decode(decode_call()).max()) == 1.0


def test_a_refusal_without_a_fallback_is_an_error_and_counted() -> None:
    refusing = FakeGatedDeltaRule(1.0, reasons=("key width requires 128, got 4",))
    container = qwen35.build(device="cpu", adapters=[fake_entry("picky", refusing)], gdn_decode="picky")
    with pytest.raises(UnsupportedError, match="key width requires 128, got 4"):
        container.gated_delta_rule().decode(decode_call())
    assert container.counters().total("refusals", adapter="picky", phase="decode") == 1
    assert container.counters().total("calls") == 0


def test_a_configured_fallback_serves_is_logged_once_and_counted_twice(caplog: pytest.LogCaptureFixture) -> None:
    picky, helper = FakeGatedDeltaRule(1.0, reasons=("too narrow",)), FakeGatedDeltaRule(2.0)
    container = qwen35.build(
        device="cpu", adapters=[fake_entry("picky", picky), fake_entry("helper", helper)],
        gdn_decode="picky", gdn_fallback="helper",
    )  # fmt: skip
    rule, call = container.gated_delta_rule(), decode_call()
    with caplog.at_level(logging.WARNING, logger="qwen35"):
        for _ in range(2):
            assert float(rule.decode(call).max()) == 2.0
    assert helper.calls == [call, call], "the fallback gets the original tensors"
    assert len(caplog.records) == 1
    assert container.counters().total("fallbacks", adapter="helper", instead_of="picky", reason="too narrow") == 2
    decision = next(d for d in rule.decisions if d.phase is Phase.DECODE)
    assert (decision.adapter, decision.reasons) == ("helper", ("too narrow",))


def test_checked_mode_refuses_bad_values_before_the_adapter_sees_them() -> None:
    adapter = FakeGatedDeltaRule(1.0)
    container = qwen35.build(device="cpu", adapters=[fake_entry("mine", adapter)], gdn_decode="mine", checked=True)
    with pytest.raises(ValueRangeError, match=r"slots\[1\] must be -1 or a slot in -1..2, got 3"):
        container.gated_delta_rule().decode(decode_call(slots=(0, 3)))
    with pytest.raises(ValueRangeError, match="slots must be distinct among live rows, got 1 more than once"):
        container.gated_delta_rule().decode(decode_call(slots=(1, 1)))
    assert adapter.calls == []
    assert container.gated_delta_rule().decode(decode_call(slots=(-1, -1))).shape == (2, 2, 3)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="device"):
        qwen35.build(device="tpu")
    with pytest.raises(ConfigurationError, match="is not there"):
        qwen35.build(device=f"cuda:{torch.cuda.device_count()}")


def test_closing_closes_each_adapter_once() -> None:
    mine = FakeGatedDeltaRule(1.0)
    names = {f"gdn_{phase}": "mine" for phase in ("decode", "extend", "verify")}
    rule = qwen35.build(device="cpu", adapters=[fake_entry("mine", mine)], **names).gated_delta_rule()
    assert rule.refresh_parameters() == 1
    rule.close()
    assert mine.closed == 1


def test_close_ends_every_part_of_a_container_and_may_be_repeated() -> None:
    mine, spare, shadow = (FakeGatedDeltaRule(mark) for mark in (1.0, 2.0, 3.0))
    entries = [fake_entry("mine", mine, rank=99), fake_entry("spare", spare), fake_entry("shadow", shadow)]
    container = qwen35.build(
        device="cpu", adapters=entries, gdn_fallback="spare", gdn_shadow="shadow:1", gdn_extend="reference",
        conv="reference",
    )  # fmt: skip
    probed = container.registry().adapter(PORT, "reference64")
    qwen35.close(container)
    assert min(mine.closed, spare.closed, shadow.closed) >= 1
    qwen35.close(container)
    call = decode_call()
    lengths = torch.tensor([0, 1, 2], dtype=torch.int32)
    extend = ExtendCall(
        q=call.q, k=call.k, v=call.v, gates=call.gates, states=call.states, slots=call.slots, cu_seqlens=lengths
    )
    for serve in (lambda: container.gated_delta_rule().extend(extend), lambda: probed.decode(call)):
        with pytest.raises(ClosedError):
            serve()
    windows = ConvDecodeCall(
        x=torch.randn(2, 4), weight=torch.randn(4, 3), windows=torch.randn(3, 4, 2), slots=call.slots, activation="silu"
    )
    with pytest.raises(ClosedError):
        container.short_convolution().decode(windows)
    assert not container.finalize().is_prepared


def test_close_ends_services_whose_adapters_the_registry_did_not_make() -> None:
    container, fake = qwen35.build(device="cpu"), FakeGatedDeltaRule(1.0)
    convolution = qwen35.adapter("short_convolution", "reference", device="cpu")
    phases = dict.fromkeys((Phase.DECODE, Phase.EXTEND, Phase.VERIFY), ("mine", fake))
    container.gated_delta_rule.override(GatedDeltaRuleService(phases, container.counters()))
    container.short_convolution.override(ShortConvolutionService("mine", convolution, container.counters()))
    windows = ConvDecodeCall(
        x=torch.randn(2, 4), weight=torch.randn(4, 3), windows=torch.randn(3, 4, 2),
        slots=torch.tensor([0, 1], dtype=torch.int32),
    )  # fmt: skip
    container.short_convolution().decode(windows)
    qwen35.close(container)
    assert fake.closed == 1
    with pytest.raises(ClosedError):
        container.short_convolution().decode(windows)


def test_close_closes_every_part_before_the_error_of_one_travels_on() -> None:
    class Failing(FakeGatedDeltaRule):
        def close(self) -> None:
            super().close()
            raise OSError("the device is gone")

    failing, other = Failing(1.0), FakeGatedDeltaRule(2.0)
    entries = [fake_entry("failing", failing), fake_entry("other", other)]
    container = qwen35.build(device="cpu", adapters=entries, gdn_decode="failing", conv="reference")
    container.registry().adapter(PORT, "other")
    with pytest.raises(OSError, match="the device is gone"):
        qwen35.close(container)
    assert failing.closed
    assert other.closed, "what stands behind a part that failed stays open"


def test_the_service_can_do_what_every_chosen_adapter_can_do() -> None:
    one = FakeGatedDeltaRule(1.0, deviations={Clause.PRECISION: "beta is rounded"})
    two = FakeGatedDeltaRule(2.0, deviations={Clause.ORDER: "sorted inside"})
    one.capabilities = replace(one.capabilities, key_widths=frozenset({64, 128}), trees=True, byte_alignment=1)
    two.capabilities = replace(
        two.capabilities, key_widths=frozenset({128, 256}), state_dtypes=frozenset({"float32"}), checkpoints=True,
        min_compute_capability=(9, 0), byte_alignment=32, raw_only=frozenset({Phase.DECODE, Phase.EXTEND}),
    )  # fmt: skip
    entries = [fake_entry("one", one), fake_entry("two", two)]
    container = qwen35.build(device="cpu", adapters=entries, gdn_decode="one", gdn_extend="two", gdn_verify="one")
    can = container.gated_delta_rule().capabilities
    assert (can.key_widths, can.state_dtypes) == ({128}, {"float32"})
    assert (can.byte_alignment, can.min_compute_capability) == (32, (9, 0))
    assert can.raw_only == {Phase.EXTEND}, "the first decodes, which takes log gates too"
    assert (can.trees, can.checkpoints) == (True, True), "trees are of verify, checkpoints of extend"
    assert can.deviations == {Clause.PRECISION: "beta is rounded", Clause.ORDER: "sorted inside"}


def test_counters_count_under_threads() -> None:
    counters = Counters()
    threads = [
        threading.Thread(target=lambda: [counters.add("calls", adapter="a") for _ in range(1000)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.total("calls", adapter="a") == 8000


def test_counters_and_gauges_read_as_prometheus_text() -> None:
    counters = Counters()
    counters.add("calls", adapter="a", mode="eager")
    counters.add("calls", adapter="b")
    counters.watch("scratch_bytes", lambda: 96, adapter="a")
    text = prometheus_text(counters)
    assert 'qwen35_calls_total{adapter="a",mode="eager"} 1.0' in text
    assert 'qwen35_calls_total{adapter="b",mode=""} 1.0' in text
    assert 'qwen35_scratch_bytes{adapter="a"} 96.0' in text


def test_arguments_of_the_wrong_kind_are_named() -> None:
    with pytest.raises(ConfigurationError, match="settings must be Settings, got 'triton'"):
        qwen35.build("triton")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="adapters must be AdapterEntry objects, got 'triton'"):
        qwen35.build(device="cpu", adapters=["triton"])  # type: ignore[list-item]
    one = fake_entry("mine", FakeGatedDeltaRule(1.0))
    for field, value in (("rank", "high"), ("rank", None), ("create", None), ("port", "gated_delta"), ("summary", 3)):
        with pytest.raises(ConfigurationError, match=rf"{field} must be .*, got {value!r}"):
            qwen35.build(device="cpu", adapters=[replace(one, **{field: value})])  # type: ignore[arg-type]
