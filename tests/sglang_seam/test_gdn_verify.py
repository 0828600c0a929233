"""Verify through SGLang's own backend and dispatcher: chains, trees, stable rows; ragged drafts are SGLang's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from seam_machine import HV, Machine, V, close, split, start
from test_gdn_calls import ALL, oracle, own, raw, slots_of
from torch import Tensor

from qwen35.ports.gated_delta_rule import VerifyCall


def verify(machine: Machine, slots: list[int], draft: int, **more: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    packed, a, b = machine.tokens(len(slots) * draft)
    machine.metadata(slots, [i * draft for i in range(len(slots) + 1)], **more)
    batch = machine.batch("TARGET_VERIFY", [draft] * len(slots))
    out = machine.backend.forward_extend(machine.layer, batch, packed, a, b)
    q, k, v = (x.unflatten(0, (len(slots), draft)) for x in split(packed))
    return out, (q, k, v, a.view(len(slots), draft, HV), b.view(len(slots), draft, HV))


@pytest.mark.row("G09")
def test_verify_of_a_chain_fills_sglangs_intermediate_rows_and_leaves_the_pool() -> None:
    start(**ALL)
    machine = Machine(draft=4)
    states = machine.states.clone()
    out, (q, k, v, a, b) = verify(machine, [5, -1, 2], 3)
    intermediates = torch.full_like(machine.intermediates, torch.nan)
    call = VerifyCall(q=q, k=k, v=v, gates=raw(machine, a, b), states=states, slots=slots_of(5, -1, 2),
                      intermediates=intermediates)  # fmt: skip
    expected = oracle.verify(call)
    assert out.shape == (1, 9, HV, V)
    close(out[0], expected.flatten(0, 1))
    close(machine.intermediates[[0, 2], :3], intermediates[[0, 2], :3])
    assert machine.intermediates[1].isnan().all(), "a padding row writes nothing"
    assert torch.equal(machine.states, states)


def test_verify_of_a_tree_continues_each_node_from_its_parent() -> None:
    one = start(**ALL)
    machine = Machine(draft=4)
    states = machine.states.clone()
    #   0 - 1 - 3        0 - 1 - 2 - 3
    #    \- 2
    children = torch.tensor([[1, 3, -1, -1], [1, 2, 3, -1]])
    siblings = torch.tensor([[-1, 2, -1, -1], [-1, -1, -1, -1]])
    out, (q, k, v, a, b) = verify(
        machine, [5, 2], 4, retrieve_next_token=children, retrieve_next_sibling=siblings,
        retrieve_parent_token=torch.empty_like(children),
    )  # fmt: skip
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]], dtype=torch.int32)
    intermediates = torch.full_like(machine.intermediates, torch.nan)
    expected = oracle.verify(VerifyCall(q=q, k=k, v=v, gates=raw(machine, a, b), states=states, slots=slots_of(5, 2),
                                        intermediates=intermediates, parents=parents))  # fmt: skip
    close(out[0], expected.flatten(0, 1))
    close(machine.intermediates[:2], intermediates[:2])
    assert one.container.counters().total("calls", adapter="reference", phase="verify") == 1


def test_stable_rows_put_intermediate_states_where_sglang_asks() -> None:
    start(**ALL)
    machine = Machine(draft=2)
    packed, a, b = machine.tokens(6)
    q, k, v = split(packed)
    rows, padding_row = slots_of(6, 8, 3), 8
    machine.dispatcher.target_verify(
        machine.A_log, machine.dt_bias, q[None], k[None], v[None], a, b, ssm_states=machine.states,
        cache_indices=slots_of(5, -1, 2), query_start_loc=slots_of(0, 2, 4, 6),
        intermediate_states_buffer=machine.intermediates, intermediate_state_indices=torch.cat([rows, slots_of(8, 8)]),
        cache_steps=2, retrieve_parent_token=None, stable_rows=True,
    )  # fmt: skip
    written = ~machine.intermediates.isnan().flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [3, 6]
    assert padding_row == machine.intermediates.shape[0] - 1


def test_ragged_drafts_are_sglangs() -> None:
    start(**ALL)
    machine = Machine(draft=3)
    kernel = own(machine)
    packed, a, b = machine.tokens(5)
    q, k, v = split(packed)
    machine.dispatcher.target_verify(
        machine.A_log, machine.dt_bias, q[None], k[None], v[None], a, b, ssm_states=machine.states,
        cache_indices=slots_of(5, 2), query_start_loc=slots_of(0, 3, 5),
        intermediate_states_buffer=machine.intermediates, intermediate_state_indices=slots_of(0, 1), cache_steps=3,
        retrieve_parent_token=None,
    )  # fmt: skip
    assert kernel.calls == ["target_verify"]


def test_ragged_drafts_of_the_same_total_are_sglangs_too() -> None:
    one = start(**ALL)
    machine = Machine(draft=3)
    kernel = own(machine)
    packed, a, b = machine.tokens(6)
    machine.metadata([5, 2], [0, 2, 6])
    batch = machine.batch("TARGET_VERIFY", [2, 4])
    batch.spec_info.draft_token_num = 3  # of which two rows would have as many tokens
    batch.spec_info.ragged_verify_layout = object()
    assert machine.backend.forward_extend(machine.layer, batch, packed, a, b) == "verified"
    assert kernel.calls == ["target_verify"]
    reason = "verify requires rows of equal draft length"
    assert one.container.counters().total("fallbacks", phase="verify", reason=reason) == 1
