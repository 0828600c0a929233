"""Two streams in the adapter of SGLang's kernels: neither sees the other's scratch, whatever the device does first."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_sglang import FakeSGLang
from qwen35.adapters.sglang.gated_delta_rule import SGLangGatedDeltaRule
from qwen35.domain.geometry import GdnGeometry
from qwen35.domain.platform import Platform
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, GdnPlan, RawGates, VerifyCall
from torch_rows import TorchRows
from two_streams import Call, Streams, assert_left_alone, serve

CPU = Platform(device="cpu", device_name="CPU")
H, HV, W = 1, 2, 128
PLAN = GdnPlan(
    geometry=GdnGeometry(key_heads=H, value_heads=HV, key_width=W, value_width=W), state_dtype=torch.float32,
    device=torch.device("cpu"), max_batch=3, max_tokens=8, max_draft=2,
)  # fmt: skip


class TwoStreams(Streams):
    """With the adapter that asks it which stream is current."""

    def __init__(self) -> None:
        super().__init__()
        kernels = FakeSGLang().kernels()
        late = {name: self.late(getattr(kernels, name)) for name in ("packed_decode", "recurrent", "chunked")}
        self.adapter = SGLangGatedDeltaRule(replace(kernels, **late), TorchRows(), CPU, stream_of=self.of)
        self.adapter.prepare(PLAN)


class Draw:
    def __init__(self) -> None:
        self.seed = random.randrange(2**31)
        self.source = torch.Generator().manual_seed(self.seed)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=self.source).to(dtype)

    def parts(self, *leading: int) -> dict[str, Any]:
        """Tokens that are no one projection, over a pool with gaps."""
        gates = RawGates(
            a=self.randn(*leading, HV), b=self.randn(*leading, HV), A_log=torch.zeros(HV), dt_bias=self.randn(HV)
        )
        pool = torch.zeros(6, HV * W * W + 16)[:, : HV * W * W].unflatten(1, (HV, W, W))
        pool.copy_(self.randn(6, HV, W, W, dtype=torch.float32))
        q, k, v = self.randn(*leading, H, W), self.randn(*leading, H, W), self.randn(*leading, HV, W)
        return {"q": q, "k": k, "v": v, "gates": gates, "states": pool}

    def call(self, kind: type, *slots: int) -> Call:
        at, rows = torch.tensor(slots, dtype=torch.int32), len(slots)
        if kind is DecodeCall:
            return DecodeCall(**self.parts(rows), slots=at)
        if kind is VerifyCall:
            return VerifyCall(**self.parts(rows, 2), slots=at, intermediates=torch.zeros(rows, 2, HV, W, W))
        return ExtendCall(**self.parts(3 * rows), slots=at, cu_seqlens=3 * torch.arange(rows + 1))


def written(call: Call) -> Tensor:
    return call.intermediates if isinstance(call, VerifyCall) else call.states


def alone(call: Call) -> tuple[Tensor, Tensor]:
    """Output, and what is written, of ``call`` by an adapter that serves nothing else."""
    copied = {"intermediates": call.intermediates.clone()} if isinstance(call, VerifyCall) else {}
    base = torch.zeros(6, HV * W * W + 16)[:, : HV * W * W].unflatten(1, (HV, W, W))
    apart = replace(call, states=base.copy_(call.states), **copied)
    return serve(SGLangGatedDeltaRule(FakeSGLang().kernels(), TorchRows(), CPU), apart), written(apart)


@pytest.mark.row("D03")
@pytest.mark.parametrize("kind", [DecodeCall, VerifyCall, ExtendCall])
def test_a_call_on_another_stream_leaves_scratch_of_this_one_alone(kind: type) -> None:
    draw, two = Draw(), TwoStreams()
    calls = draw.call(kind, 4, -1, 2), draw.call(kind, -1, 5, 1)
    want = [alone(call) for call in calls]
    assert_left_alone(two, two.adapter, calls, want, written, draw.seed)


def test_scratch_is_counted_and_bounded_and_a_second_stream_adds_its_own() -> None:
    draw, two = Draw(), TwoStreams()
    call = draw.call(DecodeCall, 4, -1, 2)
    held = []
    for two.stream in (0, 1, 0, 1):
        serve(two.adapter, call)
        held.append(two.adapter.scratch_bytes)
        assert held[-1] <= two.adapter.scratch_bound
    packed = PLAN.max_batch * (2 * H + HV) * W * torch.bfloat16.itemsize
    assert packed <= held[1] - held[0] < 2 * packed
    assert held[1] == held[2] == held[3]
    two.adapter.close()
    assert two.adapter.scratch_bytes == 0
