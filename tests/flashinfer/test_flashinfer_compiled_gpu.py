"""The kernels that FlashInfer's decode compiled are found on a GPU, and launched without its functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashinfer_gpu_bed import BF16, F32, HV, NULL, Bench, H, W, within
from qwen35.domain.capabilities import Phase
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.gated_delta_rule import DecodeCall, GdnPlan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

#: Rows for which FlashInfer takes its kernel of many rows: 512 states and more.
MANY = 128


class Counted:
    """FlashInfer's functions, which count how often they are called."""

    def __init__(self) -> None:
        from qwen35.adapters.flashinfer.release import load

        self.calls, kernels = 0, load()
        short = kernels.decode_bf16
        self.kernels = replace(
            kernels, decode=self._counted(kernels.decode), decode_bf16=None if short is None else self._counted(short)
        )

    def _counted(self, function: Callable[..., Any] | None) -> Callable[..., Any]:
        assert function is not None

        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            return function(*arguments, **named)

        return call


def cut_from_wider(tokens: dict[str, Any]) -> dict[str, Any]:
    """The same with q, k and v as columns of wider rows, NaN between."""

    def cut(rows: Tensor) -> Tensor:
        room = rows.new_full((rows.shape[0], 2 * rows[0].numel()), float("nan"))
        return room[:, : rows[0].numel()].view(rows.shape).copy_(rows)

    return tokens | {name: cut(tokens[name]) for name in ("q", "k", "v")}


@pytest.mark.parametrize("state", [F32, BF16], ids=str)
@pytest.mark.parametrize("batch", [1, 3, MANY])
@pytest.mark.parametrize("split", [False, True], ids=["in place", "write slots"])
@pytest.mark.parametrize("gap", [0, 64], ids=["contiguous", "paged"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_layout_is_launched_directly_from_its_second_call_on(
    bench: Bench, state: torch.dtype, batch: int, split: bool, gap: int, packed: bool
) -> None:
    from qwen35.adapters._kernels.rows import triton_rows
    from qwen35.adapters.flashinfer.gated_delta_rule import FlashInferGatedDeltaRule

    counted = Counted()
    adapter = FlashInferGatedDeltaRule(counted.kernels, triton_rows(), bench.platform, AdapterOptions())
    adapter.prepare(
        GdnPlan(
            geometry=GdnGeometry(key_heads=H, value_heads=HV, key_width=W, value_width=W), state_dtype=state,
            device=bench.device, max_batch=MANY, max_tokens=0, max_draft=0, null_slot=NULL,
        )
    )  # fmt: skip
    if counted.kernels.backend:
        pytest.skip("0.7 keeps its kernels by other keys: its functions are called")
    slots = [2 + i for i in range(batch)]
    if batch > 1:
        slots[1] = -1
    first = int(counted.calls)
    for turn in range(3):
        tokens = bench.tokens(batch)
        call = DecodeCall(
            **(cut_from_wider(tokens) if packed else tokens), slots=bench.ints(*slots),
            states=bench.pool(state, slots=2 * batch + 2, gap=gap),
            write_slots=bench.ints(*(s + batch if s >= 0 else -1 for s in slots)) if split else None,
        )  # fmt: skip
        want, states = bench.true_decode(call)
        out = adapter.decode(call)
        live = [i for i, s in enumerate(slots) if s >= 0]
        written = [slots[i] + (batch if split else 0) for i in live]
        within(
            bench, adapter, Phase.DECODE, state, ("out", out[live], want[live]),
            ("state", call.states[written], states[written]),
        )  # fmt: skip
        assert counted.calls == first + 1, f"call {turn} went through FlashInfer's function, seed {bench.seed}"
    adapter.close()
