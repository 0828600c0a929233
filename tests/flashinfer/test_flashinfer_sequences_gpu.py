"""FlashInfer's prefill and verify on a GPU: what the adapter relies on and what it mends."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from flashinfer_gpu_bed import BF16, F32, HV, Bench, W, error, untouched, wide, within
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import CaptureError
from qwen35.ports.gated_delta_rule import CheckpointPlan, CommitCall, DecodeCall, ExtendCall, VerifyCall

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.row("D16")
@pytest.mark.row("D18")
@pytest.mark.row("D20")
@pytest.mark.row("D31")
@pytest.mark.case("C4")
@pytest.mark.case("C7")
@pytest.mark.case("C23")
@pytest.mark.parametrize("split", ["on", "off"])
@pytest.mark.parametrize("state", [F32, BF16])
def test_extend_matches_the_oracle_with_empty_padded_and_fresh_sequences(
    bench: Bench, state: torch.dtype, split: str
) -> None:
    adapter = bench.adapter(state, split=split)
    lengths, slots, fresh = [0, 65, 0, 31, 1, 130], [0, 5, -1, -1, 3, 2], [False, False, True, False, True, False]
    offsets = [0, *itertools.accumulate(lengths)]
    call = ExtendCall(
        **bench.tokens(offsets[-1]), states=bench.pool(state, gap=64), slots=bench.ints(*slots),
        cu_seqlens=bench.ints(*offsets), fresh=torch.tensor(fresh, device=bench.device),
    )  # fmt: skip
    call.states[3] = float("nan")
    for name in ("q", "k", "v"):
        getattr(call, name)[65:96] = float("nan")
    before, states = call.states.clone(), call.states.double()
    want = bench.oracle.extend(replace(wide(call), states=states)).out
    out = adapter.extend(call).out
    untouched(before, call.states, {0, 1, 4}, f"extend, split {split}, seed {bench.seed}")
    assert bool((out[65:96] == 0).all()), "tokens of a padded sequence are zero"
    for s in (1, 4, 5):
        part = slice(offsets[s], offsets[s + 1])
        within(
            bench, adapter, Phase.EXTEND, state, ("out", out[part], want[part]),
            ("state", call.states[slots[s]], states[slots[s]]),
        )  # fmt: skip
    assert adapter.branches[Phase.EXTEND] == ("sequence split" if split == "on" else "one pass")


@pytest.mark.row("D21")
def test_checkpoints_are_the_states_on_the_way(bench: Bench) -> None:
    adapter = bench.adapter(BF16)
    lengths = [130, 63, 64]
    offsets = [0, *itertools.accumulate(lengths)]
    planned = CheckpointPlan(every=64, starts=bench.ints(0, 2, 2, 3, dtype=torch.int64), count=3)
    call = ExtendCall(
        **bench.tokens(offsets[-1]), states=bench.pool(BF16), slots=bench.ints(5, 0, 2),
        cu_seqlens=bench.ints(*offsets), checkpoints=planned,
    )  # fmt: skip
    want = bench.oracle.extend(replace(wide(call), states=call.states.double())).checkpoints
    got = adapter.extend(call).checkpoints
    assert got.dtype == BF16
    for i in range(3):
        within(bench, adapter, Phase.EXTEND, BF16, (f"checkpoint {i}", got[i], want[i]))


@pytest.mark.case("C24")
def test_one_long_sequence_is_split_by_itself_and_equals_one_pass(bench: Bench) -> None:
    auto, off = bench.adapter(F32), bench.adapter(F32, split="off")
    call = ExtendCall(**bench.tokens(2100), states=bench.pool(F32), slots=bench.ints(4), cu_seqlens=bench.ints(0, 2100))
    other = replace(call, states=call.states.clone())
    split, whole = auto.extend(call).out, off.extend(other).out
    assert auto.branches[Phase.EXTEND] == "sequence split"
    assert off.branches[Phase.EXTEND] == "one pass"
    # Each is within the stated bound of the truth, so they are within two of each other.
    bound = auto.capabilities.precision[Phase.EXTEND].bound("bfloat16", "float32")
    assert error(split, whole) <= 2 * bound.output, f"outputs, seed {bench.seed}"
    assert error(call.states[4], other.states[4]) <= 2 * bound.state, f"states, seed {bench.seed}"


@pytest.mark.row("D23")
@pytest.mark.row("D25")
@pytest.mark.case("C27")
@pytest.mark.parametrize("layout", ["direct", "rows", "longer", "paged"])
@pytest.mark.parametrize("state", [F32, BF16])
def test_verify_matches_the_oracle_and_leaves_the_pool_alone(bench: Bench, state: torch.dtype, layout: str) -> None:
    adapter = bench.adapter(state)
    slots, nodes = [5, -1, 0], 4 if layout == "longer" else 3
    out = torch.full((3, 3, HV, W), float("nan"), dtype=BF16, device=bench.device)
    call = VerifyCall(
        **bench.tokens(3, 3), states=bench.pool(state, gap=64 if layout == "paged" else 0), slots=bench.ints(*slots),
        intermediates=torch.full((4, nodes, HV, W, W), float("nan"), dtype=state, device=bench.device),
        rows=bench.ints(3, 3, 1) if layout == "rows" else None, out=out,
    )  # fmt: skip
    before = call.states.clone()
    want = torch.full(call.intermediates.shape, float("nan"), dtype=torch.float64, device=bench.device)
    truth = bench.oracle.verify(replace(wide(call), states=call.states.double(), intermediates=want, out=None))
    adapter.verify(call)
    assert torch.equal(before, call.states), f"the pool is as before, seed {bench.seed}"
    assert bool((out[1] == 0).all()), "a padded row is zero whatever out held"
    rows = [3, 1] if layout == "rows" else [0, 2]
    within(
        bench, adapter, Phase.VERIFY, state, ("out", out[[0, 2]], truth[[0, 2]]),
        ("nodes", call.intermediates[rows, :3], want[rows, :3]),
    )  # fmt: skip
    others = [r for r in range(4) if r not in rows]
    assert bool(torch.isnan(call.intermediates[others]).all()), "rows of nobody are as before"
    adapter.commit(
        CommitCall(states=call.states, slots=call.slots, intermediates=call.intermediates, rows=call.rows,
                   last=bench.ints(1, 2, -1))
    )  # fmt: skip
    assert torch.equal(call.states[5], call.intermediates[rows[0], 1])
    untouched(before, call.states, {0, 1, 2, 3, 4}, f"commit, seed {bench.seed}")


def test_a_chain_of_one_token_is_a_decode(bench: Bench) -> None:
    adapter = bench.adapter(F32)
    chain = VerifyCall(
        **bench.tokens(2, 1), states=bench.pool(F32), slots=bench.ints(4, -1),
        intermediates=torch.full((2, 1, HV, W, W), float("nan"), device=bench.device),
    )  # fmt: skip
    out = adapter.verify(chain)
    gates = chain.gates
    step = DecodeCall(
        q=chain.q[:, 0], k=chain.k[:, 0], v=chain.v[:, 0], gates=replace(gates, a=gates.a[:, 0], b=gates.b[:, 0]),
        states=chain.states, slots=chain.slots,
    )  # fmt: skip
    want, states = bench.true_decode(step)
    within(
        bench, adapter, Phase.VERIFY, F32, ("out", out[0, 0], want[0]), ("node", chain.intermediates[0, 0], states[4])
    )
    assert bool(torch.isnan(chain.intermediates[1]).all()), "a padded row writes no node"


def test_a_paged_float32_pool_of_another_size_is_verified_by_the_same_kernel(bench: Bench) -> None:
    adapter = bench.adapter(F32)
    for slots in (5, 9):
        call = VerifyCall(
            **bench.tokens(2, 3), states=bench.pool(F32, slots, gap=64), slots=bench.ints(slots - 1, 0),
            intermediates=torch.empty(2, 3, HV, W, W, dtype=F32, device=bench.device),
        )  # fmt: skip
        dense = replace(call, states=call.states.contiguous(), intermediates=torch.empty_like(call.intermediates))
        assert torch.equal(adapter.verify(call), adapter.verify(dense)), f"{slots} slots, seed {bench.seed}"


def test_capture_refuses_what_would_move_scratch(bench: Bench) -> None:
    adapter = bench.adapter(F32)
    chain = VerifyCall(
        **bench.tokens(2, 3), states=bench.pool(F32), slots=bench.ints(2, 3), rows=bench.ints(1, 0),
        intermediates=torch.empty(2, 3, HV, W, W, dtype=F32, device=bench.device),
    )  # fmt: skip
    prompt = ExtendCall(**bench.tokens(5), states=bench.pool(F32), slots=bench.ints(4), cu_seqlens=bench.ints(0, 5))
    refused = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for serve, call in ((adapter.verify, chain), (adapter.extend, prompt)):
            try:
                serve(call)
            except CaptureError as exc:
                refused.append(str(exc))
        torch.zeros(1, device=bench.device).add_(1)
    assert len(refused) == 2, refused
    del graph
