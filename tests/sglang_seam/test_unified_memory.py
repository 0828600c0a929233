"""Slot 0 of SGLang's unified memory, which KV pages and states share, is no request's: the null slot, as elsewhere."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seam_machine import CHANNELS, HV, WIDTH, K, Machine, V, close, installed_seam, split, start
from test_gdn_calls import ALL, oracle, raw, slots_of

from fakes import FakeGatedDeltaRule, fake_entry
from qwen35.container import build
from qwen35.ports.gated_delta_rule import DecodeCall

PAGE = 4


def unified_pools(lazy: bool = False) -> Any:
    """SGLang's own, as its engine makes them for two GDN layers and one of full attention."""
    from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools
    from sglang.srt.runtime_context import get_memory

    states = SimpleNamespace(
        shape=SimpleNamespace(conv=[(CHANNELS, WIDTH - 1)], temporal=(HV, V, K)),
        dtype=SimpleNamespace(conv=torch.float32, temporal=torch.float32),
        layers=[0, 1],
    )
    wanted = {
        "device": "cpu", "kv_cache_dtype": torch.float32, "head_num": 2, "head_dim": 8, "page_size": PAGE,
        "start_layer": 0, "end_layer": 3, "is_draft_worker": False, "use_mla_backend": False, "mamba_layer_ids": [0, 1],
        "full_attention_layer_ids": [2], "mamba2_cache_params": states, "model_context_len": 32,
        "extra_max_context_len": 4, "max_total_num_tokens": 256, "max_mamba_cache_size": 8, "max_num_reqs": 6,
        "enable_memory_saver": False, "enable_mamba_extra_buffer": False, "enable_mamba_extra_buffer_lazy": False,
        "speculative_num_draft_tokens": None, "disable_overlap_schedule": True, "need_sort": False,
        "lazy_compaction": lazy,
    }  # fmt: skip
    known = inspect.signature(init_unified_mamba_pools).parameters
    with get_memory().override(enable_unified_memory=True):
        return init_unified_mamba_pools(**{name: value for name, value in wanted.items() if name in known})


def unified_machine() -> Machine:
    from sglang.srt.runtime_context import get_memory

    pool = unified_pools().req_to_token_pool
    pool.mamba_pool.mamba_cache.temporal.copy_(torch.randn(pool.mamba_pool.mamba_cache.temporal.shape))
    with get_memory().override(enable_unified_memory=True):
        return Machine(pool=pool)


# SGLang's own promise, on which the null slot rests


@pytest.mark.parametrize("lazy", [False, True], ids=["compacting", "lazy"])
def test_sglang_never_hands_out_slot_zero(lazy: bool) -> None:
    slots = unified_pools(lazy).req_to_token_pool.mamba_allocator
    for _ in range(2):
        first = slots.alloc(slots.schedulable_available_size())
        slots.free(first[::2])
        again = slots.alloc(slots.schedulable_available_size())
        assert again.numel() == first[::2].numel() > 1
        held = torch.cat([first[1::2], again])
        assert int(held.min()) > 0
        assert int(slots.translate(held).min()) > 0
        assert slots.translate(torch.tensor([0])).tolist() == [0], "what padding rows name stays there"
        assert slots.alloc(1) is None
        slots.clear()


def test_padding_rows_name_slot_zero() -> None:
    pool = unified_pools().req_to_token_pool
    rows = pool.get_mamba_indices(torch.tensor([0]))
    assert pool.translate_mamba_indices(rows).tolist() == [0]


def test_no_page_of_tokens_lies_where_slot_zero_is_written() -> None:
    pools = unified_pools()
    cache = pools.req_to_token_pool.mamba_pool.mamba_cache
    for part in (cache.temporal, *cache.conv):
        part[:, 0] = 1.0
    everything = torch.tensor([], dtype=torch.uint8).set_(cache.temporal.untyped_storage())
    end = int(everything.nonzero().max()) + 1
    tokens = pools.token_to_kv_pool_allocator
    pages = tokens.translate_kv_loc(tokens.alloc(tokens.available_size())) // PAGE
    assert tokens.alloc(PAGE) is None
    assert int(pages.min()) * tokens.full_attn_allocator.entry_bytes_per_page >= end > 0


# What the seam makes of it


def test_the_plan_names_the_null_slot_unless_sglang_gathers_the_pool() -> None:
    fake, names = FakeGatedDeltaRule(0.0), dict.fromkeys(ALL, "fake")
    start(build(device="cpu", conv="reference", adapters=[fake_entry("fake", fake)], **names), **names)
    unified_machine()
    gathers = installed_seam().gather_switch is None
    assert fake.plans[-1].null_slot == (None if gathers else 0)


def test_warm_up_batches_full_of_slot_zero_pass_checked_mode() -> None:
    one = start(**ALL, checked=True)
    machine = unified_machine()
    states = machine.states.clone()
    packed, a, b = machine.tokens(3)
    machine.metadata([0, 0, 0], [0, 1, 2, 3])
    machine.backend.forward_decode(machine.layer, machine.batch("DECODE", [1, 1, 1]), packed, a, b)
    assert torch.equal(machine.states[1:], states[1:])
    assert one.container.counters().total("calls", adapter="reference", phase="decode") == 1


def test_a_decode_with_padding_equals_a_decode_call() -> None:
    one = start(**ALL, checked=True)
    machine = unified_machine()
    states = machine.states.clone()
    packed, a, b = machine.tokens(4)
    machine.metadata([5, 0, 2, 0], [0, 1, 2, 3, 4])
    out = machine.backend.forward_decode(machine.layer, machine.batch("DECODE", [1] * 4), packed, a, b)
    q, k, v = split(packed)
    call = DecodeCall(q=q, k=k, v=v, gates=raw(machine, a, b), states=states, slots=slots_of(5, -1, 2, -1))
    close(out[0], oracle.decode(call))
    close(machine.states[1:], states[1:])
    assert one.container.counters().total("calls", adapter="reference", phase="decode") == 1
