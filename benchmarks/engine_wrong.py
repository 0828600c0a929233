"""A gated delta rule that is deliberately wrong, for shadow mode to find: every result is a quarter too large."""

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


class WrongGatedDeltaRule:
    """``right``, whose every result is scaled by ``FACTOR``. Whole pools are scaled, so give it copies only."""

    def __init__(self, right: GatedDeltaRule) -> None:
        self._right = right

    @property
    def capabilities(self) -> Capabilities:
        """Those of ``right``, and the precision that is not kept."""
        return replace(self._right.capabilities, deviations={Clause.PRECISION: "deliberately wrong"})

    def prepare(self, plan: GdnPlan) -> None:
        """See the port."""
        self._right.prepare(plan)

    def supports(self, call: GdnCall) -> Support:
        """See the port."""
        return self._right.supports(call)

    def decode(self, call: DecodeCall) -> Tensor:
        """See the port; wrong."""
        out = self._right.decode(call)
        call.states.mul_(FACTOR)
        return out.mul_(FACTOR)

    def extend(self, call: ExtendCall) -> ExtendResult:
        """See the port; wrong."""
        result = self._right.extend(call)
        call.states.mul_(FACTOR)
        return replace(result, out=result.out.mul_(FACTOR))

    def verify(self, call: VerifyCall) -> Tensor:
        """See the port; wrong."""
        out = self._right.verify(call)
        call.intermediates.mul_(FACTOR)
        return out.mul_(FACTOR)

    def commit(self, call: CommitCall) -> None:
        """See the port; wrong."""
        self._right.commit(call)
        call.states.mul_(FACTOR)

    def refresh_parameters(self) -> int:
        """See the port."""
        return self._right.refresh_parameters()

    def close(self) -> None:
        """See the port."""
        self._right.close()


def _right_entry(platform: Platform) -> AdapterEntry:
    name = "triton" if platform.device_type == "cuda" else "reference"
    (point,) = entry_points(group=ENTRY_POINT_GROUP, name=f"gated_delta_rule.{name}")
    entry: AdapterEntry = point.load()
    return entry


def _create(platform: Platform, options: AdapterOptions) -> Any:
    return WrongGatedDeltaRule(_right_entry(platform).create(platform, options))


GATED_DELTA_RULE = AdapterEntry(
    port="gated_delta_rule", name="wrong", summary="deliberately wrong by a factor, for shadow mode to find",
    probe=lambda platform: _right_entry(platform).probe(platform), create=_create,
)  # fmt: skip
