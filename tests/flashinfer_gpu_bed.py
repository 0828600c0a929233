"""FlashInfer's adapter over the real kernels on a GPU, with seeded calls and the float64 oracle.

Heads are 8/2 wherever nothing else is needed, so that every kernel is compiled once.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.domain.capabilities import Phase
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.gated_delta_rule import DecodeCall, GdnPlan, RawGates
from qwen35.services.platform import detect_platform

BF16, F32 = torch.bfloat16, torch.float32
H, HV, W = 2, 8, 128
NULL = 1


class Bench:
    """Adapters over the real kernels, seeded calls, and the float64 oracle."""

    def __init__(self) -> None:
        from qwen35.adapters.flashinfer.entries import create, probe

        self.platform = detect_platform("cuda")
        support = probe(self.platform)
        if not support:
            pytest.skip("; ".join(support.reasons))
        self.device = torch.device(self.platform.device)
        self._create, self.made = create, []
        self.oracle = ReferenceGatedDeltaRule(torch.float64, "cuda")
        self.reseed(random.randrange(2**31))

    def reseed(self, seed: int) -> None:
        self.seed = seed
        self.source = torch.Generator(device=self.device).manual_seed(seed)

    def adapter(self, state: torch.dtype = F32, *, null: int | None = NULL, pad: bool = True, split: str = "auto"):
        adapter = self._create(self.platform, AdapterOptions(prefill_split=split))
        self.made.append(adapter)
        adapter.prepare(
            GdnPlan(
                geometry=GdnGeometry(key_heads=H, value_heads=HV, key_width=W, value_width=W), state_dtype=state,
                device=self.device, max_batch=8, max_tokens=2200, max_draft=3, null_slot=null, may_pad=pad,
            )
        )  # fmt: skip
        return adapter

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=self.source, device=self.device).to(dtype)

    def ints(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def pool(self, state: torch.dtype, slots: int = 6, gap: int = 0) -> Tensor:
        """Slots ``gap`` elements apart, NaN between."""
        size = HV * W * W
        base = torch.full((slots, size + gap), float("nan"), dtype=state, device=self.device)
        base[:, :size] = self.randn(slots, size, dtype=state)
        return base[:, :size].unflatten(1, (HV, W, W))

    def tokens(self, *leading: int) -> dict[str, object]:
        return {
            "q": 3 * self.randn(*leading, H, W), "k": self.randn(*leading, H, W), "v": self.randn(*leading, HV, W),
            "gates": RawGates(
                a=self.randn(*leading, HV), b=self.randn(*leading, HV), A_log=self.randn(HV, dtype=F32),
                dt_bias=self.randn(HV),
            ),
        }  # fmt: skip

    def true_decode(self, call: DecodeCall) -> tuple[Tensor, Tensor]:
        states = call.states.double()
        out = self.oracle.decode(replace(wide(call), states=states, out=None))
        return out, states


def wide(call):
    """The call in float64, gates included."""
    gates = RawGates(**{n: getattr(call.gates, n).double() for n in ("a", "b", "A_log", "dt_bias")})
    return replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double(), gates=gates)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def within(bench: Bench, adapter, phase: Phase, state: torch.dtype, *pairs: tuple[str, Tensor, Tensor]) -> None:
    name = str(state).removeprefix("torch.")
    bound = adapter.capabilities.precision[phase].bound("bfloat16", name)
    for what, got, want in pairs:
        limit = bound.output if what == "out" else bound.state
        off = error(got, want)
        assert off <= limit, f"{phase} {name} {what}: error {off:.2e} above {limit:.2e}, seed {bench.seed}"


def untouched(before: Tensor, after: Tensor, slots: set[int], what: str) -> None:
    for slot in slots:
        assert torch.equal(before[slot], after[slot]), f"{what}: slot {slot} changed"
