"""What gdn_integration.py shows: claims with goals, and the containers that they are measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import qwen35
from gdn_paths import plan_of
from qwen35.container import Container
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import GatedDeltaRule
from qwen35.services.gated_delta_rule import PORT, GatedDeltaRuleService
from qwen35.services.registry import AdapterRegistry


@dataclass
class Claim:
    """One thing shown: ``value`` in ``unit``, to be ``at_least`` or ``at_most`` a goal (neither: only reported)."""

    part: str
    what: str
    value: float | None = None
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    @property
    def met(self) -> bool | None:
        """None: there is no goal, or nothing was measured, for the reasons given."""
        if self.value is None or (self.at_least is None and self.at_most is None):
            return None
        enough = self.at_least is None or self.value >= self.at_least
        return enough and (self.at_most is None or self.value <= self.at_most)

    def as_row(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


@dataclass
class Session:
    seed: int
    geometry: GdnGeometry
    registry: AdapterRegistry
    profile: bool = False
    made: list[Container] = field(default_factory=list)

    def container(self, name: str, **settings: Any) -> Container:
        """One container whose three phases go to ``name``."""
        made = qwen35.build(gdn_decode=name, gdn_extend=name, gdn_verify=name, device="cuda", **settings)
        self.made.append(made)
        return made

    def rule(
        self, name: str, state: torch.dtype, batch: int, tokens: int = 0, **settings: Any
    ) -> GatedDeltaRuleService:
        rule: GatedDeltaRuleService = self.container(name, **settings).gated_delta_rule()
        rule.prepare(plan_of(self.geometry, state, batch, tokens))
        return rule

    def bare(self, name: str, state: torch.dtype, batch: int, tokens: int = 0) -> GatedDeltaRule:
        """The adapter without container and guard."""
        adapter: GatedDeltaRule = qwen35.adapter(PORT, name, device="cuda")
        adapter.prepare(plan_of(self.geometry, state, batch, tokens))
        return adapter

    def close(self) -> None:
        """Close what was made, so that no part holds another's memory."""
        for made in self.made:
            made.gated_delta_rule().close()
        self.made.clear()
        torch.cuda.empty_cache()


def more(
    part: str, what: str, times: Mapping[str, float | None], pair: tuple[str, str], at_most: float | None = None,
    detail: dict[str, Any] | None = None,
) -> Claim:  # fmt: skip
    """Percent by which the first of ``pair`` takes longer than the second."""
    ours, theirs = times[pair[0]], times[pair[1]]
    claim = Claim(part, what, unit="percent more", at_most=at_most, detail=detail or {})
    if ours is None or theirs is None:
        claim.reasons.append("a call waits for the device: its queue cannot be kept full")
    else:
        claim.value = 100 * (ours / theirs - 1)
    return claim


def faster(
    part: str, what: str, times: Mapping[str, float | None], pair: tuple[str, str], at_least: float | None,
    detail: dict[str, Any],
) -> Claim:  # fmt: skip
    """How many times faster the first of ``pair`` is than the second."""
    ours, theirs = times[pair[0]], times[pair[1]]
    claim = Claim(part, what, unit="times faster", at_least=at_least, detail=detail)
    if ours is None or theirs is None:
        claim.reasons.append("a call waits for the device: its queue cannot be kept full")
    else:
        claim.value = theirs / ours
    return claim
