"""FlashInfer's extend and verify over a fake that has its faults: arguments, branches, scratch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashinfer_bed import BF16, F32, GEOMETRY, HOPPER, HV, Bed, H, W
from qwen35.adapters.flashinfer.gated_delta_rule import FlashInferGatedDeltaRule
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.gated_delta_rule import (
    CheckpointPlan,
    DecodeCall,
    ExtendCall,
    LogGates,
    RawGates,
)


@pytest.mark.row("D31")
@pytest.mark.row("D16")
@pytest.mark.row("I02")
def test_extend_passes_every_argument_whose_default_it_could_not_rely_on() -> None:
    for later in (False, True):
        bed = Bed(BF16, later=later)
        bed.adapter.extend(bed.extend([3, 2], [1, 4]))
        seen = bed.fake.latest("prefill")
        assert seen["use_cp"] is False
        assert seen["use_qk_l2norm_in_kernel"] is False
        assert seen["scale"] == W**-0.5
        assert seen["backend"] == ("flashinfer" if later else None)


def test_the_split_is_chosen_by_the_documented_rule() -> None:
    """The one-pass kernel has a block for each sequence and each of 2 value heads, on 132 multiprocessors."""
    from qwen35.adapters.flashinfer.mends import split_prefill

    blackwell = replace(HOPPER, compute_capability=(10, 0))
    long = 2048
    cases = {
        (HOPPER, "auto", 2048, 1): True, (HOPPER, "auto", 1023, 1): False, (HOPPER, "auto", long, 3): False,
        (HOPPER, "auto", 32 * long, 32): True, (HOPPER, "auto", 33 * long, 33): False,
        (blackwell, "auto", 16 * long, 16): True, (blackwell, "auto", 17 * long, 17): False,
        (HOPPER, "on", 5, 2): True, (HOPPER, "off", 4096, 1): False,
    }  # fmt: skip
    for (platform, choice, tokens, sequences), want in cases.items():
        call = ExtendCall(
            q=torch.empty(tokens, H, W, device="meta"), k=torch.empty(0), v=torch.empty(tokens, HV, W, device="meta"),
            gates=LogGates(g=torch.empty(0), beta=torch.empty(0)), states=torch.empty(0),
            slots=torch.empty(sequences, dtype=torch.int32), cu_seqlens=torch.empty(0),
        )  # fmt: skip
        assert split_prefill(choice, platform, call) is want, (platform, choice, tokens, sequences)
        kept = replace(call, checkpoints=CheckpointPlan(every=64, starts=torch.empty(0), count=0))
        assert split_prefill("auto", platform, kept) is False


@pytest.mark.parametrize(("split", "branch"), [("on", "sequence split"), ("off", "one pass")])
def test_the_branch_taken_can_be_read(split: str, branch: str) -> None:
    bed = Bed(F32, split=split)
    bed.adapter.extend(bed.extend([3], [1]))
    assert bed.adapter.branches[Phase.EXTEND] == branch
    assert bed.fake.latest("prefill")["use_cp"] is (split == "on")
    if split == "on":
        starts = torch.tensor([0, 1], dtype=torch.int64)
        call = bed.extend([64], [1], checkpoints=CheckpointPlan(every=64, starts=starts, count=1))
        bed.fake.calls.clear()
        assert "one-pass" in bed.refusal(call)


@pytest.mark.case("C13")
def test_extend_scratch_keeps_its_addresses_from_call_to_call_and_q_and_k_apart() -> None:
    bed = Bed(F32)
    seen = []
    for lengths in ([3, 2], [7, 1], [1, 1]):
        bed.adapter.extend(bed.extend(lengths, [1, 4]))
        call = bed.fake.latest("prefill")
        seen.append([call[n].data_ptr() for n in ("q", "k", "g", "beta", "initial_state", "output_state")])
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) == len(seen[0])
    held = bed.adapter.scratch_bytes
    bed.adapter.extend(bed.extend([150, 150], [1, 4]))
    assert bed.adapter.scratch_bytes == held, "the plan's tokens fit from the first call on"


@pytest.mark.parametrize("state", [F32, BF16])
def test_an_extend_beyond_the_plan_leaves_decode_as_it_was_prepared(state: torch.dtype) -> None:
    """Its sequences are no rows of decode: what was measured for 4 rows of 64 heads still holds, and is not asked anew,
    which would wait for the device and is refused inside capture."""
    bed = Bed(state, null=0, prepared=False)
    geometry = replace(GEOMETRY, value_heads=64)
    bed.adapter.prepare(replace(bed.plan, geometry=geometry, max_batch=4))
    bed.fake.calls.clear()

    def tokens(*lead: int) -> dict[str, object]:
        gates = RawGates(a=bed.randn(*lead, 64), b=bed.randn(*lead, 64), A_log=torch.zeros(64), dt_bias=torch.zeros(64))
        q, k = bed.randn(*lead, H, W), bed.randn(*lead, H, W)
        return {"q": q, "k": k, "v": bed.randn(*lead, 64, W), "gates": gates}

    pool = bed.randn(22, 64, W, W, dtype=state)
    slots = torch.arange(1, 21, dtype=torch.int32)
    prompt = ExtendCall(**tokens(400), states=pool, slots=slots, cu_seqlens=20 * torch.arange(21, dtype=torch.int32))
    bed.adapter.extend(prompt)
    bed.adapter.decode(DecodeCall(**tokens(2), states=pool, slots=slots[:2]))
    assert [name for name, _ in bed.fake.calls] == ["prefill", "decode"]
    held = bed.adapter.scratch_bytes
    bed.adapter.extend(prompt)
    assert bed.adapter.scratch_bytes == held


@pytest.mark.parametrize("fit", [True, False], ids=["v dense", "v with gaps"])
def test_what_follows_a_sequence_in_its_last_block_is_read_as_zero_where_it_is_padding(fit: bool) -> None:
    """The second's first tokens lie in the block that ends the first: the kernel multiplies them by zero."""
    bed = Bed(F32)
    call = bed.extend([65, 31], [2, -1])
    if not fit:
        call = replace(call, v=torch.stack([call.v, call.v], dim=1)[:, 0])
    clean = replace(call, states=call.states.clone())
    want = bed.adapter.extend(clean).out
    for name in ("q", "k", "v"):
        getattr(call, name)[65:] = float("nan")
    for gate in (call.gates.a, call.gates.b):
        gate[65:] = float("nan")
    assert torch.equal(bed.adapter.extend(call).out, want), f"seed {bed.seed}"
    assert not want[65:].any()
    assert torch.equal(call.states, clean.states), f"seed {bed.seed}"


@pytest.mark.row("D21")
def test_the_checkpoints_of_a_padded_sequence_are_zero_though_it_has_no_neighbour() -> None:
    """Its tokens reach the kernel as they are then, which computes checkpoints of them."""
    bed = Bed(F32)
    starts = torch.tensor([0, 2], dtype=torch.int64)
    call = bed.extend([130], [-1], checkpoints=CheckpointPlan(every=64, starts=starts, count=2))
    result = bed.adapter.extend(call)
    assert result.checkpoints is not None
    assert bed.fake.latest("prefill")["state_checkpoints"].shape == result.checkpoints.shape
    assert not result.checkpoints.any(), f"seed {bed.seed}"
    assert not result.out.any(), f"seed {bed.seed}"


def test_a_chain_over_float32_writes_the_callers_rows_directly() -> None:
    bed = Bed(F32)
    call = bed.verify([2, -1])
    bed.adapter.verify(call)
    assert bed.fake.latest("mtp")["intermediate_states_buffer"].data_ptr() == (call.intermediates.data_ptr())
    assert "scatter_nodes" not in bed.rows.launches


@pytest.mark.parametrize("size", [5, 9])
def test_of_a_float32_pool_with_gaps_verify_is_given_two_slots_whatever_its_size(size: int) -> None:
    """The kernel is compiled for such a pool's shape, kept without it, and reads slots past the two all the same."""
    bed = Bed(F32)
    dense = bed.verify([size - 1, -1, 0], states=bed.randn(size, HV, W, W, dtype=F32))
    gaps = torch.full((size, HV * W * W + 16), float("nan"))
    pool = gaps[:, : HV * W * W].view(size, HV, W, W).copy_(dense.states)
    paged = replace(dense, states=pool, intermediates=dense.intermediates.clone())
    want, got = bed.adapter.verify(dense), bed.adapter.verify(paged)
    given = bed.fake.latest("mtp")["initial_state"]
    assert given.shape == (2, HV, W, W)
    assert (given.data_ptr(), given.stride()) == (pool.data_ptr(), pool.stride()), "a view: slots are where they were"
    assert torch.equal(want, got), f"seed {bed.seed}"
    live = [0, 2]
    assert torch.equal(dense.intermediates[live], paged.intermediates[live]), f"seed {bed.seed}"
    assert [arguments["initial_state"].shape[0] for _, arguments in bed.fake.calls] == [size, 2]


@pytest.mark.parametrize("reason", ["rows", "nodes", "bfloat16", "int64"])
@pytest.mark.row("D24")
@pytest.mark.row("D25")
def test_other_layouts_pass_through_scratch_at_one_address(reason: str) -> None:
    state = BF16 if reason == "bfloat16" else F32
    bed = Bed(state, null=0)
    changes: dict[str, object] = {}
    if reason == "rows":
        changes["rows"] = torch.tensor([1, 0], dtype=torch.int32)
    if reason == "int64":
        changes["rows"] = torch.tensor([1, 0])
    addresses = set()
    for _ in range(2):
        call = bed.verify([2, 3], nodes=4 if reason == "nodes" else 3, **changes)
        if reason == "int64":
            call = replace(call, slots=call.slots.long())
        before = call.states.clone()
        bed.adapter.verify(call)
        assert torch.equal(before, call.states), "verify leaves the pool alone"
        assert bool(torch.isfinite(call.intermediates[:, :3].float()).all()), reason
        if reason == "nodes":
            assert bool(torch.isnan(call.intermediates[:, 3]).all()), "the fourth node is nobody's"
        name = "mtp_bf16" if state == BF16 else "mtp"
        assert bed.fake.latest(name)["disable_state_update"] is True
        addresses.add(bed.fake.latest(name)["intermediate_states_buffer"].data_ptr())
    assert len(addresses) == 1


def test_a_float32_pool_past_2_to_the_31_elements_is_indexed_in_64_bits() -> None:
    from qwen35.adapters.flashinfer.mends import Behaviour, verify_mend

    bed = Bed(F32)
    kernel = Behaviour(skips_padding=True, finite_softplus=True)
    small = bed.verify([1])
    huge = replace(small, states=torch.empty(2**31 // (HV * W * W), HV, W, W, device="meta"))
    assert not verify_mend(small, bed.plan, kernel).wide
    mend = verify_mend(huge, bed.plan, kernel)
    assert mend.wide
    assert mend.index, "int32 slots are converted"
    bf16 = replace(huge, states=huge.states.to(BF16), intermediates=small.intermediates.to(BF16))
    assert not verify_mend(bf16, bed.plan, kernel).wide, "the bfloat16 kernel widens by itself"


def test_what_the_kernels_address_in_32_bits_is_refused_from_2_to_the_31_elements_on() -> None:
    from qwen35.adapters.flashinfer.mends import Behaviour, extend_reasons, verify_mend

    bed = Bed(F32)
    kernel = Behaviour(skips_padding=True, finite_softplus=True)
    state = HV * W * W
    for rows in (2**31 // (3 * state), 2**31 // (3 * state) + 1):
        nodes = torch.empty(rows, 3, HV, W, W, device="meta")
        chain = replace(bed.verify([1]), q=torch.empty(rows, 3, H, W, device="meta"), intermediates=nodes)
        refused = verify_mend(chain, bed.plan, kernel).refusal is not None
        assert refused == (rows * 3 * state >= 2**31), rows
    sequences = 2**31 // state
    prompt = replace(bed.extend([1], [1]), slots=torch.empty(sequences, dtype=torch.int32, device="meta"))
    assert list(extend_reasons(prompt, "auto")) == [f"extend requires S*HV*V*K below 2**31, got {2**31}"]
    assert not list(extend_reasons(replace(prompt, slots=prompt.slots[1:]), "auto"))
    planned = CheckpointPlan(every=64, starts=torch.empty(2, device="meta"), count=sequences)
    prompt = replace(bed.extend([1], [1]), checkpoints=planned)
    assert list(extend_reasons(prompt, "auto")) == [f"checkpoints require count*HV*V*K below 2**31, got {2**31}"]


# Views


@pytest.mark.row("D04")
def test_views_of_packed_projections_reach_the_kernel_as_they_are() -> None:
    bed = Bed(F32)
    geometry = (2, 16)  # sixteen value heads keep a and b of one projection aligned
    projection, ba = bed.randn(3, (2 * geometry[0] + geometry[1]) * W + 16), bed.randn(3, 2 * geometry[1])
    q, k, v = (x.unflatten(1, (-1, W)) for x in projection[:, :-16].split([256, 256, 2048], dim=1))
    gates = RawGates(a=ba[:, 16:], b=ba[:, :16], A_log=torch.zeros(16), dt_bias=torch.zeros(16))
    states, slots = bed.randn(4, 16, W, W, dtype=F32), torch.tensor([2, 0, -1], dtype=torch.int32)
    packed = DecodeCall(q=q, k=k, v=v, gates=gates, states=states.clone(), slots=slots)
    dense = replace(
        packed, q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), states=states.clone(),
        gates=replace(gates, a=gates.a.contiguous(), b=gates.b.contiguous()),
    )  # fmt: skip
    assert torch.equal(bed.adapter.decode(packed), bed.adapter.decode(dense)), f"seed {bed.seed}"
    assert torch.equal(packed.states, dense.states)
    seen = [arguments for name, arguments in bed.fake.calls if name == "decode"][-2]
    assert seen["q"].data_ptr() == q.data_ptr(), "nothing was copied"


def test_extend_takes_packed_misaligned_and_strided_tensors() -> None:
    bed = Bed(F32)
    want = bed.extend([3, 2], [1, 4])
    shifted = {name: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for name, x in
               (("q", want.q), ("k", want.k), ("v", want.v))}  # fmt: skip
    out = torch.full((5, HV, W + 8), float("nan"), dtype=BF16)[..., :W]
    got = bed.adapter.extend(replace(want, states=want.states.clone(), out=out, **shifted))
    assert got.out is out
    assert torch.equal(out, bed.adapter.extend(want).out), f"seed {bed.seed}"


# Behaviour


@pytest.mark.row("I01")
def test_what_the_kernels_do_is_measured_by_prepare() -> None:
    seen = Bed(BF16, null=0).adapter.behaviours
    assert not seen["decode, bfloat16"].skips_padding
    assert not seen["decode, bfloat16"].finite_softplus
    assert not seen["verify, bfloat16"].skips_padding
    seen = Bed(F32).adapter.behaviours
    assert seen["decode, float32"].skips_padding
    assert seen["decode, float32"].finite_softplus
    assert seen["verify, float32"].skips_padding
    assert not seen["verify, float32"].finite_softplus


@pytest.mark.row("I01")
def test_a_release_whose_verify_writes_the_pool_is_refused() -> None:
    bed = Bed(F32, prepared=False)

    def writes(**arguments: object) -> None:
        arguments["initial_state"].zero_()

    adapter = FlashInferGatedDeltaRule(bed.fake.kernels(mtp=writes), bed.rows, HOPPER, AdapterOptions())
    with pytest.raises(UnsupportedError, match="writes the state pool"):
        adapter.prepare(bed.plan)


def test_the_first_call_prepares_itself_and_a_larger_one_plans_again() -> None:
    bed = Bed(F32, prepared=False)
    bed.adapter.decode(bed.decode([1]))
    assert "decode, float32" in bed.adapter.behaviours
    bed.adapter.decode(bed.decode([0, 1, 2, 3, 4]))
    bed.adapter.verify(bed.verify([1, 2]))
    assert "verify, float32" in bed.adapter.behaviours
