"""Multi-item scoring is SGLang's own: its segments are other rows than those whose raw gates the seam keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from seam_machine import HV, Machine, V, close, plain_gating, split, start
from test_gdn_calls import ALL, ChunkKernel, extend_two, own, slots_of
from torch import Tensor

from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.ports.gated_delta_rule import ExtendCall, LogGates

oracle = ReferenceGatedDeltaRule(torch.float64)

QUERY, ITEMS = 4, (4, 3, 1)  # tokens of the one request
SLOT, TOTAL = 5, QUERY + sum(ITEMS)


class ScoringKernel(ChunkKernel):
    """As SGLang's: where ``inplace_update`` is False, sequences may share a slot, and the pool is left as it was."""

    def extend(self, *tensors: Tensor, ssm_states: Tensor, cache_indices: Tensor, inplace_update: bool = True,
               **named: Any) -> Any:  # fmt: skip
        if not inplace_update:
            ssm_states = ssm_states[cache_indices]
            cache_indices = torch.arange(cache_indices.shape[0])
        return super().extend(*tensors, ssm_states=ssm_states, cache_indices=cache_indices, **named)


def score(machine: Machine, packed: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """SGLang's own path: the query's state, from which each item of the request begins."""
    from sglang.srt.layers.attention.linear.gdn_backend import build_gdn_mis_metadata

    delimiters = torch.tensor([QUERY, *ITEMS]).cumsum(0)[:-1]
    batch = machine.batch("EXTEND", [TOTAL])
    asked = SimpleNamespace(
        is_prefill_only=True, extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[TOTAL], input_ids=torch.zeros(TOTAL),
        multi_item_delimiter_indices=[delimiters],
    )  # fmt: skip
    machine.metadata([SLOT], [0, TOTAL])
    machine.backend.mis_metadata = build_gdn_mis_metadata(asked)
    out: Tensor = machine.backend.forward_extend(machine.layer, batch, packed, a, b)
    return out


def segment(machine: Machine, rows: slice, states: Tensor, packed: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The rows of one segment after ``states``, which they move, by SGLang's rounded gates."""
    q, k, v = split(packed[rows])
    g, beta = plain_gating(machine.A_log, a[rows], b[rows], machine.dt_bias)
    call = ExtendCall(q=q, k=k, v=v, gates=LogGates(g=g[0], beta=beta[0]), states=states, slots=slots_of(0),
                      cu_seqlens=slots_of(0, rows.stop - rows.start))  # fmt: skip
    return oracle.extend(call).out


def test_query_and_items_are_sglangs_with_the_reason() -> None:
    one = start(**ALL)
    machine = Machine(dtype=torch.bfloat16)
    kernel = ScoringKernel()
    for name in ("decode_kernel", "extend_kernel", "verify_kernel", "tree_verify_kernel"):
        getattr(machine.dispatcher, name).original = kernel
    packed, a, b = machine.tokens(TOTAL)
    out = score(machine, packed, a, b)
    assert kernel.calls == ["extend", "extend"]
    counters = one.container.counters()
    assert counters.total("calls", adapter="reference") == 0
    reason = "extend requires a batch without multi-item scoring"
    assert counters.total("fallbacks", phase="extend", instead_of="reference", reason=reason) == 2
    assert counters.total("fallbacks") == 2
    query = torch.zeros(1, *machine.states.shape[1:])
    expected = [segment(machine, slice(0, QUERY), query, packed, a, b)]
    at = QUERY
    for length in ITEMS:
        expected.append(segment(machine, slice(at, at + length), query.clone(), packed, a, b))
        at += length
    assert out.shape == (1, TOTAL, HV, V)
    close(out[0], torch.cat(expected), 2.0**-8)
    close(machine.states[SLOT], query[0], 1e-6)  # moved by the rounded gates of these rows, and by no other


def test_the_batch_after_it_is_ours_again() -> None:
    one = start(**ALL)
    machine = Machine(dtype=torch.bfloat16)
    own(machine)
    score(machine, *machine.tokens(TOTAL))
    machine.backend.mis_metadata = None
    out, call = extend_two(machine)
    close(out[0], oracle.extend(call).out, 2.0**-8)
    assert one.container.counters().total("calls", adapter="reference", phase="extend") == 1
