"""The states that SGLang's prefix cache keeps: SGLang's own plan of a batch with a track mask, through its backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from seam_machine import Machine, close, installed_seam, split, start
from test_gdn_calls import ALL, ChunkKernel, oracle, own, raw, slots_of, start_refusing
from torch import Tensor

from qwen35.ports.gated_delta_rule import ExtendCall


class Request(NamedTuple):
    """``length`` new tokens behind ``prefix`` cached ones, of which the cache wants the state at ``branch`` (None: the
    last it can have). ``kept``: how many new tokens the tracked state has seen, by hand, for each interval between
    states that the cache can keep (None: it keeps none)."""

    length: int
    kept: dict[int, int | None]
    prefix: int = 0
    branch: int | None = None


REQUESTS = [
    Request(130, {64: 128, 128: 128}),
    Request(63, {64: None, 128: None}),
    Request(128, {64: 128, 128: 128}),
    Request(64, {64: 64, 128: None}),
    Request(200, {64: 64, 128: 128}, branch=64),
    Request(192, {64: 192, 128: 128}, prefix=128),
]
#: Planned states of the batch above: length // interval of every request, tracked or not.
PLANNED = {64: 2 + 0 + 2 + 1 + 3 + 3, 128: 1 + 0 + 1 + 0 + 1 + 1}
WORKING = slots_of(4, 9, 2, 11, 6, 1)
TRACK = slots_of(12, 3, 8, 13, 5, 10)
SLOTS = 15

INTERVALS = pytest.mark.parametrize("interval", [64, 128], ids=["page 1", "page 128"])
POOLS = pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "page-major"])


@pytest.fixture
def cache_every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the interval that SGLang takes from the model's chunk and its page size."""
    from sglang.srt.runtime_context import get_server_args

    return lambda interval: monkeypatch.setattr(get_server_args(), "_mamba_cache_chunk_size", interval, raising=False)


def scheduled(request: Request, row: int, interval: int) -> tuple[bool, int]:
    """Mask and length for a request's state, as SGLang's scheduler decides them."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    batch = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
        tree_cache=SimpleNamespace(page_size=1 if interval == 64 else interval),
        req_to_token_pool=SimpleNamespace(get_mamba_ping_pong_other_idx=lambda index: 1 - index),
    )  # fmt: skip
    kv = SimpleNamespace(mamba_ping_pong_track_buffer=TRACK[row : row + 1], mamba_next_track_idx=0,
                         mamba_last_track_seqlen=None)  # fmt: skip
    end = request.prefix + request.length
    req = SimpleNamespace(
        kv=kv, mamba_branching_seqlen=request.branch, prefix_indices=range(request.prefix), prefix_len=request.prefix,
        extend_range=SimpleNamespace(length=request.length), extend_len=request.length, extend_end=end,
    )  # fmt: skip
    entry = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, req)
    kept = request.kept[interval]
    assert entry.track_mask == (kept is not None)
    assert kv.mamba_last_track_seqlen == (None if kept is None else request.prefix + kept)
    return entry.track_mask, entry.track_seqlen


def track_batch(requests: list[Request], interval: int) -> Any:
    """SGLang's ForwardBatch of an extend, with what its scheduler says of tracked states."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    masks, ends = zip(*(scheduled(request, row, interval) for row, request in enumerate(requests)), strict=True)
    lengths, prefixes = [r.length for r in requests], [r.prefix for r in requests]
    tokens, rows = sum(lengths), len(requests)
    on_host = {"mamba_prefill_track_mask_cpu": list(masks), "mamba_track_seqlens_cpu": list(ends)}
    known = {field.name for field in dataclasses.fields(ForwardBatch)}
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=rows, input_ids=torch.zeros(tokens, dtype=torch.int64),
        req_pool_indices=torch.arange(rows), seq_lens=torch.tensor(lengths) + torch.tensor(prefixes),
        out_cache_loc=torch.arange(tokens), seq_lens_sum=tokens + sum(prefixes), extend_num_tokens=tokens,
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32), extend_seq_lens_cpu=lengths,
        extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32), extend_prefix_lens_cpu=prefixes,
        extend_start_loc=offsets_of(lengths)[:-1], mamba_track_indices=TRACK[:rows].long(),
        mamba_track_mask=torch.tensor(masks), mamba_track_seqlens=torch.tensor(ends),
        **{name: value for name, value in on_host.items() if name in known},
    )  # fmt: skip


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


class Run:
    """One extend of ``requests`` by SGLang's backend, over a pool whose track slots are NaN."""

    def __init__(self, machine: Machine, interval: int, requests: list[Request]) -> None:
        self.machine, self.interval, self.requests = machine, interval, requests
        self.working, self.track = WORKING[: len(requests)].long(), TRACK[: len(requests)].long()
        pool = machine.backend.req_to_token_pool
        pool.get_mamba_indices, pool.translate_mamba_indices = WORKING.__getitem__, lambda slots: slots
        machine.states[self.track] = torch.nan
        self.before = machine.states.clone()
        self.tokens = machine.tokens(sum(request.length for request in requests))
        batch = track_batch(requests, interval)
        machine.backend.init_forward_metadata(batch)
        self.metadata = machine.backend.forward_metadata
        self.out = machine.backend.forward_extend(machine.layer, batch, *self.tokens)

    def truth(self, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Output and working states after the first ``lengths`` tokens of every request."""
        starts = offsets_of([request.length for request in self.requests]).tolist()
        rows = torch.cat([torch.arange(at, at + n) for at, n in zip(starts, lengths, strict=False)])
        packed, a, b = (x[rows] for x in self.tokens)
        q, k, v = split(packed)
        states = self.before.clone()
        out = oracle.extend(ExtendCall(q=q, k=k, v=v, gates=raw(self.machine, a, b), states=states,
                                       slots=self.working.int(), cu_seqlens=offsets_of(lengths))).out  # fmt: skip
        return out, states[self.working]

    def check(self) -> None:
        """Tracked slots hold the states at the tracked tokens; slots that nobody named are bitwise as before."""
        out, final = self.truth([request.length for request in self.requests])
        close(self.out[0], out)
        close(self.machine.states[self.working], final)
        kept = [request.kept[self.interval] for request in self.requests]
        _, states = self.truth([n or 0 for n in kept])
        tracked = torch.tensor([n is not None for n in kept])
        assert tracked.any()
        for slot, state in zip(self.track[tracked], states[tracked], strict=True):
            close(self.machine.states[slot], state)
        rest = torch.ones(SLOTS, dtype=torch.bool)
        rest[self.working], rest[self.track[tracked]] = False, False
        assert torch.equal(self.machine.states[rest].view(torch.int32), self.before[rest].view(torch.int32))


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own kernel offers to write the one state that is wanted of every sequence."""
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    if installed_seam().version == "0.5.20":
        pytest.skip("this release asks no GDN kernel for snapshots")
    monkeypatch.setattr(TritonGDNKernel, "supports_track_state_snapshot", True)


@INTERVALS
@POOLS
def test_our_adapter_fills_the_tracked_slots(strided: bool, interval: int, cache_every: Callable[[int], None]) -> None:
    cache_every(interval)
    one = start(**ALL)
    run = Run(Machine(slots=SLOTS, strided=strided), interval, REQUESTS)
    assert run.metadata.has_mamba_track_mask
    assert run.metadata.state_checkpoint_every_n_tokens == interval
    assert run.metadata.num_state_checkpoints == PLANNED[interval]
    run.check()
    counters = one.container.counters()
    assert counters.total("calls", adapter="reference", phase="extend") == counters.total("calls") == 1


@INTERVALS
@POOLS
def test_sglangs_kernel_fills_them_where_our_adapter_refuses(
    strided: bool, interval: int, cache_every: Callable[[int], None]
) -> None:
    cache_every(interval)
    start_refusing("no such head ratio")
    machine = Machine(slots=SLOTS, strided=strided)
    kernel = own(machine)
    run = Run(machine, interval, REQUESTS)
    assert run.metadata.num_state_checkpoints == PLANNED[interval], "the plan was ours, the kernel is not"
    run.check()
    assert kernel.calls == ["extend"]


class Mislaid(ChunkKernel):
    """Says that it returns the planned states, and returns those before every chunk."""

    uses_state_checkpoints = True


@INTERVALS
def test_the_other_layout_is_caught(interval: int, cache_every: Callable[[int], None]) -> None:
    cache_every(interval)
    start_refusing("no such head ratio")
    machine = Machine(slots=SLOTS)
    machine.dispatcher.extend_kernel.original = Mislaid()
    run = Run(machine, interval, REQUESTS)
    with pytest.raises(AssertionError, match="relative error"):
        run.check()


@INTERVALS
def test_without_a_setting_sglangs_plan_is_for_its_own_kernel(
    interval: int, cache_every: Callable[[int], None]
) -> None:
    cache_every(interval)
    start()
    machine = Machine(slots=SLOTS)
    own(machine)
    run = Run(machine, interval, REQUESTS)
    assert run.metadata.has_mamba_track_mask
    assert run.metadata.num_state_checkpoints == 0
    run.check()


@pytest.mark.parametrize("refuses", [False, True], ids=["ours", "SGLang's kernel"])
def test_states_at_the_ends_alone_need_no_plan(refuses: bool, cache_every: Callable[[int], None]) -> None:
    cache_every(64)
    if refuses:
        start_refusing("no such head ratio")
    else:
        start(**ALL)
    machine = Machine(slots=SLOTS)
    kernel = own(machine)
    run = Run(machine, 64, REQUESTS[1:4])
    assert run.metadata.has_mamba_track_mask
    assert run.metadata.num_state_checkpoints == 0
    run.check()
    assert kernel.calls == (["extend"] if refuses else [])


class SnapshotKernel(ChunkKernel):
    """Writes the state before the wanted chunk of each sequence into the buffer that it is given, and no others."""

    def extend(self, *tokens: Tensor, track_state: Tensor, track_chunk_idx: Tensor, query_start_loc: Tensor,
               **others: Any) -> tuple[Tensor, None, Any]:  # fmt: skip
        out, last, before = super().extend(*tokens, query_start_loc=query_start_loc, **others)
        chunks = offsets_of(((query_start_loc.diff() + 63) // 64).tolist())
        for row, chunk in enumerate(track_chunk_idx.tolist()):
            track_state[row] = torch.nan if chunk < 0 else before[0][chunks[row] + chunk]
        return out, last, None


@INTERVALS
@pytest.mark.usefixtures("snapshots")
def test_a_kernel_that_takes_snapshots_is_asked_for_them_where_extend_is_its_own(
    interval: int, cache_every: Callable[[int], None]
) -> None:
    cache_every(interval)
    start(gdn_decode="reference")
    machine = Machine(slots=SLOTS)
    machine.dispatcher.extend_kernel.original = SnapshotKernel()
    Run(machine, interval, REQUESTS).check()


@INTERVALS
@pytest.mark.parametrize("refuses", [False, True], ids=["ours", "SGLang's kernel"])
@pytest.mark.usefixtures("snapshots")
def test_snapshots_are_not_asked_for_where_extend_is_ours(
    refuses: bool, interval: int, cache_every: Callable[[int], None]
) -> None:
    cache_every(interval)
    one = start_refusing("no such head ratio") if refuses else start(**ALL)
    machine = Machine(slots=SLOTS)
    kernel = own(machine)
    run = Run(machine, interval, REQUESTS)
    assert run.metadata.num_state_checkpoints == PLANNED[interval]
    run.check()
    assert kernel.calls == (["extend"] if refuses else [])
    assert one.container.counters().total("calls", phase="extend") == 1
