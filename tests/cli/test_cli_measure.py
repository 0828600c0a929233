"""The measuring under ``qwen35 swap``: what the probe sees, what the oracle samples, how times become numbers."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_third_party import Delegate
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qwen35.cli import parse
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ConfigurationError
from qwen35.domain.geometry import GdnGeometry, public_geometry
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, ExtendResult, VerifyCall
from qwen35.testing.measure import (
    Method,
    Timing,
    cold_sets,
    copy_bandwidth,
    relative_error,
    time_events,
    time_graph,
)
from qwen35.testing.probe import oracle_error, probe, run_call, truth_of
from qwen35.testing.workload import Layout, Row, choose_sample, live_slots, random_call, random_pool

LAYOUT = Layout(
    geometry=GdnGeometry(key_heads=2, value_heads=4, key_width=8, value_width=12), token_dtype=torch.float32,
    state_dtype=torch.float32, device=torch.device("cpu"),
)  # fmt: skip
SEED = random.SystemRandom().randrange(2**31)


class Spoilt(Delegate):
    """The reference with a spoilt decode, extend or verify."""

    def __init__(
        self, decode: Callable[[Any, DecodeCall], Tensor] | None = None,
        extend: Callable[[Any, ExtendCall], ExtendResult] | None = None,
        verify: Callable[[Any, VerifyCall], Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._decode, self._extend, self._verify = decode, extend, verify

    def decode(self, call: DecodeCall) -> Tensor:
        return super().decode(call) if self._decode is None else self._decode(self.inner, call)

    def extend(self, call: ExtendCall) -> ExtendResult:
        return super().extend(call) if self._extend is None else self._extend(self.inner, call)

    def verify(self, call: VerifyCall) -> Tensor:
        return super().verify(call) if self._verify is None else self._verify(self.inner, call)


def wraps_to_the_last_slot(inner: Any, call: DecodeCall) -> Tensor:
    out: Tensor = inner.decode(call)
    call.states[call.slots[call.slots < 0].long()] += 1
    return out


def leaves_padding_unwritten(inner: Any, call: DecodeCall) -> Tensor:
    out: Tensor = inner.decode(call)
    out[call.slots < 0] = float("nan")
    return out


def ignores_write_slots(inner: Any, call: DecodeCall) -> Tensor:
    out: Tensor = inner.decode(replace(call, write_slots=None))
    return out


def writes_a_neighbour(inner: Any, call: DecodeCall) -> Tensor:
    out: Tensor = inner.decode(call)
    call.states[5] += 1
    return out


def scales_keys_in_place(inner: Any, call: DecodeCall) -> Tensor:
    out: Tensor = inner.decode(call)
    call.k.mul_(2)
    return out


def depends_on_the_row_number(inner: Any, call: DecodeCall) -> Tensor:
    out: Tensor = inner.decode(call)
    return out * (1 + 1e-6 * torch.arange(len(out))[:, None, None])


def divides_by_the_key(inner: Any, call: DecodeCall) -> Tensor:
    out: Tensor = inner.decode(call)
    norm = call.k.norm(dim=-1).repeat_interleave(2, dim=1)[..., None]
    return torch.where(call.slots[:, None, None] < 0, out, out * norm / norm)


def reads_dense_memory(inner: Any, call: DecodeCall) -> Tensor:
    dense = torch.as_strided(call.q, call.q.shape, (call.q[0].numel(), call.q.shape[-1], 1))
    out: Tensor = inner.decode(replace(call, q=dense.contiguous()))
    return out


def ignores_fresh(inner: Any, call: ExtendCall) -> ExtendResult:
    result: ExtendResult = inner.extend(replace(call, fresh=None))
    return result


def touches_the_empty_sequence(inner: Any, call: ExtendCall) -> ExtendResult:
    result: ExtendResult = inner.extend(call)
    empty = (call.cu_seqlens.diff() == 0) & (call.slots >= 0)
    call.states[call.slots[empty].long()] *= 0.5
    return result


def updates_the_pool(inner: Any, call: VerifyCall) -> Tensor:
    out: Tensor = inner.verify(call)
    call.states[3] = call.intermediates[0, -1]
    return out


def forgets_the_chain(inner: Any, call: VerifyCall) -> Tensor:
    out: Tensor = inner.verify(call)
    call.intermediates[:, -1] = call.intermediates[:, 0]
    return out


@pytest.mark.parametrize(
    ("spoilt", "phase", "clause"),
    [
        ({"decode": wraps_to_the_last_slot}, Phase.DECODE, "padding"),
        ({"decode": leaves_padding_unwritten}, Phase.DECODE, "padding"),
        ({"decode": ignores_write_slots}, Phase.DECODE, "write slots"),
        ({"decode": writes_a_neighbour}, Phase.DECODE, "isolation"),
        ({"decode": scales_keys_in_place}, Phase.DECODE, "isolation"),
        ({"decode": depends_on_the_row_number}, Phase.DECODE, "order"),
        ({"decode": divides_by_the_key}, Phase.DECODE, "finite"),
        ({"decode": reads_dense_memory}, Phase.DECODE, "strides"),
        ({"extend": ignores_fresh}, Phase.EXTEND, "fresh"),
        ({"extend": touches_the_empty_sequence}, Phase.EXTEND, "empty"),
        ({"verify": updates_the_pool}, Phase.VERIFY, "verify"),
        ({"verify": forgets_the_chain}, Phase.VERIFY, "verify"),
    ],
)
def test_the_probe_names_the_clause_that_is_broken(spoilt: dict[str, Any], phase: Phase, clause: str) -> None:
    seen = probe(Spoilt(**spoilt), phase, LAYOUT, SEED)
    assert clause in {str(b.clause) for b in seen}, f"seed {SEED}: {seen}"


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.EXTEND])
def test_the_probe_finds_nothing_in_the_reference(phase: Phase) -> None:
    assert probe(Delegate(), phase, LAYOUT, SEED) == [], f"seed {SEED}"


def lends_the_null_slot(inner: Any, call: DecodeCall) -> Tensor:
    """As kernels do that give padded rows a slot of their own: what is left there is nobody's."""
    out: Tensor = inner.decode(call)
    if bool((call.slots < 0).any()):
        call.states[0] = torch.where(torch.rand(call.states[0].shape) < 0.5, torch.randn(()), float("nan"))
    return out


def test_what_padding_leaves_in_the_null_slot_breaks_no_clause() -> None:
    layout = replace(LAYOUT, null_slot=0)
    assert probe(Spoilt(decode=lends_the_null_slot), Phase.DECODE, layout, SEED) == [], f"seed {SEED}"
    assert probe(Spoilt(decode=lends_the_null_slot), Phase.DECODE, LAYOUT, SEED) != [], "without one it is a live slot"


@pytest.mark.parametrize("row", [Row(Phase.DECODE, (1,) * 6), Row(Phase.EXTEND, (4, 9, 2)), Row(Phase.VERIFY, (3, 3))])
@pytest.mark.parametrize("budget", [1, 10**9])
def test_a_sample_of_the_oracle_sees_an_error_as_large_as_it_is(row: Row, budget: int) -> None:
    generator = torch.Generator().manual_seed(SEED)
    pool = random_pool(LAYOUT, 8, generator)
    before = pool.clone()
    call = random_call(LAYOUT, row, pool, live_slots(LAYOUT, row.batch, 8, generator), generator)
    out = run_call(Delegate(), call)
    truth = truth_of(call, row, LAYOUT, before[call.slots.long()], budget)
    for value in oracle_error(call, row, truth, out):
        assert value < 1e-5, f"seed {SEED}"
    spoilt, state = oracle_error(call, row, truth, out * 1.5)
    assert spoilt == pytest.approx(0.5, rel=1e-4), f"seed {SEED}"
    assert state < 1e-5


@given(
    key_heads=st.sampled_from([1, 2, 16]), ratio=st.integers(1, 4), batch=st.integers(1, 300),
    length=st.integers(1, 5000), budget=st.integers(1, 2**40),
)  # fmt: skip
def test_a_sample_stays_inside_the_call_and_takes_whole_head_groups(
    key_heads: int, ratio: int, batch: int, length: int, budget: int
) -> None:
    geometry = GdnGeometry(key_heads=key_heads, value_heads=key_heads * ratio, key_width=8, value_width=12)
    row = Row(Phase.EXTEND, (length,) * batch)
    sample = choose_sample(replace(LAYOUT, geometry=geometry), row, budget)
    assert set(sample.indices) <= set(range(batch))
    assert 0 in sample.indices
    assert set(sample.key_heads) <= set(range(key_heads))
    assert [h // ratio for h in sample.value_heads] == [k for k in sample.key_heads for _ in range(ratio)]
    work = sum(sample.lengths) * len(sample.value_heads) * 8 * 12
    smallest = length * ratio * 8 * 12
    assert work <= max(budget, smallest)


def test_null_slot_is_never_live() -> None:
    layout = replace(LAYOUT, null_slot=0)
    slots = live_slots(layout, 7, 8, torch.Generator().manual_seed(SEED))
    assert sorted(slots.tolist()) == list(range(1, 8))


def test_timing_is_the_median_and_the_distance_of_two_rounds() -> None:
    timing = Timing.of([[1.0, 2.0, 9.0], [4.0, 3.0, 5.0]], Method.WALL)
    assert timing.median_us == 3.5
    assert timing.spread_us == 2.0
    assert timing.samples == 6
    assert timing.low_us <= timing.median_us <= timing.high_us


def test_relative_error_is_infinite_for_what_is_not_finite() -> None:
    truth = torch.tensor([3.0, 4.0])
    assert relative_error(truth + torch.tensor([0.0, 0.5]), truth) == pytest.approx(0.1)
    assert relative_error(torch.tensor([float("nan"), 4.0]), truth) == float("inf")


def test_words_become_sizes() -> None:
    assert parse.sizes("--x", "1,8, 64") == (1, 8, 64)
    assert parse.sizes("--x", "") == ()
    assert parse.length_sets("--x", "1x2048;2x3,7") == ((2048,), (3, 3, 7))
    assert parse.pairs("--x", "8x4,1x2") == ((8, 4), (1, 2))
    assert parse.names("--x", "a, b,a") == ("a", "b")
    with pytest.raises(ConfigurationError, match="joined by commas"):
        parse.names("--x", "a,,b")
    assert parse.geometry(None, "397B-A17B", 8) == ("397B-A17B", public_geometry("397B-A17B").gdn.shard(8))


def test_one_rank_s_part_of_a_checkpoint_is_measured(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    name, part = parse.geometry(tmp_path, "", 2)
    assert (name, part.key_heads, part.value_heads) == (tmp_path.name, 2, 4)


@pytest.mark.parametrize("mib", [1, 30, 2_000])
def test_calls_rotate_over_eight_l2_sizes(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    l2 = 60 * 2**20
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=l2))
    sets = cold_sets(torch.device("cuda", 0), mib * 2**20)
    assert sets == {1: 256, 30: 16, 2_000: 1}[mib], "256 at most"
    assert cold_sets(torch.device("cpu"), mib * 2**20) == 1


@pytest.mark.gpu
def test_on_a_gpu_calls_over_cold_sets_and_flushed_ones_find_the_l2_cold() -> None:
    device, size = torch.device("cuda", 0), 8 * 2**20

    def copies(sets: int) -> list[Callable[[], Tensor]]:
        pairs = [(torch.randn(size // 4, device=device), torch.empty(size // 4, device=device)) for _ in range(sets)]
        return [lambda source=source, target=target: target.copy_(source) for source, target in pairs]

    warm = time_graph(copies(1), device).median_us
    cold = time_graph(copies(cold_sets(device, 2 * size)), device).median_us
    flushed = time_events(copies(1), device).median_us
    assert cold > 1.3 * warm, f"{cold} us over cold sets, {warm} over one"
    assert flushed > 1.3 * warm, f"{flushed} us flushed, {warm} over one"


@pytest.mark.gpu
def test_on_a_gpu_a_copy_is_timed_by_graph_replay_near_the_card_s_bandwidth() -> None:
    device = torch.device("cuda", 0)
    source = torch.randn(2**24, device=device)
    target = torch.empty_like(source)
    timing = time_graph([lambda: target.copy_(source)], device)
    assert timing.method is Method.GRAPH
    assert torch.equal(source, target)
    ceiling = copy_bandwidth(device)
    assert 0.5 * ceiling < 2 * source.nbytes / (timing.median_us * 1e-6) < 2 * ceiling


@pytest.mark.gpu
def test_an_eager_call_is_timed_without_the_host_s_part_unless_it_waits_for_the_device() -> None:
    device = torch.device("cuda", 0)
    x = torch.zeros(1024, device=device)

    def slow_host() -> None:
        x.add_(1)
        time.sleep(2e-3)
        x.add_(1)

    queued = time_events([slow_host], device, repeats=5)
    assert queued.method is Method.QUEUED
    assert queued.median_us < 1000, "the host slept 2 ms between two launches"
    waiting = time_events([lambda: (slow_host(), x.sum().item())], device, repeats=5)
    assert waiting.method is Method.EVENTS
    assert waiting.median_us > 2000
