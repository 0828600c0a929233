"""Gated delta rules that are deliberately wrong: one for shadow mode to find, whose every result is a quarter too
large, and one for the comparison after a weight update to find, which keeps its copies of the old parameters."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

from torch import Tensor

from qwen35.domain.capabilities import Capabilities, Clause, Support
from qwen35.domain.platform import Platform
from qwen35.ports.adapter import ENTRY_POINT_GROUP, AdapterEntry, AdapterOptions
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    GatedDeltaRule,
    GdnCall,
    GdnPlan,
    VerifyCall,
)

FACTOR = 1.25


class RightGatedDeltaRule:
    """``right``, call by call."""

    def __init__(self, right: GatedDeltaRule) -> None:
        self._right = right

    @property
    def capabilities(self) -> Capabilities:
        """See the port."""
        return self._right.capabilities

    def prepare(self, plan: GdnPlan) -> None:
        """See the port."""
        self._right.prepare(plan)

    def supports(self, call: GdnCall) -> Support:
        """See the port."""
        return self._right.supports(call)

    def decode(self, call: DecodeCall) -> Tensor:
        """See the port."""
        return self._right.decode(call)

    def extend(self, call: ExtendCall) -> ExtendResult:
        """See the port."""
        return self._right.extend(call)

    def verify(self, call: VerifyCall) -> Tensor:
        """See the port."""
        return self._right.verify(call)

    def commit(self, call: CommitCall) -> None:
        """See the port."""
        self._right.commit(call)

    def refresh_parameters(self) -> int:
        """See the port."""
        return self._right.refresh_parameters()

    def close(self) -> None:
        """See the port."""
        self._right.close()


class WrongGatedDeltaRule(RightGatedDeltaRule):
    """Every result is scaled by ``FACTOR``. Whole pools are scaled, so give it copies only."""

    @property
    def capabilities(self) -> Capabilities:
        """And the precision that is not kept."""
        return replace(super().capabilities, deviations={Clause.PRECISION: "deliberately wrong"})

    def decode(self, call: DecodeCall) -> Tensor:
        """Wrong."""
        out = super().decode(call)
        call.states.mul_(FACTOR)
        return out.mul_(FACTOR)

    def extend(self, call: ExtendCall) -> ExtendResult:
        """Wrong."""
        result = super().extend(call)
        call.states.mul_(FACTOR)
        return replace(result, out=result.out.mul_(FACTOR))

    def verify(self, call: VerifyCall) -> Tensor:
        """Wrong."""
        out = super().verify(call)
        call.intermediates.mul_(FACTOR)
        return out.mul_(FACTOR)

    def commit(self, call: CommitCall) -> None:
        """Wrong."""
        super().commit(call)
        call.states.mul_(FACTOR)


class ForgetfulGatedDeltaRule(RightGatedDeltaRule):
    """Right until parameters change: it refreshes none of its copies."""

    def refresh_parameters(self) -> int:
        """Not done; 0."""
        return 0


def _entry(platform: Platform, name: str) -> AdapterEntry:
    """The adapter that a GPU is served by, the reference where there is none."""
    (point,) = entry_points(
        group=ENTRY_POINT_GROUP, name=f"gated_delta_rule.{name if platform.device_type == 'cuda' else 'reference'}"
    )
    entry: AdapterEntry = point.load()
    return entry


def _broken(name: str, right: str, broken: type[RightGatedDeltaRule], summary: str) -> AdapterEntry:
    """``broken`` over the adapter ``right``."""

    def create(platform: Platform, options: AdapterOptions) -> Any:
        return broken(_entry(platform, right).create(platform, options))

    return AdapterEntry(
        port="gated_delta_rule", name=name, summary=summary,
        probe=lambda platform: _entry(platform, right).probe(platform), create=create,
    )  # fmt: skip


GATED_DELTA_RULE = _broken(
    "wrong", "triton", WrongGatedDeltaRule, "deliberately wrong by a factor, for shadow mode to find"
)
#: FlashInfer's decode reads a float32 copy of a bfloat16 dt_bias; Triton's reads the parameters themselves.
FORGETFUL = _broken(
    "forgetful", "flashinfer", ForgetfulGatedDeltaRule, "FlashInfer's, and deliberately keeps old parameters"
)
