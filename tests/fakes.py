"""Fakes that implement ports, and small calls to hand them."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.domain.capabilities import Capabilities, Clause, Support
from qwen35.domain.errors import UnsupportedError
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import AdapterEntry
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    GdnCall,
    GdnPlan,
    LogGates,
    VerifyCall,
)


class FakeGatedDeltaRule:
    """Records its calls, fills outputs with ``mark`` and refuses with ``reasons`` where there are any."""

    def __init__(self, mark: float, reasons: tuple[str, ...] = (), deviations: dict[Clause, str] | None = None) -> None:
        self.mark, self.reasons = mark, reasons
        self.calls: list[GdnCall] = []
        self.plans: list[GdnPlan] = []
        self.closed = 0
        self.capabilities = Capabilities(deviations=deviations or {})

    def prepare(self, plan: GdnPlan) -> None:
        if self.reasons:
            raise UnsupportedError("plan", self.reasons)
        self.plans.append(plan)

    def supports(self, call: GdnCall) -> Support:
        return Support.of(*self.reasons)

    def _serve(self, call: GdnCall) -> None:
        if self.reasons:
            raise UnsupportedError(type(call).__name__, self.reasons)
        self.calls.append(call)

    def decode(self, call: DecodeCall) -> Tensor:
        self._serve(call)
        return torch.full_like(call.v, self.mark)

    def extend(self, call: ExtendCall) -> ExtendResult:
        self._serve(call)
        return ExtendResult(out=torch.full_like(call.v, self.mark))

    def verify(self, call: VerifyCall) -> Tensor:
        self._serve(call)
        return torch.full_like(call.v, self.mark)

    def commit(self, call: CommitCall) -> None:
        self._serve(call)

    def refresh_parameters(self) -> int:
        return 1

    def close(self) -> None:
        self.closed += 1


def fake_entry(name: str, adapter: FakeGatedDeltaRule, rank: int = 0, unusable: tuple[str, ...] = ()) -> AdapterEntry:
    """An entry that offers ``adapter`` as the gated delta rule called ``name``."""

    def probe(_: Platform) -> Support:
        return Support.of(*unusable)

    return AdapterEntry(
        port="gated_delta_rule", name=name, summary="fake", probe=probe, create=lambda *_: adapter, rank=rank
    )


def decode_call(slots: tuple[int, ...] = (0, 1), pool: int = 3) -> DecodeCall:
    """A small legal call: H = 1, HV = 2, K = 4, V = 3, float32 on the CPU."""
    batch = len(slots)
    return DecodeCall(
        q=torch.randn(batch, 1, 4), k=torch.randn(batch, 1, 4), v=torch.randn(batch, 2, 3),
        gates=LogGates(g=-torch.rand(batch, 2), beta=torch.rand(batch, 2)),
        states=torch.randn(pool, 2, 3, 4), slots=torch.tensor(slots, dtype=torch.int32),
    )  # fmt: skip
