"""Padded extends through SGLang's own RadixLinearAttention, with our kernels behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seam_machine import HV, Machine, V, close, installed_seam, split, start
from test_gdn_calls import own, start_refusing
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
        self.returned: list[Tensor] = []

    def forward(self, **arguments: Any) -> Tensor:
        self.seen.append(arguments | {"out_cache_loc": arguments["forward_batch"].out_cache_loc})
        self.returned.append(self.machine.backend.forward_extend(**arguments))
        return self.returned[-1]


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


@pytest.mark.row("G07")
@pytest.mark.parametrize("fallback", [None, "reference"], ids=["SGLang's kernel", "fallback"])
def test_a_padded_extend_that_our_adapter_refuses_is_copied_where_another_tensor_comes_back(
    fallback: str | None,
) -> None:
    one = start_refusing("no such head ratio", fallback=fallback)
    machine = Machine()
    kernel, front, states = own(machine), Front(machine), machine.states.clone()
    packed, a, b = machine.tokens(10)
    packed[7:] = torch.nan
    a[7:] = torch.nan
    batch = machine.batch("EXTEND", [5, 2], padding=3)
    machine.metadata([4, 1], [0, 5, 7])
    with through(front):
        out = machine.layer(batch, packed, a, b)
    assert kernel.calls == (["extend"] if fallback is None else [])
    close(out[0, :7], expected_extend(machine, states, packed, a, b, 7))
    assert torch.equal(out[0, 7:], torch.zeros_like(out[0, 7:])), "tail rows are exact zeros"
    close(machine.states, states)
    given = front.seen[0]["linear_attn_output"].data_ptr()
    assert given == out.data_ptr()
    assert (front.returned[0].data_ptr() == given) is (fallback is not None), "SGLang's kernel makes its own tensor"
    assert one.container.counters().total("fallbacks", phase="extend", instead_of="fake") == 1


class Segments:
    """SGLang's capture of a breakable graph without a graph: it keeps what is to run eagerly between segments."""

    _barrier_fn = None

    def __init__(self) -> None:
        self.cuda_graph = SimpleNamespace(_break_fns=[])

    def _end_current_segment(self) -> None: ...

    def _begin_new_segment(self) -> None: ...

    def replay(self) -> None:
        for between in self.cuda_graph._break_fns:
            between()


@contextmanager
def breaking(segments: Segments) -> Iterator[None]:
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph as breakable

    token = breakable._current_capture_var.set(segments)
    try:
        yield
    finally:
        breakable._current_capture_var.reset(token)


@contextmanager
def eager_parts(machine: Machine, batch: Any) -> Iterator[Callable[..., None]]:
    """SGLang's linear attention as it stands between a graph's segments, for ``batch``: (mixed_qkv, a, b, output)."""
    from sglang.srt.layers import radix_linear_attention as radix

    if installed_seam().version != "0.5.20":
        from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch

        with set_forward_batch(batch):
            yield machine.layer._eager_linear_attention
        return
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import context_manager as piecewise

    library = torch.library.Library("sglang", "IMPL")  # the operator is CUDA's alone; its own body runs anywhere
    library.impl("unified_linear_attention_with_output", radix._unified_linear_attention_with_output_impl, "CPU")
    layers = [None, machine.layer]
    with piecewise.set_tc_piecewise_forward_context(batch, layers, None, [], []):
        yield partial(radix.bcg_unified_linear_attention_with_output, layer_id=1)
    library._destroy()


@pytest.mark.row("G10")
def test_a_break_in_a_graph_is_zeros_without_a_call_when_captured_and_ours_when_replayed() -> None:
    one = start(**ALL)
    machine = Machine()
    front, states, segments = Front(machine), machine.states.clone(), Segments()
    packed, a, b = machine.tokens(10)
    batch = machine.batch("EXTEND", [5, 2], padding=3)
    machine.metadata([4, 1], [0, 5, 7])
    output = torch.full((1, 10, HV, V), torch.nan)
    counters = one.container.counters()
    with through(front), eager_parts(machine, batch) as layer:
        with breaking(segments):
            layer(packed, a, b, output)
        assert torch.equal(output, torch.zeros_like(output))
        assert torch.equal(machine.states, states)
        assert (front.seen, counters.total("calls")) == ([], 0), "no backend was called, so no kernel"
        output.fill_(torch.nan)
        segments.replay()
    close(output[0, :7], expected_extend(machine, states, packed, a, b, 7))
    assert not output[0, 7:].any()
    close(machine.states, states)
    assert counters.total("calls", adapter="reference", phase="extend", mode="eager") == counters.total("calls") == 1
