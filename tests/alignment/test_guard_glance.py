"""The guard's first glance says the same as the rule: the very call goes through exactly where nothing is off."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fakes
from qwen35.domain.alignment import misalignment
from qwen35.domain.capabilities import Support
from qwen35.ports.gated_delta_rule import DecodeCall, RawGates
from qwen35.services.alignment_guard import AlignmentGuard
from qwen35.services.counters import Counters
from qwen35.services.scratch import empty_aligned

CPU = torch.device("cpu")


class Recorder(fakes.FakeGatedDeltaRule):
    """Wants 32 bytes."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.capabilities = replace(self.capabilities, byte_alignment=32)

    def supports(self, call: object) -> Support:
        return Support.of()


def strided(shape: tuple[int, ...], dtype: torch.dtype, gap: int, start: int) -> Tensor:
    """Rows ``gap`` elements further apart than dense ones, the first ``start`` elements past an aligned address."""
    rows, width = shape[0], torch.Size(shape[1:]).numel()
    room = empty_aligned((rows * (width + gap) + start,), dtype, CPU, 32)
    view = room[start:].view(rows, width + gap)[:, :width].unflatten(1, shape[1:])
    return view.copy_(torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_call_itself_passes_exactly_where_every_row_is_aligned(dtype: torch.dtype, seed: int) -> None:
    source = random.Random(seed)
    seen = set()
    for _ in range(60):
        batch = source.choice([1, 2, 3])

        def tensor(*shape: int) -> Tensor:
            gap, start = (source.choice([0, 0, 0, 0, 8, 16, 3]) for _ in range(2))
            return strided(shape, dtype, gap, start)

        tokens = {"q": tensor(batch, 2, 16), "k": tensor(batch, 2, 16), "v": tensor(batch, 16, 16)}
        gates = RawGates(a=tensor(batch, 16), b=tensor(batch, 16), A_log=torch.zeros(16), dt_bias=torch.zeros(16))
        aligned = {"states": empty_aligned((4, 16, 16, 16), torch.float32, CPU, 32).normal_()}
        gates = replace(
            gates, **{n: empty_aligned((16,), torch.float32, CPU, 32).zero_() for n in ("A_log", "dt_bias")}
        )
        slots = empty_aligned((batch,), torch.int32, CPU, 32).copy_(torch.arange(batch))
        call = DecodeCall(**tokens, **aligned, gates=gates, slots=slots)
        off = any(misalignment(t, t.element_size(), 32) for t in (*tokens.values(), gates.a, gates.b))
        adapter = Recorder()
        AlignmentGuard("recorder", adapter, Counters()).decode(call)
        got = adapter.calls[0]
        assert (got is call) == (not off)
        assert torch.equal(got.q, call.q)
        assert got.q.data_ptr() % 32 == 0
        seen.add(off)
    assert seen == {True, False}
