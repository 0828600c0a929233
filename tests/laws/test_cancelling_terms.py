"""Outputs that cancel: where k and q are orthogonal, an output is tiny against the terms of which it is the sum, and
its error is judged by those."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.domain.capabilities import GateKind, Phase
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, ExtendResult, VerifyCall
from qwen35.testing import Bench, Case, GdnSizes, Law, LawStatus, Profile, limits_for, relative_error, run_law
from qwen35.testing.gdn_kit import GdnKit
from qwen35.testing.number_laws import number_laws
from qwen35.testing.sequence_laws import sequence_laws
from qwen35.testing.size_laws import size_laws

PHASES = (Phase.DECODE, Phase.EXTEND, Phase.VERIFY)


class Orthogonal(GdnKit):
    """Tokens whose k.q is 0 on paper and not in float32 (x, y and y, -x, pair by pair), and which no state outlives:
    every output is beta * v * (k.q)."""

    def tokens(self, sizes: GdnSizes, leading: tuple[int, ...], source: torch.Generator) -> dict[str, Tensor]:
        made = super().tokens(sizes, leading, source)
        q = made["q"]
        turned = torch.stack([q[..., 1::2], -q[..., 0::2]], dim=-1).flatten(-2)
        return made | {"k": turned, "g": torch.full_like(made["g"], -1e4)}


class Turning(ReferenceGatedDeltaRule):
    """Plain torch in float32, right, that sums over K from the other end in every second call."""

    def __init__(self) -> None:
        super().__init__(torch.float32, "cpu")
        self._backwards = False

    def decode(self, call: DecodeCall) -> Tensor:
        return self._turned(super().decode, call)

    def extend(self, call: ExtendCall) -> ExtendResult:
        result = self._turned(super().extend, call)
        kept = result.checkpoints
        return result if kept is None or not self._backwards else replace(result, checkpoints=kept.flip(-1))

    def verify(self, call: VerifyCall) -> Tensor:
        return self._turned(super().verify, call)

    def _turned(self, serve: Callable[[Any], Any], call: Any) -> Any:
        self._backwards = not self._backwards
        if not self._backwards:
            return serve(call)
        kept = [call.states, call.intermediates] if isinstance(call, VerifyCall) else [call.states]
        for states in kept:
            states.copy_(states.flip(-1))
        try:
            return serve(replace(call, q=call.q.flip(-1), k=call.k.flip(-1)))
        finally:
            for states in kept:
                states.copy_(states.flip(-1))


class RoundsQueries(Turning):
    """Rounds q to bfloat16."""

    def _turned(self, serve: Callable[[Any], Any], call: Any) -> Any:
        return super()._turned(serve, replace(call, q=call.q.bfloat16().float()))


def bench_of(make: Callable[[], Turning]) -> Bench:
    adapter = make()
    limits = limits_for(adapter.capabilities, Profile.CPU)
    limits = replace(limits, gates=(GateKind.LOG,), token_dtypes=(torch.float32,), max_tokens=20)
    return Bench(adapter, Orthogonal(), "cpu", limits, make)


def laws() -> list[Any]:
    kit = Orthogonal()
    every = (*number_laws(kit), *sequence_laws(kit), *size_laws(kit))
    # Far pools take gigabytes; softplus is of raw gates, by which here a state would outlive a token.
    return [pytest.param(law, id=law.name) for law in every if not re.search(r"2\*\*31|softplus", law.name)]


@pytest.mark.parametrize("law", laws())
def test_an_output_that_cancels_is_judged_by_its_terms(law: Law) -> None:
    report = run_law(law, bench_of(Turning), examples=10, shrink=False)
    assert report.status is LawStatus.PASSED, str(report)


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_off_by_more_than_the_rounding_of_its_terms_is_caught(phase: Phase) -> None:
    (law,) = (law for law in number_laws(Orthogonal()) if law.name == f"{phase}: within the stated bound of the oracle")
    report = run_law(law, bench_of(RoundsQueries), examples=100, shrink=False)
    assert report.status is LawStatus.FAILED, str(report)
    assert "out: relative error" in report.reason


@pytest.mark.parametrize("phase", PHASES)
def test_against_the_output_alone_a_right_adapter_is_far_beyond_its_bound(phase: Phase, seed: int) -> None:
    more: dict[Phase, dict[str, Any]] = {
        Phase.DECODE: {}, Phase.EXTEND: {"lengths": (1, 1, 1)}, Phase.VERIFY: {"draft": 1, "nodes": 1, "capacity": 3},
    }  # fmt: skip
    sizes = GdnSizes(key_heads=1, value_heads=1, key_width=8, value_width=16, gates=GateKind.LOG)
    trial = bench_of(Turning).trial(Case(phase=phase, sizes=sizes, seed=seed, pool=3, slots=(0, 2, 1), **more[phase]))
    want = trial.truth()
    served = trial.run()
    assert served.out is not None
    assert want.out is not None
    assert relative_error(served.out, want.out) > 1e3 * trial.bound().output
    trial.matches(served, want)
