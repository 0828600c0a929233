"""What only a GPU shows of our GDN kernels: one launch a call, and capture with nothing run before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from device_kernels import kernels
from qwen35.adapters.triton.gated_delta_rule import TritonGatedDeltaRule
from qwen35.domain.errors import CaptureError, UnsupportedError
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    Gates,
    GdnPlan,
    LogGates,
    RawGates,
    VerifyCall,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

H, HV, W = 2, 4, 128
ROWS, TOKENS, DRAFT = 4, 130, 3
INDEX_DTYPES = [torch.int32, torch.int64]


class Calls:
    """Random calls at the sizes of ``plan``."""

    def __init__(self, seed: int, heads: tuple[int, int] = (H, HV), state: torch.dtype = torch.float32) -> None:
        self._source = torch.Generator(device="cuda").manual_seed(seed)
        self._h, self._hv = heads
        self.plan = GdnPlan(
            geometry=GdnGeometry(key_heads=heads[0], value_heads=heads[1], key_width=W, value_width=W),
            state_dtype=state,
            device=torch.device("cuda"), max_batch=ROWS, max_tokens=TOKENS, max_draft=DRAFT,
        )  # fmt: skip

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=self._source, device="cuda").to(dtype)

    def gates(self, *leading: int, raw: bool = True) -> Gates:
        hv = self._hv
        if not raw:
            g, beta = (self.randn(*leading, hv, dtype=torch.float32) for _ in range(2))
            return LogGates(g=-g.abs(), beta=beta.sigmoid())
        a, b, A_log, dt_bias = self.randn(*leading, hv), self.randn(*leading, hv), self.randn(hv), self.randn(hv)
        return RawGates(a=a, b=b, A_log=A_log.float(), dt_bias=dt_bias.float())

    def tokens(self, *leading: int, raw: bool = True) -> dict[str, Any]:
        q, k, v = (self.randn(*leading, heads, W) for heads in (self._h, self._h, self._hv))
        return {"q": q, "k": k, "v": v, "gates": self.gates(*leading, raw=raw)}

    def pool(self, rows: int, dtype: torch.dtype = torch.int32) -> dict[str, Any]:
        return {
            "states": self.randn(2 * rows, self._hv, W, W, dtype=self.plan.state_dtype),
            "slots": torch.arange(rows, dtype=dtype, device="cuda"),
        }

    def decode(self, rows: int = ROWS, dtype: torch.dtype = torch.int32, raw: bool = True) -> DecodeCall:
        return DecodeCall(**self.tokens(rows, raw=raw), **self.pool(rows, dtype))

    def extend(self, tokens: int = TOKENS) -> ExtendCall:
        ends = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32, device="cuda")
        return ExtendCall(**self.tokens(tokens), **self.pool(2), cu_seqlens=ends)

    def verify(self, draft: int = DRAFT) -> VerifyCall:
        kept = torch.zeros(ROWS, draft, self._hv, W, W, device="cuda")
        return VerifyCall(**self.tokens(ROWS, draft), **self.pool(ROWS), intermediates=kept)


@pytest.fixture
def calls(seed: int) -> Calls:
    return Calls(seed)


@pytest.fixture
def bare() -> Iterator[TritonGatedDeltaRule]:
    adapter = TritonGatedDeltaRule()
    yield adapter
    adapter.close()


@pytest.fixture
def prepared(bare: TritonGatedDeltaRule, calls: Calls) -> TritonGatedDeltaRule:
    bare.prepare(calls.plan)
    return bare


@pytest.mark.parametrize("to_other_slots", [False, True])
@pytest.mark.parametrize("raw", [False, True])
def test_a_decode_is_one_kernel(prepared: TritonGatedDeltaRule, calls: Calls, raw: bool, to_other_slots: bool) -> None:
    call = calls.decode(raw=raw)
    if to_other_slots:
        call = replace(call, write_slots=call.slots + ROWS)
    names = kernels(lambda: prepared.decode(call))
    assert len(names) == 1, names
    assert "decode_kernel" in names[0]


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(16, 32), (16, 64), (8, 32), (2, 8)])
def test_a_decode_is_one_kernel_at_a_model_s_widths(
    bare: TritonGatedDeltaRule, heads: tuple[int, int], state: torch.dtype, seed: int
) -> None:
    calls = Calls(seed, heads, state)
    bare.prepare(calls.plan)
    call = calls.decode()
    names = kernels(lambda: bare.decode(call))
    assert len(names) == 1, names
    assert "decode_kernel" in names[0]


@pytest.mark.parametrize("raw", [False, True])
def test_addresses_of_both_kinds_take_turns(prepared: TritonGatedDeltaRule, calls: Calls, raw: bool, seed: int) -> None:
    """The kernel that is kept for a layout was compiled for multiples of 16 bytes; other addresses need another."""
    for turn in range(6):
        call = calls.decode(raw=raw)
        states = call.states.clone()
        want = TritonGatedDeltaRule().decode(replace(call, states=states))
        room = torch.empty(call.q.numel() + 1, dtype=call.q.dtype, device="cuda")
        off = room[1:].view(call.q.shape).copy_(call.q)
        assert off.data_ptr() % 16
        got = prepared.decode(replace(call, q=off) if turn % 2 else call)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2, msg=f"seed {seed}, turn {turn}")
        torch.testing.assert_close(call.states, states, rtol=1e-4, atol=1e-4, msg=f"seed {seed}, turn {turn}")


def test_verify_and_commit_are_one_kernel_each(prepared: TritonGatedDeltaRule, calls: Calls) -> None:
    call = calls.verify()
    commit = CommitCall(states=call.states, slots=call.slots, intermediates=call.intermediates, last=call.slots * 0)
    verified, committed = kernels(lambda: prepared.verify(call)), kernels(lambda: prepared.commit(commit))
    assert len(verified) == len(committed) == 1, (verified, committed)
    assert "verify_kernel" in verified[0]
    assert "commit_kernel" in committed[0]


def captured(call: Any, work: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
    """Output and pool of one replay of ``work``, captured with nothing run before it."""
    states = call.states.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work(call)
    assert torch.equal(call.states, states), "capture launches nothing"
    graph.replay()
    torch.cuda.synchronize()
    return out, call.states


def same(call: Any, work: Callable[[Any], Tensor]) -> None:
    """A replay gives the bits of an eager call."""
    eager = replace(call, states=call.states.clone())
    out, states = captured(call, work)
    assert torch.equal(out, work(eager))
    assert torch.equal(states, eager.states)


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("to_other_slots", [False, True])
def test_decode_is_captured_straight_after_prepare(
    prepared: TritonGatedDeltaRule, calls: Calls, to_other_slots: bool, dtype: torch.dtype
) -> None:
    call = calls.decode(dtype=dtype)
    same(replace(call, write_slots=call.slots + ROWS) if to_other_slots else call, prepared.decode)


def test_extend_and_verify_are_captured_straight_after_prepare(prepared: TritonGatedDeltaRule, calls: Calls) -> None:
    extend = calls.extend()
    same(replace(extend, write_slots=extend.slots + 2), lambda call: prepared.extend(call).out)
    same(calls.verify(), prepared.verify)


def test_what_prepare_did_not_compile_is_compiled_inside_capture(prepared: TritonGatedDeltaRule, calls: Calls) -> None:
    """Rows of ``out`` 4 elements further apart than dense ones."""
    call = calls.decode()
    wide = torch.empty(ROWS, HV * W + 4, dtype=torch.bfloat16, device="cuda")[:, : HV * W].view(ROWS, HV, W)
    out, _ = captured(replace(call, out=wide, states=call.states.clone()), prepared.decode)
    assert torch.equal(out, prepared.decode(call))


def refused(call: Any, work: Callable[[Any], object], match: str) -> None:
    graph, states = torch.cuda.CUDAGraph(), call.states.clone()
    with torch.cuda.graph(graph), pytest.raises(CaptureError, match=match):
        work(call)
    torch.cuda.synchronize()
    assert torch.equal(call.states, states)


def test_what_was_not_planned_is_refused_inside_capture(bare: TritonGatedDeltaRule, calls: Calls) -> None:
    refused(calls.decode(), bare.decode, "any plan")
    refused(calls.extend(), bare.extend, "any plan")
    refused(calls.verify(), bare.verify, "any plan")


def test_what_is_larger_than_planned_is_refused_inside_capture(prepared: TritonGatedDeltaRule, calls: Calls) -> None:
    refused(calls.decode(ROWS + 1), prepared.decode, "not covered")
    refused(calls.extend(TOKENS + 1), prepared.extend, "not covered")
    refused(calls.verify(DRAFT + 1), prepared.verify, "not covered")


def test_a_plan_whose_tokens_cannot_be_extended_is_refused_and_not_kept(
    bare: TritonGatedDeltaRule, calls: Calls
) -> None:
    odd = replace(calls.plan.geometry, key_width=24, value_width=40)
    with pytest.raises(UnsupportedError, match="key width that is a multiple of 16, got 24"):
        bare.prepare(replace(calls.plan, geometry=odd))
    assert bare.scratch_bytes == 0
    bare.prepare(replace(calls.plan, geometry=odd, max_tokens=0))


def test_unaligned_tokens_are_captured_once_they_were_seen(prepared: TritonGatedDeltaRule, calls: Calls) -> None:
    """Tokens whose rows are a multiple of 8 elements apart, not of 16: they are copied, and the copy needs room."""
    packed = calls.randn(TOKENS, (2 * H + HV) * W + 8)
    q, k, v = (t.view(TOKENS, -1, W) for t in torch.split(packed[:, :-8], [H * W, H * W, HV * W], 1))
    call = replace(calls.extend(), q=q, k=k, v=v)
    refused(call, prepared.extend, "before capture")
    dense = replace(call, **{name: getattr(call, name).contiguous() for name in ("q", "k", "v")})
    expected = prepared.extend(replace(dense, states=call.states.clone())).out
    assert torch.equal(prepared.extend(replace(call, states=call.states.clone())).out, expected)
    out, _ = captured(call, lambda c: prepared.extend(c).out)
    assert torch.equal(out, expected)
