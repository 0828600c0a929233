"""Compile what a plan's calls will launch, by calls whose rows are all padding: nothing of them is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    GatedDeltaRule,
    Gates,
    GdnPlan,
    LogGates,
    RawGates,
    VerifyCall,
)


def _gates(plan: GdnPlan, *leading: int) -> Iterator[Gates]:
    """The gates that engines have at hand: raw with either dtype of dt_bias, or log."""
    heads, on = plan.geometry.value_heads, plan.device
    tokens = torch.zeros(*leading, heads, dtype=plan.token_dtype, device=on)
    parameter = torch.zeros(heads, device=on)
    yield RawGates(a=tokens, b=tokens, A_log=parameter, dt_bias=parameter)
    if plan.token_dtype is not torch.float32:
        yield RawGates(a=tokens, b=tokens, A_log=parameter, dt_bias=parameter.to(plan.token_dtype))
    yield LogGates(g=tokens.float(), beta=tokens.float())


def _qkv(plan: GdnPlan, *leading: int) -> tuple[Tensor, Tensor]:
    """Tokens that serve as q and k, and v."""
    g = plan.geometry
    keys = torch.zeros(*leading, g.key_heads, g.key_width, dtype=plan.token_dtype, device=plan.device)
    values = torch.zeros(*leading, g.value_heads, g.value_width, dtype=plan.token_dtype, device=plan.device)
    return keys, values


def warm_up(adapter: GatedDeltaRule, plan: GdnPlan) -> None:
    """Call every planned phase of ``adapter`` on padding."""
    g, on = plan.geometry, plan.device
    states = torch.zeros(1, g.value_heads, g.value_width, g.key_width, dtype=plan.state_dtype, device=on)
    _warm_decode(adapter, plan, states)
    if plan.max_draft:
        _warm_verify(adapter, plan, states)
    if plan.max_tokens:
        for sequences in sorted({1, plan.max_batch}):
            _warm_extend(adapter, plan, states, sequences)
    torch.cuda.synchronize(on)


def _warm_decode(adapter: GatedDeltaRule, plan: GdnPlan, states: Tensor) -> None:
    """Decode in place and from slot to slot, by indices of either dtype: of one row and, for its tile, of all."""
    for batch in sorted({1, plan.max_batch}):
        keys, values = (tokens.expand(batch, -1, -1) for tokens in _qkv(plan, 1))
        for dtype in (torch.int32, torch.int64):
            slots = torch.full((batch,), -1, dtype=dtype, device=plan.device)
            for gates in _gates(plan, batch):
                for write_slots in (None, slots):
                    adapter.decode(
                        DecodeCall(
                            q=keys, k=keys, v=values, gates=gates, states=states, slots=slots, write_slots=write_slots
                        )
                    )


def _warm_extend(adapter: GatedDeltaRule, plan: GdnPlan, states: Tensor, sequences: int) -> None:
    """Extend of one token, in the last of ``sequences`` padded sequences.

    Gates matter to the first kernel only, fresh flags and write slots to the second only.
    """
    slots = torch.full((sequences,), -1, dtype=torch.int32, device=plan.device)
    ends = torch.zeros(sequences + 1, dtype=torch.int32, device=plan.device)
    ends[-1] = 1
    keys, values = _qkv(plan, 1)
    for gates in _gates(plan, 1):
        call = ExtendCall(q=keys, k=keys, v=values, gates=gates, states=states, slots=slots, cu_seqlens=ends)
        adapter.extend(call)
    for fresh, write_slots in ((slots < 0, None), (None, slots), (slots < 0, slots)):
        adapter.extend(replace(call, fresh=fresh, write_slots=write_slots))


def _warm_verify(adapter: GatedDeltaRule, plan: GdnPlan, states: Tensor) -> None:
    """Verify by chain and tree with rows and without, and commit."""
    slots = torch.full((1,), -1, dtype=torch.int32, device=plan.device)
    kept = states.new_zeros(1, 1, *states.shape[1:])
    keys, values = _qkv(plan, 1, 1)
    for gates in _gates(plan, 1, 1):
        for parents in (None, slots.view(1, 1)):
            for rows in (None, slots):
                adapter.verify(
                    VerifyCall(
                        q=keys, k=keys, v=values, gates=gates, states=states, slots=slots, intermediates=kept,
                        rows=rows, parents=parents,
                    )
                )  # fmt: skip
    for rows in (None, slots):
        adapter.commit(CommitCall(states=states, slots=slots, intermediates=kept, last=slots, rows=rows))
