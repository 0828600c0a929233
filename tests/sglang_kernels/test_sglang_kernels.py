"""SGLang's kernels as an adapter, over a fake that has their faults, and the installed signatures."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fake_sglang import FakeSGLang
from qwen35.adapters.sglang.driven_kernels import report
from qwen35.adapters.sglang.entries import probe
from qwen35.adapters.sglang.gated_delta_rule import SGLangGatedDeltaRule
from qwen35.domain.capabilities import Clause, GateKind, Phase
from qwen35.domain.errors import UnsupportedError
from qwen35.domain.geometry import GdnGeometry
from qwen35.domain.platform import Platform
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, GdnPlan, LogGates, RawGates, VerifyCall
from qwen35.testing.conformance import LawStatus, iter_laws
from qwen35.testing.limits import Profile, limits_for
from torch_rows import TorchRows

CPU = Platform(device="cpu", device_name="CPU")
HOPPER = Platform(device="cuda:0", device_name="H200", compute_capability=(9, 0), multiprocessors=132)
H, HV, W = 1, 2, 128
PLAN = GdnPlan(
    geometry=GdnGeometry(key_heads=H, value_heads=HV, key_width=W, value_width=W), state_dtype=torch.float32,
    device=torch.device("cpu"), max_batch=3, max_tokens=8, max_draft=2,
)  # fmt: skip
installed = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")


class Counted(torch.Tensor):
    """Counts how often values of a tensor, or of one made from it, are read on the host."""

    reads = 0

    def tolist(self) -> list[object]:
        Counted.reads += 1
        return super().tolist()


class Bed:
    """An adapter over the fake, with seeded calls to hand it."""

    def __init__(self) -> None:
        self.seed = random.randrange(2**31)
        self.source = torch.Generator().manual_seed(self.seed)
        self.fake, self.rows = FakeSGLang(), TorchRows()
        self.adapter = SGLangGatedDeltaRule(self.fake.kernels(), self.rows, CPU)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=self.source).to(dtype)

    def tokens(self, *leading: int) -> dict[str, object]:
        projection = self.randn(*leading, (2 * H + HV) * W)
        q, k, v = projection.split([H * W, H * W, HV * W], dim=-1)
        return {
            "q": q.unflatten(-1, (H, W)), "k": k.unflatten(-1, (H, W)), "v": v.unflatten(-1, (HV, W)),
            "gates": RawGates(
                a=self.randn(*leading, HV), b=self.randn(*leading, HV), A_log=torch.zeros(HV),
                dt_bias=self.randn(HV),
            ),
            "states": self.randn(6, HV, W, W, dtype=torch.float32),
        }  # fmt: skip

    def refusal(self, call: DecodeCall | VerifyCall) -> str:
        serve = self.adapter.decode if isinstance(call, DecodeCall) else self.adapter.verify
        with pytest.raises(UnsupportedError) as refused:
            serve(call)
        assert not self.fake.calls
        return "; ".join(refused.value.reasons)


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_one_projection_is_decoded_without_a_copy_and_others_are_packed() -> None:
    bed = Bed()
    call = DecodeCall(**bed.tokens(3), slots=slots(2, -1, 0))
    apart = replace(call, k=call.k.clone(), states=call.states.clone())
    out = bed.adapter.decode(call)
    assert bed.fake.latest("packed_decode")["mixed_qkv"].data_ptr() == call.q.data_ptr()
    assert torch.equal(bed.adapter.decode(apart), out), f"seed {bed.seed}"
    first = bed.fake.latest("packed_decode")["mixed_qkv"].data_ptr()
    assert first != apart.q.data_ptr()
    bed.adapter.decode(apart)
    assert bed.fake.latest("packed_decode")["mixed_qkv"].data_ptr() == first


def test_tensors_that_an_allocator_put_side_by_side_are_not_taken_for_one_projection() -> None:
    """With as many value heads as key heads, one row of each looks like the columns of one."""
    bed = Bed()
    q, k, v = (bed.randn(1, 1, W) for _ in range(3))
    gates = RawGates(a=bed.randn(1, 1), b=bed.randn(1, 1), A_log=torch.zeros(1), dt_bias=bed.randn(1))
    call = DecodeCall(q=q, k=k, v=v, gates=gates, states=bed.randn(6, 1, W, W, dtype=torch.float32), slots=slots(2))
    want = bed.adapter.decode(replace(call, states=call.states.clone()))
    nbytes = W * q.element_size()
    block = bytearray(3 * nbytes)
    beside = [
        torch.frombuffer(block, dtype=x.dtype, count=W, offset=i * nbytes).view(x.shape).copy_(x)
        for i, x in enumerate((q, k, v))
    ]
    assert [x.data_ptr() - beside[0].data_ptr() for x in beside] == [0, nbytes, 2 * nbytes], "side by side"
    bed.fake.calls.clear()
    assert torch.equal(bed.adapter.decode(replace(call, **dict(zip("qkv", beside, strict=True)))), want)
    assert bed.fake.latest("packed_decode")["mixed_qkv"].data_ptr() != beside[0].data_ptr(), f"seed {bed.seed}"


def test_columns_of_one_buffer_with_another_pitch_or_order_are_packed() -> None:
    bed = Bed()
    call = DecodeCall(**bed.tokens(3), slots=slots(2, -1, 0))
    want = bed.adapter.decode(replace(call, states=call.states.clone()))
    turned = torch.cat([call.k.flatten(1), call.q.flatten(1), call.v.flatten(1)], dim=1)
    k, q, v = turned.split([H * W, H * W, HV * W], dim=1)
    views = {"q": q.unflatten(1, (H, W)), "k": k.unflatten(1, (H, W)), "v": v.unflatten(1, (HV, W))}
    assert torch.equal(bed.adapter.decode(replace(call, **views)), want), f"seed {bed.seed}"


def test_decode_takes_no_more_than_the_plan_reserved_whatever_the_layout() -> None:
    """Inside capture nothing is made: what a layout needs lies ready."""
    bed = Bed()
    bed.adapter.prepare(PLAN)
    bound, ready = bed.adapter.scratch_bound, bed.adapter.scratch_bytes
    call = DecodeCall(**bed.tokens(3), slots=slots(2, -1, 0))
    gaps = torch.full((3, HV, W + 8), float("nan"), dtype=torch.bfloat16)[..., :W]
    apart = replace(call, k=call.k.clone(), states=call.states.clone(), out=gaps)
    want = bed.adapter.decode(call)
    assert bed.adapter.scratch_bytes == ready, "one projection, dense output: nothing is taken"
    for _ in range(2):
        apart.states.copy_(bed.randn(*apart.states.shape, dtype=torch.float32))
        bed.adapter.decode(apart)
    mixed, out = (3 * heads * W * torch.bfloat16.itemsize for heads in (2 * H + HV, HV))
    assert bed.adapter.scratch_bytes == ready + mixed + out
    assert bed.adapter.scratch_bound == bound
    addresses = {seen["out"].data_ptr() for name, seen in bed.fake.calls[1:] if name == "packed_decode"}
    assert len(addresses) == 1, "the same scratch"
    assert want.shape == gaps.shape


def test_an_output_with_gaps_gets_what_a_dense_one_gets() -> None:
    bed = Bed()
    call = DecodeCall(**bed.tokens(3), slots=slots(2, -1, 0))
    gaps = torch.full((3, HV, W + 8), float("nan"), dtype=torch.bfloat16)
    given = replace(call, states=call.states.clone(), out=gaps[..., :W])
    want = bed.adapter.decode(call)
    assert bed.adapter.decode(given) is given.out
    assert torch.equal(given.out, want), f"seed {bed.seed}"
    assert bool(torch.isnan(gaps[..., W:]).all())


def test_lengths_that_the_host_gives_are_not_read_from_the_device() -> None:
    bed = Bed()
    reads = []
    for lengths in (None, (2, 0, 3)):
        offsets = torch.tensor([0, 2, 2, 5]).as_subclass(Counted)
        call = ExtendCall(
            **bed.tokens(5), slots=slots(1, 2, 4), cu_seqlens=offsets, seq_lens_host=lengths,
        )  # fmt: skip
        Counted.reads = 0
        bed.adapter.extend(call)
        reads.append(Counted.reads)
    assert reads[1] == reads[0] - 1


def test_an_extend_beyond_the_plan_leaves_the_scratch_of_decode_where_it_is() -> None:
    bed = Bed()
    bed.adapter.prepare(replace(PLAN, max_batch=2))
    call = DecodeCall(**bed.tokens(2), slots=slots(2, 1))
    call = replace(call, k=call.k.clone())
    bed.adapter.decode(call)
    prompt = ExtendCall(**bed.tokens(8), slots=slots(1, 2, 3, 4), cu_seqlens=torch.tensor([0, 2, 4, 6, 8]))
    bed.adapter.extend(prompt)
    bed.adapter.decode(call)
    first, second = (seen["mixed_qkv"] for name, seen in bed.fake.calls if name == "packed_decode")
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.EXTEND, Phase.VERIFY])
@pytest.mark.parametrize("kind", list(GateKind))
def test_gates_are_taken_as_stated_for_each_phase(phase: Phase, kind: GateKind) -> None:
    bed = Bed()
    lead = (1, 2) if phase is Phase.VERIFY else (2,)
    parts = bed.tokens(*lead)
    if kind is GateKind.LOG:
        parts["gates"] = LogGates(g=torch.zeros(*lead, HV), beta=torch.ones(*lead, HV))
    call = {
        Phase.DECODE: lambda: DecodeCall(**parts, slots=slots(1, 2)),
        Phase.EXTEND: lambda: ExtendCall(**parts, slots=slots(1), cu_seqlens=slots(0, 2)),
        Phase.VERIFY: lambda: VerifyCall(**parts, slots=slots(1), intermediates=torch.zeros(1, 2, HV, W, W)),
    }[phase]()
    stated = kind in bed.adapter.capabilities.gates_of(phase)
    assert stated == (kind is GateKind.RAW or phase is Phase.EXTEND)
    support = bed.adapter.supports(call)
    assert support.ok == stated
    assert stated or support.reasons == (f"{phase} gates require raw, got log",)


@pytest.mark.case("C8")
def test_sequences_past_the_grid_of_the_chunked_prefill_are_refused() -> None:
    bed = Bed()
    many = 65_535 // HV + 1
    tokens = {name: x for name, x in bed.tokens(many).items() if name != "states"}
    call = ExtendCall(
        **tokens, states=bed.tokens(1)["states"], slots=torch.full((many,), -1, dtype=torch.int32),
        cu_seqlens=torch.arange(many + 1),
    )  # fmt: skip
    assert "S*HV of at most 65535" in "; ".join(bed.adapter.supports(call).reasons)


@pytest.mark.parametrize("short", [1, 0], ids=["one token short", "2**31"])
def test_chunk_states_of_2_to_the_31_elements_are_refused_and_one_chunk_less_is_not(short: int) -> None:
    """65,536 chunks of the smallest states here. The tokens are one, seen that many times: none of it is in memory."""
    bed, length = Bed(), 64 * (2**31 // (HV * W * W) - 1) - short
    one = bed.tokens(1)
    gates = one["gates"]
    many = {name: one[name].expand(length, -1, -1) for name in ("q", "k", "v")}
    call = ExtendCall(
        **many, gates=replace(gates, a=gates.a.expand(length, -1), b=gates.b.expand(length, -1)), states=one["states"],
        slots=slots(1), cu_seqlens=slots(0, length),
    )  # fmt: skip
    said = () if short else ("extend requires chunks*HV*V*K below 2**31, got 2147483648",)
    assert bed.adapter.supports(call).reasons == said
    if said:
        before = call.states.clone()
        with pytest.raises(UnsupportedError, match=r"chunks\*HV\*V\*K below 2\*\*31"):
            bed.adapter.extend(call)
        assert torch.equal(call.states, before)
        assert not bed.fake.calls


@pytest.mark.case("C8")
def test_rows_past_the_packed_grid_take_the_recurrent_kernel() -> None:
    bed = Bed()
    rows = 65_535 // HV + 1
    call = DecodeCall(**bed.tokens(rows), slots=torch.full((rows,), -1, dtype=torch.int32))

    def stub(**arguments: object) -> torch.Tensor:
        bed.fake.calls.append(("recurrent", dict(arguments)))
        return torch.ones(rows, 1, HV, W)

    kernels = replace(bed.fake.kernels(), recurrent=stub)
    out = SGLangGatedDeltaRule(kernels, bed.rows, CPU).decode(call)
    assert bed.fake.calls[0][0] == "recurrent"
    assert bool((out == 0).all()), "padded rows are zeroed afterwards"


@pytest.mark.case("C22")
def test_what_it_cannot_keep_is_stated_and_what_it_lacks_is_refused() -> None:
    bed = Bed()
    assert set(bed.adapter.capabilities.deviations) == {Clause.PRECISION, Clause.CAPTURE}
    decode = DecodeCall(**bed.tokens(1), slots=slots(1), write_slots=slots(2))
    assert "write slots" in bed.refusal(decode)
    verify = VerifyCall(**bed.tokens(1, 2), slots=slots(1), intermediates=torch.zeros(1, 2, HV, W, W))
    assert "positive" in bed.refusal(replace(verify, scale=0.0))
    assert "a tree" in bed.refusal(replace(verify, parents=torch.tensor([[-1, -1]], dtype=torch.int32)))
    paged = torch.zeros(2, 2 * HV * W * W + 8)[:, : 2 * HV * W * W].unflatten(1, (2, HV, W, W))
    two = VerifyCall(**bed.tokens(2, 2), slots=slots(1, 2), intermediates=paged)
    assert "whole nodes" in bed.refusal(two)


@pytest.mark.case("C7")
def test_refilled_offsets_of_the_same_tensor_are_read_anew() -> None:
    bed = Bed()
    call = ExtendCall(**bed.tokens(6), slots=slots(1, 2), cu_seqlens=slots(0, 2, 6))
    bed.adapter.extend(call)
    call.cu_seqlens.copy_(slots(0, 5, 6))
    again = replace(call, states=call.states.clone())
    fresh = replace(call, states=call.states.clone(), cu_seqlens=slots(0, 5, 6))
    assert torch.equal(bed.adapter.extend(again).out, bed.adapter.extend(fresh).out), f"seed {bed.seed}"
    assert torch.equal(again.states, fresh.states)


def test_a_later_plan_takes_nothing_from_an_earlier_one() -> None:
    """As where a second model without padded rows is made beside an engine: rows of the first still pad."""
    bed = Bed()
    bed.adapter.prepare(PLAN)
    bed.adapter.prepare(replace(PLAN, max_batch=1, may_pad=False))
    call = VerifyCall(**bed.tokens(3, 2), slots=slots(1, -1, 3), intermediates=torch.zeros(3, 2, HV, W, W))
    out = bed.adapter.verify(call)
    assert not out[1].any(), f"seed {bed.seed}"
    assert out[0].any()


def test_a_dense_pool_is_updated_in_place_and_a_paged_one_through_scratch() -> None:
    bed = Bed()
    call = ExtendCall(**bed.tokens(5), slots=slots(1, 2), cu_seqlens=slots(0, 2, 5))
    dense = replace(call, states=call.states.clone())
    base = torch.zeros(6, HV * W * W + 16)
    paged = base[:, : HV * W * W].unflatten(1, (HV, W, W))
    paged.copy_(call.states)
    bed.adapter.extend(dense)
    assert "gather_states" not in bed.rows.launches
    bed.adapter.extend(replace(call, states=paged))
    assert bed.rows.launches[-3:] == ["gather_states", "scatter_states", "zero_ranges"]
    assert torch.equal(paged, dense.states), f"seed {bed.seed}"


@pytest.mark.parametrize("clause", [c for c in Clause if c not in (Clause.SIZE, Clause.CAPTURE)])
def test_the_mended_kernels_keep_the_contract_but_for_what_they_state(clause: Clause) -> None:
    def make() -> SGLangGatedDeltaRule:
        return SGLangGatedDeltaRule(FakeSGLang().kernels(), TorchRows(), CPU)

    limits = replace(limits_for(make().capabilities, Profile.CPU), heads=((1, 1), (1, 2)), examples=2, max_tokens=140)
    reports = list(iter_laws("gated_delta_rule", make, limits=limits, only=clause))
    failed = [str(r) for r in reports if r.status is LawStatus.FAILED]
    assert not failed, "\n".join(failed)
    assert any(r.status in (LawStatus.PASSED, LawStatus.DEVIATES) for r in reports), [str(r) for r in reports]


@installed
@pytest.mark.row("I02")
def test_the_installed_sources_have_every_function_and_argument_that_we_pass() -> None:
    assert report().missing == ()
    assert probe(HOPPER).ok


@installed
@pytest.mark.row("D00")
@pytest.mark.row("I03")
def test_neither_probe_nor_load_leaves_a_trace_in_the_environment() -> None:
    code = """
import json, os, sys
before = dict(os.environ)
from qwen35.adapters.sglang.entries import GATED_DELTA_RULE
from qwen35.domain.geometry import GdnGeometry
from qwen35.domain.platform import Platform
GATED_DELTA_RULE.probe(Platform(device="cpu", device_name="CPU"))
heavy = sorted({"torch", "triton", "sglang", "flashinfer"} & set(sys.modules))
from qwen35.adapters.sglang.driven_kernels import load
kernels = load()
print(json.dumps({"heavy": heavy, "same": before == dict(os.environ)}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {"heavy": [], "same": True}
