"""Which scratch the Triton kernels of each stream use: extend its own, decode and verify none."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from qwen35.adapters.triton.gated_delta_rule import TritonGatedDeltaRule
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.adapter import HoldsScratch
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, GdnPlan, RawGates, VerifyCall

pytestmark = pytest.mark.interpreter

H, HV, K, V = 1, 2, 16, 16
TOKENS = 70
PLAN = GdnPlan(
    geometry=GdnGeometry(key_heads=H, value_heads=HV, key_width=K, value_width=V), state_dtype=torch.float32,
    device=torch.device("cpu"), max_batch=2, max_tokens=TOKENS, max_draft=2, token_dtype=torch.float32,
)  # fmt: skip
#: Bytes of one buffer for 70 tokens of 2 heads: twice 64 floats, and four factors, for each; multiples of 256.
ONE = 2 * HV * TOKENS * 64 * 4 + -(-4 * HV * TOKENS * 4 // 256) * 256


class Numbered:
    """An adapter on streams by number."""

    def __init__(self) -> None:
        self.stream = 0
        self.adapter = TritonGatedDeltaRule(stream_of=self._stream_of)

    def _stream_of(self, _: torch.device) -> int:
        return self.stream


def parts(*leading: int) -> dict[str, Any]:
    gates = RawGates(a=torch.randn(*leading, HV), b=torch.randn(*leading, HV), A_log=torch.rand(HV),
                     dt_bias=torch.randn(HV))  # fmt: skip
    q, k = torch.randn(2, *leading, H, K)
    return {
        "q": q, "k": k, "v": torch.randn(*leading, HV, V), "gates": gates, "states": torch.randn(3, HV, V, K),
        "slots": torch.tensor([2, 0], dtype=torch.int32),
    }  # fmt: skip


def extend(tokens: int = TOKENS) -> ExtendCall:
    return ExtendCall(**parts(tokens), cu_seqlens=torch.tensor([0, 3, tokens], dtype=torch.int32))


def test_every_stream_that_extends_has_its_own_scratch_and_the_same_numbers() -> None:
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    numbered, call = Numbered(), extend()
    adapter = numbered.adapter
    assert isinstance(adapter, HoldsScratch)
    adapter.prepare(PLAN)
    assert adapter.scratch_bytes == ONE, "for a stream first seen inside capture"
    outs = []
    for numbered.stream, streams in ((5, 1), (6, 2), (5, 2), (6, 2)):
        outs.append(adapter.extend(replace(call, states=call.states.clone())).out)
        assert adapter.scratch_bytes == (1 + streams) * ONE <= adapter.scratch_bound
    assert all(torch.equal(out, outs[0]) for out in outs), f"seed {seed}"
    adapter.close()
    assert adapter.scratch_bytes == 0


def test_decode_and_verify_take_none_and_ask_for_no_stream() -> None:
    def asked(_: torch.device) -> int:
        raise AssertionError("decode and verify have no use for a stream")

    adapter = TritonGatedDeltaRule(stream_of=asked)
    adapter.decode(DecodeCall(**parts(2)))
    adapter.verify(VerifyCall(**parts(2, 2), intermediates=torch.zeros(2, 2, HV, V, K)))
    assert adapter.scratch_bytes == 0


def test_unplanned_prompts_that_grow_stay_under_the_bound() -> None:
    adapter = TritonGatedDeltaRule()
    for tokens in (4, 5, 66, 67):
        adapter.extend(extend(tokens))
        assert adapter.scratch_bytes <= adapter.scratch_bound
    assert adapter.scratch_bytes <= 2 * 2 * ONE, "the latest and what lies ready, at most twice what is needed"
