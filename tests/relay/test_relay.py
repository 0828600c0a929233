"""The relay carries what was last stashed, whatever the order of payloads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch import Tensor

from qwen35.domain.errors import (
    CaptureError,
    DeviceError,
    DtypeError,
    ShapeError,
    UnknownNameError,
    ValueRangeError,
)
from qwen35.services.relay import Relay

ROWS = 6
LIVE_ROWS = st.sets(st.integers(1, ROWS - 1))
TAILS = {"topk": (2,), "hidden": (3,), "probs": (), "tokens": (1, 2)}


def index(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


class OneShotRelay(Relay):
    """Wrong on purpose: the first payload fixes which fields there are, as serving code once did."""

    def stash(self, indices: Tensor, payload: Mapping[str, Tensor]) -> None:
        known = self.fields
        super().stash(indices, {n: t for n, t in payload.items() if not known or n in known})


class ForgetfulRelay(Relay):
    """Wrong on purpose: a field that a payload lacks loses its rows."""

    def stash(self, indices: Tensor, payload: Mapping[str, Tensor]) -> None:
        super().stash(indices, payload)
        for name in set(self.fields) - set(payload):
            self.buffer(name)[indices] = 0


def machine(relay_type: type[Relay]) -> type[RuleBasedStateMachine]:
    class RelayMachine(RuleBasedStateMachine):
        """Compares a relay with a dictionary of rows."""

        def __init__(self) -> None:
            super().__init__()
            self.relay = relay_type(ROWS, "cpu")
            self.model: dict[str, dict[int, Tensor]] = {}
            self.addresses: dict[str, int] = {}

        @rule(rows=LIVE_ROWS, padding=st.integers(0, 2), names=st.sets(st.sampled_from([*TAILS])))
        def stash(self, rows: set[int], padding: int, names: set[str]) -> None:
            order = [*rows, *[0] * padding]
            payload = {name: torch.randn(len(order), *TAILS[name]) for name in names}
            self.relay.stash(index(*order), payload)
            if order:
                for name, values in payload.items():
                    self.model.setdefault(name, {}).update(zip(rows, values, strict=False))

        @invariant()
        def every_row_is_as_it_was_last_stashed(self) -> None:
            self.gather([*range(1, ROWS)])

        @rule(rows=st.lists(st.integers(1, ROWS - 1), max_size=4))
        def gather_some(self, rows: list[int]) -> None:
            self.gather(rows)

        def gather(self, rows: list[int]) -> None:
            got = self.relay.gather(index(*rows))
            assert set(got) == set(self.model)
            for name, written in self.model.items():
                want = [written.get(row, torch.zeros(TAILS[name])) for row in rows]
                assert torch.equal(got[name], torch.stack(want) if want else torch.empty(0, *TAILS[name]))

        @invariant()
        def buffers_stay_where_they_are(self) -> None:
            for name in self.relay.fields:
                address = self.relay.buffer(name).data_ptr()
                assert self.addresses.setdefault(name, address) == address

    return RelayMachine


PROFILE = settings(max_examples=40, stateful_step_count=10, deadline=None, database=None)


@pytest.mark.row("H01")
@pytest.mark.row("H08")
def test_any_order_of_payloads_ends_in_the_last_stashed_values() -> None:
    run_state_machine_as_test(machine(Relay), settings=PROFILE)


@pytest.mark.parametrize("wrong", [OneShotRelay, ForgetfulRelay])
def test_the_machine_catches_relays_that_depend_on_order(wrong: type[Relay]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine(wrong), settings=PROFILE)


@pytest.mark.case("C50")
def test_a_decode_with_topk_after_a_prefill_without_gets_its_values_back() -> None:
    relay = Relay(4, "cpu", checked=True)
    relay.stash(index(1, 2), {"tokens": torch.tensor([7, 8])})
    topk = torch.randn(2, 3)
    relay.stash(index(1, 2), {"tokens": torch.tensor([9, 10]), "topk": topk})
    got = relay.gather(index(2, 1))
    assert torch.equal(got["topk"], topk.flip(0))
    assert got["tokens"].tolist() == [10, 9]


@pytest.mark.case("C51")
@pytest.mark.row("H02")
def test_a_payload_without_a_field_keeps_its_rows() -> None:
    relay = Relay(3, "cpu", checked=True)
    first, last = torch.randn(1, 2), torch.randn(1, 2)
    relay.stash(index(1), {"topk": first})
    relay.stash(index(1), {})
    assert torch.equal(relay.gather(index(1))["topk"], first)
    relay.stash(index(1), {"topk": last})
    assert torch.equal(relay.gather(index(1))["topk"], last)


@pytest.mark.row("H03")
def test_a_row_that_was_never_written_is_zero_or_in_checked_mode_an_error() -> None:
    for checked in (False, True):
        relay = Relay(4, "cpu", checked=checked)
        relay.stash(index(1), {"topk": torch.ones(1, 2)})
        if checked:
            with pytest.raises(ValueRangeError, match="'topk' row 3 is read before it was written"):
                relay.gather(index(1, 3))
        else:
            assert relay.gather(index(3))["topk"].tolist() == [[0.0, 0.0]]


@pytest.mark.row("H04")
def test_a_field_that_appears_for_some_rows_only_is_carried_for_those() -> None:
    relay = Relay(4, "cpu")
    relay.stash(index(1), {"topk": torch.ones(1, 2)})
    relay.stash(index(2), {"topk": torch.ones(1, 2), "probs": torch.tensor([0.5])})
    assert relay.gather(index(1, 2))["probs"].tolist() == [0.0, 0.5]


def test_checked_mode_judges_only_the_fields_that_are_asked_for() -> None:
    relay = Relay(4, "cpu", checked=True)
    relay.stash(index(1), {"tokens": torch.ones(1)})
    relay.stash(index(2), {"tokens": torch.ones(1), "probs": torch.tensor([0.5])})
    assert set(relay.gather(index(1), ["tokens"])) == {"tokens"}
    with pytest.raises(ValueRangeError, match="'probs' row 1"):
        relay.gather(index(1), ["tokens", "probs"])
    with pytest.raises(UnknownNameError, match="Did you mean 'probs'"):
        relay.gather(index(1), ["prob"])


@pytest.mark.row("H05")
def test_empty_batches_are_no_ops() -> None:
    relay = Relay(3, "cpu", checked=True)
    relay.stash(index(), {"topk": torch.empty(0, 2)})
    assert relay.fields == {}
    assert relay.gather(index()) == {}
    relay.stash(index(1), {"topk": torch.ones(1, 2)})
    assert relay.gather(index())["topk"].shape == (0, 2)


@pytest.mark.row("H06")
def test_drift_is_refused_before_anything_is_written() -> None:
    relay = Relay(3, "cpu")
    relay.stash(index(1), {"topk": torch.ones(1, 2)})
    with pytest.raises(DtypeError, match="'topk' must be float32 as first carried, got float64"):
        relay.stash(index(1), {"new": torch.ones(1), "topk": torch.zeros(1, 2, dtype=torch.float64)})
    with pytest.raises(ShapeError, match=r"'topk' must have rows of \(2,\)"):
        relay.stash(index(1), {"topk": torch.zeros(1, 3)})
    assert "new" not in relay.fields
    assert relay.gather(index(1))["topk"].tolist() == [[1.0, 1.0]]


@pytest.mark.row("H07")
def test_the_padding_row_takes_every_padded_write_and_is_readable_in_checked_mode() -> None:
    relay = Relay(3, "cpu", checked=True)
    relay.stash(index(0, 1, 0), {"topk": torch.tensor([5.0, 6.0, 7.0])})
    assert float(relay.gather(index(1, 0))["topk"][0]) == 6.0


@pytest.mark.parametrize("bad", [index(3), index(-1), index(1, 1)])
def test_bad_indices_are_refused(bad: Tensor) -> None:
    relay = Relay(3, "cpu")
    with pytest.raises(ValueRangeError):
        relay.stash(bad, {"topk": torch.ones(len(bad))})
    assert relay.fields == {}


def test_a_field_that_is_first_carried_in_inference_mode_is_carried_outside_it_too() -> None:
    relay = Relay(ROWS, "cpu", checked=True)
    with torch.inference_mode():
        relay.stash(index(1), {"topk": torch.ones(1, 2)})
    relay.stash(index(1), {"topk": torch.full((1, 2), 2.0)})
    assert relay.gather(index(1))["topk"].tolist() == [[2.0, 2.0]]


def test_nothing_is_recorded_for_autograd() -> None:
    """A buffer that joined a graph would keep every step's alive."""
    relay = Relay(ROWS, "cpu")
    relay.stash(index(1), {"topk": torch.ones(1, 2, requires_grad=True) * 2})
    assert not relay.buffer("topk").requires_grad
    assert relay.gather(index(1))["topk"].tolist() == [[2.0, 2.0]]


def test_tensors_of_another_device_are_refused_before_a_buffer_is_made() -> None:
    relay, elsewhere = Relay(ROWS, "cpu"), torch.ones(1, device="meta")
    with pytest.raises(DeviceError, match="'topk' must be on cpu, got meta"):
        relay.stash(index(1), {"topk": elsewhere})
    with pytest.raises(DeviceError, match="indices must be on cpu, got meta"):
        relay.stash(index(1).to("meta"), {"topk": elsewhere})
    assert relay.fields == {}


class OnGpu(Tensor):
    """Says that it lies on the second GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


def test_tensors_of_another_gpu_are_refused_before_a_buffer_is_made() -> None:
    relay = Relay(ROWS, "cuda:0", inside=lambda _: False)
    with pytest.raises(DeviceError, match="indices must be on cuda:0, got cuda:1"):
        relay.stash(index(1).as_subclass(OnGpu), {"topk": torch.ones(1, 2).as_subclass(OnGpu)})
    assert relay.fields == {}


def test_a_device_may_be_named_with_its_number_or_without() -> None:
    for name in ("cpu", "cpu:0", torch.device("cpu")):
        relay = Relay(ROWS, name)
        relay.stash(index(1), {"topk": torch.ones(1, 2)})
        assert relay.gather(index(1))["topk"].tolist() == [[1.0, 1.0]]


def test_a_field_that_is_first_carried_inside_capture_is_refused_before_anything_is_written() -> None:
    captured = [False]
    relay = Relay(ROWS, "cpu", inside=lambda _: captured[0])
    relay.stash(index(1), {"topk": torch.ones(1, 2)})
    captured[0] = True
    with pytest.raises(CaptureError, match=r"\['probs'\] are first carried inside capture: carry them once before"):
        relay.stash(index(1), {"topk": torch.zeros(1, 2), "probs": torch.ones(1)})
    assert set(relay.fields) == {"topk"}
    assert relay.gather(index(1))["topk"].tolist() == [[1.0, 1.0]]
    relay.stash(index(1), {"topk": torch.full((1, 2), 2.0)})
    assert relay.gather(index(1))["topk"].tolist() == [[2.0, 2.0]], "what is known is carried inside capture too"
    captured[0] = False
    relay.stash(index(1), {"probs": torch.ones(1)})
    assert set(relay.fields) == {"topk", "probs"}


def test_values_on_a_device_are_read_in_checked_mode_outside_capture_only() -> None:
    """A meta tensor has no values: whatever reads one fails, as on a GPU it would wait."""
    rows, payload = index(1, 2).to("meta"), {"topk": torch.ones(2, 3, device="meta")}
    plain = Relay(ROWS, "meta")
    plain.stash(rows, payload)
    assert plain.gather(rows)["topk"].shape == (2, 3)
    for captured in (True, False):
        relay = Relay(ROWS, "meta", checked=True, inside=lambda _, now=captured: now)  # type: ignore[misc]
        with nullcontext() if captured else pytest.raises(RuntimeError, match="meta"):
            relay.stash(rows, {})


def test_checked_mode_leaves_unwritten_rows_alone_inside_capture() -> None:
    captured = [False]
    relay = Relay(ROWS, "cpu", checked=True, inside=lambda _: captured[0])
    relay.stash(index(1), {"topk": torch.ones(1, 2)})
    with pytest.raises(ValueRangeError, match="read before it was written"):
        relay.gather(index(2))
    captured[0] = True
    assert relay.gather(index(2))["topk"].tolist() == [[0.0, 0.0]]


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_for_the_device(seed: int) -> None:
    torch.manual_seed(seed)
    relay, device = Relay(ROWS, "cuda"), torch.device("cuda")
    first, second = torch.randn(2, 3, device=device), torch.randn(2, 3, device=device)
    rows, padded = index(1, 2).to(device), index(2, 0).to(device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        relay.stash(rows, {"topk": first})
        relay.stash(padded, {"topk": second, "probs": first})
        got = relay.gather(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got["topk"], torch.stack([first[0], second[0]])), f"seed {seed}"
    assert torch.equal(got["probs"], torch.stack([torch.zeros_like(first[0]), first[0]])), f"seed {seed}"


@pytest.mark.gpu
@pytest.mark.parametrize("checked", [False, True])
def test_a_captured_stash_and_gather_see_new_values_at_each_replay(seed: int, checked: bool) -> None:
    torch.manual_seed(seed)
    relay, device = Relay(ROWS, "cuda", checked), torch.device("cuda")
    rows, payload = index(1, 2).to(device), torch.randn(2, 3, device=device)
    relay.stash(rows, {"topk": payload})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        relay.stash(rows, {"topk": payload})
        got = relay.gather(rows)["topk"]
        with pytest.raises(CaptureError, match="first carried inside capture"):
            relay.stash(rows, {"probs": payload})
    for _ in range(2):
        payload.normal_()
        graph.replay()
        assert torch.equal(got, payload), f"seed {seed}"
