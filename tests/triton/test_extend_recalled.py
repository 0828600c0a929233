"""The Triton adapter's extend where a model's layers make the same call in turn, over Triton's driver without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from test_row_launches import Lookups, at
from without_device import in_place_of_the_driver

from elsewhere import elsewhere
from qwen35.adapters.triton.gated_delta_rule import TritonGatedDeltaRule
from qwen35.adapters.triton.kernels import gdn_extend
from qwen35.ports.gated_delta_rule import ExtendCall, LogGates, RawGates

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter does not compile")

TOKENS, KEY_HEADS, HEADS, WIDTH = 70, 2, 4, 128
KERNELS = gdn_extend.chunk_kernel, gdn_extend.scan_kernel


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lookups]:
    with in_place_of_the_driver(monkeypatch, Lookups(), *KERNELS) as one:
        yield one


@pytest.fixture
def adapter() -> TritonGatedDeltaRule:
    made = TritonGatedDeltaRule()
    made.capabilities = replace(made.capabilities, device_types=frozenset({"cpu"}), min_compute_capability=None)
    return made


def layer(off: int = 0) -> Any:
    """Views of one projection, ``off`` elements past a multiple of 16 bytes."""
    channels = (2 * KEY_HEADS + HEADS) * WIDTH
    flat = torch.zeros(TOKENS * channels + off, dtype=torch.bfloat16)[off:].view(TOKENS, -1, WIDTH)
    q, k, v = flat.split([KEY_HEADS, KEY_HEADS, HEADS], dim=1)
    a, b = torch.zeros(2, TOKENS, HEADS, dtype=torch.bfloat16)
    return elsewhere(ExtendCall(
        q=q, k=k, v=v, gates=RawGates(a=a, b=b, A_log=torch.zeros(HEADS), dt_bias=torch.zeros(HEADS)),
        states=torch.zeros(2, HEADS, WIDTH, WIDTH), slots=torch.tensor([1, 0], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 6, TOKENS], dtype=torch.int32), seq_lens_host=(6, TOKENS - 6),
    ))  # fmt: skip


def named(hopper: Lookups, kernel: int, launch: int) -> dict[str, Any]:
    """The arguments of one launch of the chunks (0) or the scan (1)."""
    arguments = at(hopper.placed[2 * launch + kernel][2])
    return dict(zip(KERNELS[kernel].arg_names, arguments, strict=True))


def test_the_next_layer_is_not_looked_up(hopper: Lookups, adapter: TritonGatedDeltaRule) -> None:
    calls = [layer() for _ in range(3)]
    for call in calls:
        adapter.extend(call)
    assert hopper.asked == len(hopper.loaded) == 2
    for number, call in enumerate(calls):
        for kernel in range(2):
            arguments = named(hopper, kernel, number)
            assert (arguments["q"], arguments["slots"]) == (call.q.data_ptr(), call.slots.data_ptr())
        assert named(hopper, 1, number)["states"] == call.states.data_ptr()


def test_gates_of_the_other_kind_are_looked_up(hopper: Lookups, adapter: TritonGatedDeltaRule) -> None:
    call = layer()
    gates = LogGates(g=torch.zeros(TOKENS, HEADS), beta=torch.ones(TOKENS, HEADS))
    for made in (call, replace(call, gates=gates), call):
        adapter.extend(made)
    assert [named(hopper, 0, number)["RAW"] for number in range(3)] == [True, False, True]


def test_a_layer_at_another_alignment_is_walked_over_its_copies(hopper: Lookups, adapter: TritonGatedDeltaRule) -> None:
    """By the strides of the copies, and the one after it by its own again."""
    calls = [layer(), layer(off=1), layer()]
    for call in calls:
        adapter.extend(call)
    own = (2 * KEY_HEADS + HEADS) * WIDTH
    for kernel in range(2):
        rows = [named(hopper, kernel, number)["q_row"] for number in range(3)]
        assert rows == [own, KEY_HEADS * WIDTH, own]
        assert [named(hopper, kernel, number)["q"] == call.q.data_ptr() for number, call in enumerate(calls)] == [
            True, False, True,
        ]  # fmt: skip


def test_sequences_of_no_token_are_launched_nowhere(hopper: Lookups, adapter: TritonGatedDeltaRule) -> None:
    call = layer()
    gates = replace(call.gates, a=call.gates.a[:0], b=call.gates.b[:0])
    adapter.extend(replace(
        call, q=call.q[:0], k=call.k[:0], v=call.v[:0], gates=gates, cu_seqlens=torch.zeros_like(call.cu_seqlens),
        seq_lens_host=(0, 0),
    ))  # fmt: skip
    assert hopper.launched == []
