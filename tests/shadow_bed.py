"""Cases, a reference that can be spoilt, and containers with it as shadow or as the served adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import qwen35
from fakes import fake_entry
from qwen35.container import Container
from qwen35.domain.capabilities import Capabilities, GateKind, Phase, Support
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    GatedDeltaRule,
    GdnCall,
    GdnPlan,
    LogGates,
    VerifyCall,
)
from qwen35.testing import KITS, Case, GdnSizes
from qwen35.testing.kit import Served, serve
from qwen35.testing.make import Made, make_parts

CPU = torch.device("cpu")
KIT = KITS["gated_delta_rule"]
SIZES = GdnSizes(key_heads=1, value_heads=2, key_width=8, value_width=8)
CASES: dict[str, Case[GdnSizes]] = {
    "decode, padding, write slots": Case(
        phase=Phase.DECODE, sizes=SIZES, seed=0, pool=9, slots=(4, -1, 7, 2), write_slots=(6, -1, 7, -1), packed=True,
        paged=True, own_out=True,
    ),
    "decode, log gates, bfloat16": Case(
        phase=Phase.DECODE, seed=0, pool=5, slots=(3, 0), long=True,
        sizes=replace(SIZES, gates=GateKind.LOG, token_dtype=torch.bfloat16, state_dtype=torch.bfloat16),
    ),
    "extend, fresh, checkpoints": Case(
        phase=Phase.EXTEND, sizes=SIZES, seed=0, pool=8, slots=(5, -1, 1, 3), lengths=(5, 3, 4, 0), every=2,
        fresh=(False, False, True, False), write_slots=(5, -1, 7, 3), host_lengths=True, paged=True,
    ),
    "verify, tree, rows": Case(
        phase=Phase.VERIFY, sizes=SIZES, seed=0, pool=6, slots=(5, -1, 2), draft=3, nodes=4, capacity=7, rows=(6, 0, 3),
        parents=((-1, 0, 0), (-1, 0, 1), (-1, -1, 1)), own_out=True,
    ),
    "verify, chain": Case(
        phase=Phase.VERIFY, sizes=SIZES, seed=0, pool=6, slots=(-1, 5, 2), draft=2, nodes=2, capacity=4
    ),
    "commit": Case(
        phase=Phase.COMMIT, sizes=SIZES, seed=0, pool=6, slots=(4, -1, 0), draft=3, nodes=3, capacity=5, rows=(4, 4, 1),
        last=(2, 0, -1),
    ),
    "commit, rows in order": Case(
        phase=Phase.COMMIT, sizes=SIZES, seed=0, pool=6, slots=(4, -1, 0), draft=3, nodes=3, capacity=3, last=(2, 0, 1)
    ),
    "nothing": Case(phase=Phase.DECODE, sizes=SIZES, seed=0, pool=2, slots=()),
}  # fmt: skip
TOKENS = [name for name, case in CASES.items() if case.phase is not Phase.COMMIT and case.slots]


class Wrapped:
    """The reference with ``before`` on each call, which may change it or raise, and ``after`` it on the call served."""

    def __init__(
        self, before: Callable[[Any], Any] = lambda call: call, after: Callable[[Any], None] = lambda _: None,
        reasons: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._inner: GatedDeltaRule = qwen35.adapter("gated_delta_rule", "reference", device="cpu")
        self._before, self._after, self.reasons = before, after, reasons
        self.calls: list[GdnCall] = []
        self.plans: list[GdnPlan] = []
        self.refreshed = self.closed = 0

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def prepare(self, plan: GdnPlan) -> None:
        if self.reasons:
            raise UnsupportedError("plan", self.reasons)
        self.plans.append(plan)

    def supports(self, call: GdnCall) -> Support:
        return Support.of(*self.reasons)

    def _serve(self, call: Any) -> Served:
        self.calls.append(call)
        served = serve(self._inner, self._before(call))
        self._after(call)
        return served

    def decode(self, call: DecodeCall) -> Tensor:
        out = self._serve(call).out
        assert out is not None
        return out

    def extend(self, call: ExtendCall) -> ExtendResult:
        served = self._serve(call)
        assert served.out is not None
        return ExtendResult(out=served.out, checkpoints=served.checkpoints)

    def verify(self, call: VerifyCall) -> Tensor:
        out = self._serve(call).out
        assert out is not None
        return out

    def commit(self, call: CommitCall) -> None:
        self._serve(call)

    def refresh_parameters(self) -> int:
        self.refreshed += 1
        return 1

    def close(self) -> None:
        self.closed += 1


@dataclass
class Run:
    """One call as served, and every buffer behind it afterwards."""

    made: Made
    served: Served

    def tensors(self) -> list[Tensor]:
        slabs = [self.made.pool, self.made.out, self.made.intermediates]
        bases = [slab.base for slab in slabs if slab is not None]
        returned = [t for t in (self.served.out, self.served.checkpoints) if t is not None]
        return [*bases, *self.made.inputs.values(), *returned]


def run(rule: GatedDeltaRule, case: Case[GdnSizes], seed: int) -> Run:
    made = make_parts(KIT, replace(case, seed=seed), CPU)
    return Run(made, serve(rule, KIT.call(case.phase, made.parts)))


def build(shadow: Any, rate: float = 1.0, primary: Any = None, **settings: Any) -> Container:
    served: Any = primary or Wrapped()
    entries = [fake_entry("shade", shadow), fake_entry("served", served)]
    names: dict[str, Any] = {f"gdn_{phase}": "served" for phase in ("decode", "extend", "verify")}
    return qwen35.build(device="cpu", adapters=entries, gdn_shadow=f"shade:{rate}", **names, **settings)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def undisturbed(shadowed: Run, alone: Run, context: object) -> None:
    ours, theirs = shadowed.tensors(), alone.tensors()
    assert len(ours) == len(theirs), context
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True)), f"the served result changed; {context}"


def beta_rounded(call: Any) -> Any:
    """The mistake that engines make: beta in the tokens' dtype, here coarser to show in any dtype."""
    if isinstance(call, CommitCall):
        return call
    name = "beta" if isinstance(call.gates, LogGates) else "b"
    rounded = (getattr(call.gates, name).float() * 2).round() / 2
    return replace(call, gates=replace(call.gates, **{name: rounded.to(getattr(call.gates, name).dtype)}))


def transposed(call: Any) -> None:
    call.states.copy_(call.states.transpose(-1, -2).clone())


def spoil_everything(call: Any) -> None:
    """Write whatever a careless kernel could reach."""
    for name in ("q", "k", "v", "states", "intermediates", "slots", "rows", "cu_seqlens", "last", "parents", "out"):
        tensor = getattr(call, name, None)
        if tensor is not None:
            tensor.fill_(0)
