"""SGLang's own Triton kernels on a GPU: what the adapter relies on and what it mends. Compact: a minute at most."""

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
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, GdnPlan, RawGates, VerifyCall
from qwen35.services.platform import detect_platform

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BF16, F32 = torch.bfloat16, torch.float32
H, HV, W = 2, 8, 128


class Bench:
    """The adapter over the real kernels, seeded calls, and the float64 oracle."""

    def __init__(self) -> None:
        from qwen35.adapters.sglang.entries import create, probe

        platform = detect_platform("cuda")
        support = probe(platform)
        if not support:
            pytest.skip("; ".join(support.reasons))
        self.device = torch.device(platform.device)
        self.adapter = create(platform, AdapterOptions())
        self.oracle = ReferenceGatedDeltaRule(torch.float64, "cuda")
        for state in (F32, BF16):
            self.adapter.prepare(
                GdnPlan(
                    geometry=GdnGeometry(key_heads=H, value_heads=HV, key_width=W, value_width=W), state_dtype=state,
                    device=self.device, max_batch=8, max_tokens=300, max_draft=3,
                )
            )  # fmt: skip

    def reseed(self) -> None:
        self.seed = random.randrange(2**31)
        self.source = torch.Generator(device=self.device).manual_seed(self.seed)

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=self.source, device=self.device).to(dtype)

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def pool(self, state: torch.dtype, gap: int = 0) -> Tensor:
        size = HV * W * W
        base = torch.full((6, size + gap), float("nan"), dtype=state, device=self.device)
        base[:, :size] = self.randn(6, size, dtype=state)
        return base[:, :size].unflatten(1, (HV, W, W))

    def tokens(self, *leading: int) -> dict[str, object]:
        return {
            "q": 3 * self.randn(*leading, H, W), "k": self.randn(*leading, H, W), "v": self.randn(*leading, HV, W),
            "gates": RawGates(
                a=self.randn(*leading, HV), b=self.randn(*leading, HV), A_log=self.randn(HV, dtype=F32),
                dt_bias=self.randn(HV),
            ),
        }  # fmt: skip

    def within(self, phase: Phase, state: torch.dtype, what: str, got: Tensor, want: Tensor) -> None:
        bound = self.adapter.capabilities.precision[phase].bound("bfloat16", str(state).removeprefix("torch."))
        limit = bound.output if what == "out" else bound.state
        off = float((got.double() - want).norm() / want.norm())
        assert off <= limit, f"{phase} {state} {what}: error {off:.2e} above {limit:.2e}, seed {self.seed}"


def wide(call):
    """The call in float64, gates included."""
    gates = RawGates(**{n: getattr(call.gates, n).double() for n in ("a", "b", "A_log", "dt_bias")})
    return replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double(), gates=gates)


@pytest.fixture(scope="module")
def shared() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.adapter.close()


@pytest.fixture
def bench(shared: Bench) -> Bench:
    shared.reseed()
    return shared


@pytest.mark.parametrize("gap", [0, 64], ids=["contiguous", "paged"])
@pytest.mark.parametrize("state", [F32, BF16])
def test_decode(bench: Bench, state: torch.dtype, gap: int) -> None:
    call = DecodeCall(**bench.tokens(3), states=bench.pool(state, gap), slots=bench.ints(2, -1, 5))
    before, states = call.states.clone(), call.states.double()
    want = bench.oracle.decode(replace(wide(call), states=states))
    out = bench.adapter.decode(call)
    assert bool((out[1] == 0).all())
    for slot in (0, 1, 3, 4):
        assert torch.equal(before[slot], call.states[slot]), f"slot {slot}, seed {bench.seed}"
    bench.within(Phase.DECODE, state, "out", out[[0, 2]], want[[0, 2]])
    bench.within(Phase.DECODE, state, "state", call.states[[2, 5]], states[[2, 5]])


@pytest.mark.case("C7")
@pytest.mark.parametrize("fresh", [False, True], ids=["in place", "through scratch"])
@pytest.mark.parametrize("gap", [0, 64], ids=["contiguous", "paged"])
def test_extend_with_empty_and_padded_sequences(bench: Bench, gap: int, fresh: bool) -> None:
    lengths, slots = [0, 65, 0, 31, 1, 130], [0, 5, -1, -1, 3, 2]
    offsets = [0, *itertools.accumulate(lengths)]
    call = ExtendCall(
        **bench.tokens(offsets[-1]), states=bench.pool(F32, gap), slots=bench.ints(*slots),
        cu_seqlens=bench.ints(*offsets),
        fresh=torch.tensor([False, False, False, False, True, False], device=bench.device) if fresh else None,
    )  # fmt: skip
    before, states = call.states.clone(), call.states.double()
    want = bench.oracle.extend(replace(wide(call), states=states)).out
    out = bench.adapter.extend(call).out
    assert bool((out[65:96] == 0).all()), "tokens of a padded sequence are zero"
    for slot in (0, 1, 4):
        assert torch.equal(before[slot], call.states[slot]), f"slot {slot}, seed {bench.seed}"
    for s in (1, 4, 5):
        part = slice(offsets[s], offsets[s + 1])
        bench.within(Phase.EXTEND, F32, "out", out[part], want[part])
        bench.within(Phase.EXTEND, F32, "state", call.states[slots[s]], states[slots[s]])


@pytest.mark.parametrize("given", [False, True], ids=["positional", "rows"])
@pytest.mark.parametrize("state", [F32, BF16])
def test_verify(bench: Bench, state: torch.dtype, given: bool) -> None:
    call = VerifyCall(
        **bench.tokens(3, 3), states=bench.pool(state), slots=bench.ints(5, -1, 0),
        intermediates=torch.full((4, 4, HV, W, W), float("nan"), dtype=state, device=bench.device),
        rows=bench.ints(3, 3, 1) if given else None,
    )  # fmt: skip
    before = call.states.clone()
    nodes = torch.full(call.intermediates.shape, float("nan"), dtype=torch.float64, device=bench.device)
    want = bench.oracle.verify(replace(wide(call), states=call.states.double(), intermediates=nodes))
    out = bench.adapter.verify(call)
    assert torch.equal(before, call.states), f"the pool is as before, seed {bench.seed}"
    assert bool((out[1] == 0).all())
    rows = [3, 1] if given else [0, 2]
    bench.within(Phase.VERIFY, state, "out", out[[0, 2]], want[[0, 2]])
    bench.within(Phase.VERIFY, state, "nodes", call.intermediates[rows, :3], nodes[rows, :3])
    assert bool(torch.isnan(call.intermediates[[r for r in range(4) if r not in rows]]).all())
    assert bool(torch.isnan(call.intermediates[:, 3]).all()), "the fourth node is nobody's"
