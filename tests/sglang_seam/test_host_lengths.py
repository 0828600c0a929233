"""Lengths on the host that are not those of the dispatcher's call are left out of it."""

from __future__ import annotations

import pytest
import torch
from seam_machine import Machine, close, split, start
from test_gdn_calls import ALL, oracle, raw, slots_of

from fakes import FakeGatedDeltaRule, fake_entry
from qwen35.container import build
from qwen35.ports.gated_delta_rule import ExtendCall

STRANGE = pytest.mark.parametrize(
    "lengths", [[7], [3, 2, 2], [5, 3]], ids=["fewer sequences", "more sequences", "more tokens"]
)


def extend(machine: Machine, lengths: list[int]) -> tuple[torch.Tensor, ExtendCall]:
    """What the backend returns for sequences of 5 and 2 tokens whose batch says ``lengths``, and the call it is."""
    states = machine.states.clone()
    packed, a, b = machine.tokens(7)
    machine.metadata([4, 1], [0, 5, 7])
    batch = machine.batch("EXTEND", [5, 2])
    batch.extend_seq_lens_cpu = lengths
    out = machine.backend.forward_extend(machine.layer, batch, packed, a, b)
    q, k, v = split(packed)
    return out, ExtendCall(q=q, k=k, v=v, gates=raw(machine, a, b), states=states, slots=slots_of(4, 1),
                           cu_seqlens=slots_of(0, 5, 7))  # fmt: skip


@STRANGE
def test_lengths_that_do_not_fit_are_not_passed_on(lengths: list[int]) -> None:
    fake, names = FakeGatedDeltaRule(0.0), dict.fromkeys(ALL, "fake")
    start(build(device="cpu", conv="reference", adapters=[fake_entry("fake", fake)], **names), **names)
    machine = Machine()
    extend(machine, lengths)
    extend(machine, [5, 2])
    assert [call.seq_lens_host for call in fake.calls] == [None, (5, 2)], "those that fit are"


@STRANGE
def test_an_extend_whose_lengths_do_not_fit_is_served_by_its_offsets(lengths: list[int]) -> None:
    one = start(**ALL)
    machine = Machine()
    out, call = extend(machine, lengths)
    close(out[0], oracle.extend(call).out)
    close(machine.states, call.states)
    assert one.container.counters().total("calls", adapter="reference", phase="extend") == 1
