"""FlashInfer's own kernels on a GPU: what the adapter relies on and what it mends. Compact: a minute with compilation.

Heads are 8/2 wherever nothing else is needed, so that every kernel is compiled once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import CaptureError, UnsupportedError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.gated_delta_rule import (
    CheckpointPlan,
    CommitCall,
    DecodeCall,
    ExtendCall,
    GdnPlan,
    RawGates,
    VerifyCall,
)
from qwen35.services.platform import detect_platform

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BF16, F32 = torch.bfloat16, torch.float32
H, HV, W = 2, 8, 128
NULL = 1


class Bench:
    """Adapters over the real kernels, seeded calls, and the float64 oracle."""

    def __init__(self) -> None:
        from qwen35.adapters.flashinfer.entries import create, probe

        self.platform = detect_platform("cuda")
        support = probe(self.platform)
        if not support:
            pytest.skip("; ".join(support.reasons))
        self.device = torch.device(self.platform.device)
        self._create, self.made = create, []
        self.oracle = ReferenceGatedDeltaRule(torch.float64, "cuda")
        self.reseed(random.randrange(2**31))

    def reseed(self, seed: int) -> None:
        self.seed = seed
        self.source = torch.Generator(device=self.device).manual_seed(seed)

    def adapter(self, state: torch.dtype = F32, *, null: int | None = NULL, pad: bool = True, split: str = "auto"):
        adapter = self._create(self.platform, AdapterOptions(prefill_split=split))
        self.made.append(adapter)
        adapter.prepare(
            GdnPlan(
                geometry=GdnGeometry(key_heads=H, value_heads=HV, key_width=W, value_width=W), state_dtype=state,
                device=self.device, max_batch=8, max_tokens=2200, max_draft=3, null_slot=null, may_pad=pad,
            )
        )  # fmt: skip
        return adapter

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=self.source, device=self.device).to(dtype)

    def ints(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def pool(self, state: torch.dtype, slots: int = 6, gap: int = 0) -> Tensor:
        """Slots ``gap`` elements apart, NaN between."""
        size = HV * W * W
        base = torch.full((slots, size + gap), float("nan"), dtype=state, device=self.device)
        base[:, :size] = self.randn(slots, size, dtype=state)
        return base[:, :size].unflatten(1, (HV, W, W))

    def tokens(self, *leading: int) -> dict[str, object]:
        return {
            "q": 3 * self.randn(*leading, H, W), "k": self.randn(*leading, H, W), "v": self.randn(*leading, HV, W),
            "gates": RawGates(
                a=self.randn(*leading, HV), b=self.randn(*leading, HV), A_log=self.randn(HV, dtype=F32),
                dt_bias=self.randn(HV),
            ),
        }  # fmt: skip

    def true_decode(self, call: DecodeCall) -> tuple[Tensor, Tensor]:
        states = call.states.double()
        out = self.oracle.decode(replace(wide(call), states=states, out=None))
        return out, states


def wide(call):
    """The call in float64, gates included."""
    gates = RawGates(**{n: getattr(call.gates, n).double() for n in ("a", "b", "A_log", "dt_bias")})
    return replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double(), gates=gates)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def within(bench: Bench, adapter, phase: Phase, state: torch.dtype, *pairs: tuple[str, Tensor, Tensor]) -> None:
    name = str(state).removeprefix("torch.")
    bound = adapter.capabilities.precision[phase].bound("bfloat16", name)
    for what, got, want in pairs:
        limit = bound.output if what == "out" else bound.state
        off = error(got, want)
        assert off <= limit, f"{phase} {name} {what}: error {off:.2e} above {limit:.2e}, seed {bench.seed}"


def untouched(before: Tensor, after: Tensor, slots: set[int], what: str) -> None:
    for slot in slots:
        assert torch.equal(before[slot], after[slot]), f"{what}: slot {slot} changed"


@pytest.fixture(scope="module")
def shared() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for adapter in bench.made:
        adapter.close()


@pytest.fixture
def bench(shared: Bench) -> Bench:
    shared.reseed(random.randrange(2**31))
    return shared


@pytest.mark.row("I01")
def test_what_prepare_measures_is_printed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    from qwen35.adapters.flashinfer.release import report

    for state in (F32, BF16):
        adapter = bench.adapter(state)
        with capsys.disabled():
            print(f"\n{dict(report().found)} {state}: {dict(adapter.behaviours)}")  # noqa: T201
        assert adapter.behaviours["decode, float32"].skips_padding if state is F32 else True


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
    call = ExtendCall(
        **bench.tokens(2100), states=bench.pool(F32), slots=bench.ints(4), cu_seqlens=bench.ints(0, 2100)
    )
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


@pytest.mark.parametrize("state", [F32, BF16])
def test_one_padded_decode_over_4000_slots_adds_less_than_two_slots_of_memory(bench: Bench, state: torch.dtype) -> None:
    adapter = bench.adapter(state)
    pool = torch.zeros(4000, HV, W, W, dtype=state, device=bench.device)
    call = DecodeCall(**bench.tokens(4), states=pool, slots=bench.ints(7, -1, 3999, -1))
    adapter.decode(call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    adapter.decode(call)
    torch.cuda.synchronize()
    added = torch.cuda.max_memory_allocated() - held
    slot = pool[0].numel() * pool.element_size()
    assert added < 2 * slot, f"{added} bytes, a slot is {slot}"
