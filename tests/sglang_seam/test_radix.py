"""Padded extends through SGLang's own RadixLinearAttention, with our kernels behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from seam_machine import HV, Machine, V, close, split, start
from torch import Tensor

from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.ports.gated_delta_rule import ExtendCall, RawGates, VerifyCall

oracle = ReferenceGatedDeltaRule(torch.float64)
ALL = {"gdn_decode": "reference", "gdn_extend": "reference", "gdn_verify": "reference"}


class Front:
    """SGLang's attention backend as its layers see it: forward() by keyword, the mode chosen by the batch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.seen: list[dict[str, Any]] = []

    def forward(self, **arguments: Any) -> Tensor:
        self.seen.append(arguments | {"out_cache_loc": arguments["forward_batch"].out_cache_loc})
        out: Tensor = self.machine.backend.forward_extend(**arguments)
        return out


@contextmanager
def through(front: Any) -> Iterator[None]:
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    with forward_context(ForwardContext(attn_backend=front)):
        yield


def expected_extend(machine: Machine, states: Tensor, packed: Tensor, a: Tensor, b: Tensor, real: int) -> Tensor:
    q, k, v = (x[:real] for x in split(packed))
    a, b = (x.reshape(-1, HV)[:real] for x in (a, b))
    gates = RawGates(a=a, b=b, A_log=machine.A_log, dt_bias=machine.dt_bias)
    call = ExtendCall(q=q, k=k, v=v, gates=gates, states=states, slots=torch.tensor([4, 1], dtype=torch.int32),
                      cu_seqlens=torch.tensor([0, 5, 7], dtype=torch.int32))  # fmt: skip
    return oracle.extend(call).out


@pytest.mark.row("G05")
@pytest.mark.row("G07")
@pytest.mark.row("G08")
@pytest.mark.parametrize("lead", [(), (1,)], ids=["a and b 2-D", "a and b 3-D"])
def test_a_padded_extend_sees_the_real_rows_and_leaves_zeros_after_them(lead: tuple[int, ...]) -> None:
    start(**ALL)
    machine = Machine()
    front, states = Front(machine), machine.states.clone()
    packed, a, b = machine.tokens(10)
    a, b = a.reshape(*lead, 10, HV), b.reshape(*lead, 10, HV)
    packed[7:] = torch.nan
    a[..., 7:, :] = torch.nan
    batch = machine.batch("EXTEND", [5, 2], padding=3)
    machine.metadata([4, 1], [0, 5, 7])
    with through(front):
        out = machine.layer(batch, packed, a, b)
    seen = front.seen[0]
    assert [seen[name].shape[-2] for name in ("a", "b")] == [7, 7]
    assert (seen["mixed_qkv"].shape[0], seen["out_cache_loc"].shape[0]) == (7, 7)
    assert out.shape == (1, 10, HV, V)
    close(out[0, :7], expected_extend(machine, states, packed, a, b, 7))
    assert torch.equal(out[0, 7:], torch.zeros_like(out[0, 7:])), "tail rows are exact zeros"
    close(machine.states, states)
    assert seen["linear_attn_output"].data_ptr() == out.data_ptr(), "our kernel wrote into SGLang's own buffer"


@pytest.mark.row("G06")
def test_the_batch_is_whole_again_even_where_the_kernel_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    one = start(**ALL)
    machine = Machine()
    batch = machine.batch("EXTEND", [5, 2], padding=3)
    locations, seen = batch.out_cache_loc, []

    def raises(*_: Any, **__: Any) -> None:
        seen.append(batch.out_cache_loc.shape[0])
        raise InterruptedError("SGLang's own kernel")

    monkeypatch.setattr(type(machine.dispatcher.extend_kernel.original), "extend", raises)
    machine.metadata([4, 99], [0, 5, 7])  # 99 is no slot: the call is refused by value, and SGLang's kernel gets it
    packed, a, b = machine.tokens(10)
    with through(Front(machine)), pytest.raises(InterruptedError, match=r"^SGLang's own kernel$"):
        machine.layer(batch, packed, a, b)
    assert seen == [7], "the kernel raised while the batch was cut to its real rows"
    assert batch.out_cache_loc is locations
    assert one.container.counters().total("fallbacks", phase="extend", instead_of="reference") == 1


@pytest.mark.row("G09")
def test_a_verify_is_not_trimmed() -> None:
    start(**ALL)
    machine = Machine(draft=3)
    front, states = Front(machine), machine.states.clone()
    packed, a, b = machine.tokens(6)
    batch = machine.batch("TARGET_VERIFY", [3, 3])
    batch.global_num_token_non_padded_cpu = 4
    machine.metadata([4, 1], [0, 3, 6])
    with through(front):
        out = machine.layer(batch, packed, a, b)
    assert front.seen[0]["mixed_qkv"].shape[0] == 6
    q, k, v = (x.unflatten(0, (2, 3)) for x in split(packed))
    gates = RawGates(a=a.view(2, 3, HV), b=b.view(2, 3, HV), A_log=machine.A_log, dt_bias=machine.dt_bias)
    call = VerifyCall(q=q, k=k, v=v, gates=gates, states=states, slots=torch.tensor([4, 1], dtype=torch.int32),
                      intermediates=machine.intermediates.clone())  # fmt: skip
    close(out[0], oracle.verify(call).flatten(0, 1))


@pytest.mark.row("G10")
def test_the_capture_stub_fills_zeros_and_calls_no_kernel() -> None:
    from sglang.srt.layers import radix_linear_attention as radix

    one = start(**ALL)
    machine = Machine()
    packed, a, b = machine.tokens(3)
    output = torch.full((1, 3, HV, V), torch.nan)
    stub = vars(radix).get("_linear_attention_capture_stub")
    if stub is not None:
        stub(packed, a, b, output, 1)
    else:
        machine.layer._capture_stub_linear_attention(packed, a, b, output)
    assert not output.any()
    assert one.container.counters().total("calls") == 0
