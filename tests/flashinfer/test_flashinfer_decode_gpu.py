"""FlashInfer's decode on a GPU: what the adapter relies on and what it mends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashinfer_gpu_bed import BF16, F32, HV, NULL, Bench, H, W, untouched, within
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import UnsupportedError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import DecodeCall, GdnPlan, VerifyCall

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.row("I01")
@pytest.mark.parametrize("state", [F32, BF16])
def test_what_prepare_measures_is_printed(bench: Bench, capsys: pytest.CaptureFixture[str], state: torch.dtype) -> None:
    """Of padding, what every release showed that was measured: a bfloat16 pool lends slot 0, and no other, to it."""
    from qwen35.adapters.flashinfer.release import report

    seen = bench.adapter(state).behaviours
    with capsys.disabled():
        print(f"\n{dict(report().found)} {state}: {dict(seen)}")  # noqa: T201
    decode = seen[f"decode, {str(state).removeprefix('torch.')}"]
    assert decode.borrows_first_slot
    assert decode.skips_padding is (state is F32)


@pytest.mark.row("D13")
@pytest.mark.row("D14")
@pytest.mark.case("C1")
@pytest.mark.case("C2")
@pytest.mark.case("C3")
@pytest.mark.case("C26")
@pytest.mark.parametrize("gap", [0, 64], ids=["contiguous", "paged"])
@pytest.mark.parametrize("state", [F32, BF16])
def test_decode_matches_the_oracle_and_padding_touches_no_slot(bench: Bench, state: torch.dtype, gap: int) -> None:
    adapter = bench.adapter(state)
    for slots, dtype in (([2, -1, 5], torch.int32), ([0, 4], torch.int64), ([-1, -1], torch.int32), ([3], torch.int32)):
        out = torch.full((len(slots), HV, W), float("nan"), dtype=BF16, device=bench.device)
        call = DecodeCall(
            **bench.tokens(len(slots)), states=bench.pool(state, gap=gap), slots=bench.ints(*slots, dtype=dtype),
            out=out,
        )  # fmt: skip
        before, (want, states) = call.states.clone(), bench.true_decode(call)
        assert adapter.decode(call) is out
        live = [s for s in slots if s >= 0]
        untouched(before, call.states, set(range(6)) - set(live) - {NULL}, f"decode {slots}, seed {bench.seed}")
        padded = bench.ints(*slots) < 0
        assert bool((out[padded] == 0).all()), f"padded rows are zero, seed {bench.seed}"
        if live:
            within(
                bench, adapter, Phase.DECODE, state, ("out", out[~padded], want[~padded]),
                ("state", call.states[live], states[live]),
            )  # fmt: skip


@pytest.mark.row("D14")
@pytest.mark.case("C3")
@pytest.mark.parametrize("null", [0, NULL])
@pytest.mark.parametrize("rows", [3, 128], ids=["few rows", "many rows"])
def test_padded_bfloat16_decodes_one_after_another_keep_every_slot_but_the_null_slot(
    bench: Bench, rows: int, null: int
) -> None:
    """The first has its launches looked up, the others go by what was kept."""
    adapter = bench.adapter(BF16, null=null)
    slots = [-1 if i % 3 == 1 else i + 2 for i in range(rows)]
    live, padded = [s for s in slots if s >= 0], bench.ints(*slots) < 0
    for turn in range(3):
        call = DecodeCall(**bench.tokens(rows), states=bench.pool(BF16, rows + 2), slots=bench.ints(*slots))
        before, (want, states) = call.states.clone(), bench.true_decode(call)
        out = adapter.decode(call)
        what = f"call {turn}, seed {bench.seed}"
        untouched(before, call.states, set(range(rows + 2)) - set(live) - {null}, what)
        assert bool((out[padded] == 0).all()), what
        within(
            bench, adapter, Phase.DECODE, BF16, ("out", out[~padded], want[~padded]),
            ("state", call.states[live], states[live]),
        )  # fmt: skip


@pytest.mark.case("C3")
def test_bfloat16_without_a_null_slot_is_refused_or_never_pads(bench: Bench) -> None:
    call = DecodeCall(**bench.tokens(2), states=bench.pool(BF16), slots=bench.ints(0, 3))
    with pytest.raises(UnsupportedError, match="null slot"):
        bench.adapter(BF16, null=None).decode(call)
    adapter = bench.adapter(BF16, null=None, pad=False)
    want, states = bench.true_decode(call)
    out = adapter.decode(call)
    within(bench, adapter, Phase.DECODE, BF16, ("out", out, want), ("state", call.states[[0, 3]], states[[0, 3]]))


@pytest.mark.parametrize("state", [F32, BF16])
def test_write_slots_write_there_and_minus_one_writes_nowhere(bench: Bench, state: torch.dtype) -> None:
    adapter = bench.adapter(state)
    call = DecodeCall(
        **bench.tokens(3), states=bench.pool(state), slots=bench.ints(2, 3, -1), write_slots=bench.ints(-1, 5, 4)
    )
    before, (want, states) = call.states.clone(), bench.true_decode(call)
    out = adapter.decode(call)
    untouched(before, call.states, {0, 2, 3, 4}, f"write slots, seed {bench.seed}")
    within(bench, adapter, Phase.DECODE, state, ("out", out[:2], want[:2]), ("state", call.states[5], states[5]))


@pytest.mark.parametrize("state", [F32, BF16])
def test_large_gate_inputs_stay_finite(bench: Bench, state: torch.dtype) -> None:
    adapter = bench.adapter(state)
    call = DecodeCall(**bench.tokens(2), states=bench.pool(state), slots=bench.ints(2, 3))
    call.gates.a[:, ::2] = 1000.0
    call.gates.A_log.fill_(0.0)
    want, states = bench.true_decode(call)
    out = adapter.decode(call)
    within(bench, adapter, Phase.DECODE, state, ("out", out, want), ("state", call.states[[2, 3]], states[[2, 3]]))
    verify = VerifyCall(
        **bench.tokens(2, 3), states=bench.pool(state), slots=bench.ints(2, 3),
        intermediates=torch.empty(2, 3, HV, W, W, dtype=state, device=bench.device),
    )  # fmt: skip
    verify.gates.a.fill_(1000.0)
    assert bool(torch.isfinite(adapter.verify(verify)).all()), "verify of a large gate input"
    assert bool(torch.isfinite(verify.intermediates.float()).all()), "nodes of a large gate input"


@pytest.mark.case("C5")
@pytest.mark.case("C8")
def test_slots_past_2_to_the_31_elements_and_2048_rows_of_32_heads(bench: Bench) -> None:
    adapter = bench.adapter(F32)
    pitch, slots = 540_672, 16_400
    base = torch.zeros(slots * pitch, dtype=F32, device=bench.device)
    pool = base.as_strided((slots, HV, W, W), (pitch, W * W, W, 1))
    far = [3_972, slots - 1]
    pool[far] = bench.randn(2, HV, W, W, dtype=F32)
    call = DecodeCall(**bench.tokens(2), states=pool, slots=bench.ints(*far))
    small = replace(call, states=pool[far].clone(), slots=bench.ints(0, 1))
    assert torch.equal(adapter.decode(call), adapter.decode(small)), f"far slots read as near ones, seed {bench.seed}"
    assert torch.equal(pool[far], small.states), "far slots written as near ones"
    contiguous = base[: 20_000 * HV * W * W].view(-1, HV, W, W)
    chain = VerifyCall(
        **bench.tokens(2, 3), states=contiguous, slots=bench.ints(0, contiguous.shape[0] - 1),
        intermediates=torch.empty(2, 3, HV, W, W, dtype=F32, device=bench.device),
    )  # fmt: skip
    contiguous[-1] = pool[far[0]]
    near = replace(
        chain, states=contiguous[[0, -1]].clone(), slots=bench.ints(0, 1),
        intermediates=torch.empty_like(chain.intermediates),
    )  # fmt: skip
    assert torch.equal(adapter.verify(chain), adapter.verify(near)), f"verify of a far slot, seed {bench.seed}"
    assert torch.equal(chain.intermediates, near.intermediates), "nodes of a far slot"
    del base, pool, contiguous
    rows = 2048 * 4
    many = DecodeCall(
        **bench.tokens(rows), states=torch.zeros(8, HV, W, W, device=bench.device),
        slots=torch.full((rows,), -1, dtype=torch.int32, device=bench.device),
    )  # fmt: skip
    assert bool((adapter.decode(many) == 0).all()), "65,536 value heads in one launch"


@pytest.mark.case("C14")
@pytest.mark.parametrize("state", [F32, BF16])
def test_a_captured_padded_decode_replays_on_new_values(bench: Bench, state: torch.dtype) -> None:
    adapter = bench.adapter(state)
    call = DecodeCall(**bench.tokens(3), states=bench.pool(state), slots=bench.ints(2, -1, 5))
    start = call.states.clone()
    adapter.decode(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = adapter.decode(call)
    for _ in range(2):
        call.states.copy_(start)
        call.v.copy_(bench.randn(*call.v.shape))
        call.slots.copy_(bench.ints(-1, 3, 0))
        call.gates.dt_bias.copy_(bench.randn(HV))
        assert adapter.refresh_parameters() >= 1
        want, states = bench.true_decode(call)
        graph.replay()
        torch.cuda.synchronize()
        untouched(start, call.states, {2, 4, 5}, f"replay, seed {bench.seed}")
        assert bool((out[0] == 0).all()), "the row that pads now"
        within(
            bench, adapter, Phase.DECODE, state, ("out", out[1:], want[1:]),
            ("state", call.states[[3, 0]], states[[3, 0]]),
        )  # fmt: skip
    del graph


@pytest.mark.row("D03")
@pytest.mark.case("C14")
def test_a_padded_decode_that_was_captured_before_a_larger_plan_replays_in_memory_of_its_own(bench: Bench) -> None:
    """Its replays fill index scratch anew: had that been freed, they would write whatever lies there now."""
    adapter = bench.adapter(BF16)
    call = DecodeCall(**bench.tokens(3), states=bench.pool(BF16), slots=bench.ints(2, -1, 5))
    start, stream, graph = call.states.clone(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        adapter.decode(call)  # finds the scratch of this stream, and remembers it
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = adapter.decode(call)
    assert "null slot" in adapter.branches[Phase.DECODE], "index scratch is used"
    assert "gates clamped" in adapter.branches[Phase.DECODE] or adapter.behaviours["decode, bfloat16"].finite_softplus
    adapter.prepare(
        GdnPlan(
            geometry=GdnGeometry(key_heads=H, value_heads=HV, key_width=W, value_width=W), state_dtype=BF16,
            device=bench.device, max_batch=2048, max_tokens=2200, max_draft=3, null_slot=NULL,
        )
    )  # fmt: skip
    poison: list[torch.Tensor] = []
    for user in (stream, torch.cuda.current_stream()):
        with torch.cuda.stream(user):
            for size in (64, 128, 256, 512):  # as scratch of the first plan, in blocks that an allocator rounds up to
                poison += [torch.full((size,), 2**30, dtype=torch.int32, device=bench.device) for _ in range(4096)]
    call.states.copy_(start)
    call.slots.copy_(bench.ints(-1, 3, 0))
    call.v.copy_(bench.randn(*call.v.shape))
    want, states = bench.true_decode(call)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((torch.stack(poison[i : i + 4096]) == 2**30).all()) for i in range(0, len(poison), 4096)), (
        "a replay wrote memory that is another's"
    )
    untouched(start, call.states, {2, 4, 5}, f"replay, seed {bench.seed}")
    assert bool((out[0] == 0).all())
    within(
        bench, adapter, Phase.DECODE, BF16, ("out", out[1:], want[1:]), ("state", call.states[[3, 0]], states[[3, 0]])
    )
    del graph
