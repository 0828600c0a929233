"""FlashInfer's adapter over the fake, prepared, with seeded calls to hand it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fake_flashinfer import FakeFlashInfer
from qwen35.adapters.flashinfer.gated_delta_rule import FlashInferGatedDeltaRule
from qwen35.domain.errors import UnsupportedError
from qwen35.domain.geometry import GdnGeometry
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterOptions
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    GdnPlan,
    RawGates,
    VerifyCall,
)
from torch_rows import TorchRows

H, HV, W = 1, 2, 128
GEOMETRY = GdnGeometry(key_heads=H, value_heads=HV, key_width=W, value_width=W)
HOPPER = Platform(device="cpu", device_name="H200", compute_capability=(9, 0), multiprocessors=132)
BF16, F32 = torch.bfloat16, torch.float32


class Bed:
    """An adapter over the fake, prepared for a plan, with seeded calls to hand it."""

    def __init__(
        self, state: torch.dtype = F32, *, null: int | None = None, pad: bool = True, split: str = "auto",
        later: bool = False, platform: Platform = HOPPER, prepared: bool = True,
    ) -> None:  # fmt: skip
        self.seed = random.randrange(2**31)
        self.source = torch.Generator().manual_seed(self.seed)
        self.fake, self.rows, self.state = FakeFlashInfer(later=later), TorchRows(), state
        self.adapter = FlashInferGatedDeltaRule(
            self.fake.kernels(), self.rows, platform, AdapterOptions(prefill_split=split)
        )
        self.plan = GdnPlan(
            geometry=GEOMETRY, state_dtype=state, device=torch.device("cpu"), max_batch=4, max_tokens=300, max_draft=3,
            null_slot=null, may_pad=pad,
        )  # fmt: skip
        if prepared:
            self.adapter.prepare(self.plan)
        self.rows.launches.clear()
        self.fake.calls.clear()

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, generator=self.source).to(dtype)

    def tokens(self, *leading: int) -> dict[str, torch.Tensor | RawGates]:
        return {
            "q": self.randn(*leading, H, W), "k": self.randn(*leading, H, W), "v": self.randn(*leading, HV, W),
            "gates": RawGates(
                a=self.randn(*leading, HV), b=self.randn(*leading, HV), A_log=torch.zeros(HV),
                dt_bias=self.randn(HV, dtype=BF16),
            ),
        }  # fmt: skip

    def decode(self, slots: list[int], pool: int = 6, **changes: object) -> DecodeCall:
        made = {
            "states": self.randn(pool, HV, W, W, dtype=self.state), "slots": torch.tensor(slots, dtype=torch.int32),
            **self.tokens(len(slots)),
        } | changes  # fmt: skip
        return DecodeCall(**made)

    def extend(self, lengths: list[int], slots: list[int], **changes: object) -> ExtendCall:
        offsets = [0, *itertools.accumulate(lengths)]
        made = {
            "states": self.randn(6, HV, W, W, dtype=self.state), "slots": torch.tensor(slots, dtype=torch.int32),
            "cu_seqlens": torch.tensor(offsets, dtype=torch.int32), **self.tokens(offsets[-1]),
        } | changes  # fmt: skip
        return ExtendCall(**made)

    def verify(self, slots: list[int], draft: int = 3, *, nodes: int = 3, **changes: object) -> VerifyCall:
        made = {
            "states": self.randn(6, HV, W, W, dtype=self.state), "slots": torch.tensor(slots, dtype=torch.int32),
            "intermediates": torch.full((len(slots), nodes, HV, W, W), float("nan"), dtype=self.state),
            **self.tokens(len(slots), draft),
        } | changes  # fmt: skip
        return VerifyCall(**made)

    def refusal(self, call: DecodeCall | ExtendCall | VerifyCall | CommitCall) -> str:
        support = self.adapter.supports(call)
        assert not support, "expected a refusal"
        serve = {DecodeCall: self.adapter.decode, ExtendCall: self.adapter.extend, VerifyCall: self.adapter.verify}
        states = call.states.clone()
        with pytest.raises(UnsupportedError) as refused:
            serve[type(call)](call)
        assert refused.value.reasons == support.reasons
        assert torch.equal(states, call.states), "a refusal writes nothing"
        assert not self.fake.calls, "a refusal launches nothing"
        return "; ".join(support.reasons)


# Launches
