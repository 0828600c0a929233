"""The gated delta rule as the container offers it: an adapter a phase, checked where asked, counted always."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType

from torch import Tensor

from qwen35.domain.alignment import CapturedBranch, replay_reasons
from qwen35.domain.capabilities import Capabilities, Phase, Support
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.adapter import HoldsScratch, SaysBranches
from qwen35.ports.admission import check_call
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    GatedDeltaRule,
    GdnCall,
    GdnPlan,
    ReplayPlan,
    VerifyCall,
)
from qwen35.ports.support import phase_of
from qwen35.services.counters import Counters
from qwen35.services.devices import capturing, on
from qwen35.services.routing import Decision, Route, placement

PORT = "gated_delta_rule"
_STATES = attrgetter("states")


class GatedDeltaRuleService:
    """Routes each phase to its adapter (commit goes with verify).

    ``adapters`` maps decode, extend and verify to (name, adapter). In ``checked`` mode the values of slots,
    offsets, rows and parents are read from the device before each eager call, which synchronises.
    """

    def __init__(
        self, adapters: Mapping[Phase, tuple[str, GatedDeltaRule]], counters: Counters,
        fallback: tuple[str, GatedDeltaRule] | None = None, checked: bool = False,
    ) -> None:  # fmt: skip
        self._adapters = {**adapters, Phase.COMMIT: adapters[Phase.VERIFY]}
        self._fallback, self._checked, self._counters = fallback, checked, counters
        (d_name, d), (e_name, e), (v_name, v) = (adapters[p] for p in (Phase.DECODE, Phase.EXTEND, Phase.VERIFY))
        f_name, f = fallback or ("", None)
        saying = {name: adapter for name, adapter in self._used() if isinstance(adapter, SaysBranches)}
        self._decode = Route(
            PORT, Phase.DECODE, DecodeCall, (d_name, d.decode), None if f is None else (f_name, f.decode), counters,
            _STATES, _tensors, partial(_branch, saying, Phase.DECODE),
        )  # fmt: skip
        self._extend = Route(
            PORT, Phase.EXTEND, ExtendCall, (e_name, e.extend), None if f is None else (f_name, f.extend), counters,
            _STATES, _tensors, partial(_branch, saying, Phase.EXTEND),
        )  # fmt: skip
        self._verify = Route(
            PORT, Phase.VERIFY, VerifyCall, (v_name, v.verify), None if f is None else (f_name, f.verify), counters,
            _STATES, _tensors, partial(_branch, saying, Phase.VERIFY),
        )  # fmt: skip
        self._commit = Route(
            PORT, Phase.COMMIT, CommitCall, (v_name, v.commit), None if f is None else (f_name, f.commit), counters,
            _STATES, _tensors, partial(_branch, saying, Phase.COMMIT),
        )  # fmt: skip

    @property
    def capabilities(self) -> Capabilities:
        """What every phase's chosen adapter can do at once; the fallback is not counted in."""
        by_phase = {phase: adapter.capabilities for phase, (_, adapter) in self._adapters.items()}
        merged = by_phase[Phase.DECODE]
        for can in by_phase.values():
            merged = _both(merged, can)
        return replace(
            merged,
            phases=frozenset(p for p, can in by_phase.items() if p in can.phases),
            raw_only=frozenset(p for p, can in by_phase.items() if p in can.raw_only),
            trees=by_phase[Phase.VERIFY].trees,
            checkpoints=by_phase[Phase.EXTEND].checkpoints,
            checkpoint_multiple=by_phase[Phase.EXTEND].checkpoint_multiple,
            captures_extend=by_phase[Phase.EXTEND].captures_extend,
            precision=MappingProxyType({p: can.precision[p] for p, can in by_phase.items() if p in can.precision}),
        )

    @property
    def adapters(self) -> Mapping[Phase, tuple[str, GatedDeltaRule]]:
        """The chosen adapter of each phase and its name."""
        return MappingProxyType(self._adapters)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Who served the latest call of each phase, why, and by which branch where the adapter says so."""
        return tuple(route.last for route in (self._decode, self._extend, self._verify, self._commit))

    @property
    def captured(self) -> tuple[CapturedBranch, ...]:
        """The branch that every captured call took, with its addresses."""
        routes = (self._decode, self._extend, self._verify, self._commit)
        return tuple(branch for route in routes for branch in route.captured)

    def before_replay(self, plan: ReplayPlan) -> Support:
        """Whether what was captured for ``plan.phase`` is what a call with these tensors would do now.

        They must be the very memory that was captured, with the same shape, strides and dtype.
        """
        tensors = {"states": placement(plan.states)}
        if plan.intermediates is not None:
            tensors["intermediates"] = placement(plan.intermediates)
        return Support.of(*replay_reasons(self.captured, plan.phase, tensors))

    def prepare(self, plan: GdnPlan) -> None:
        """Prepare every chosen adapter for what it serves of the plan, and the fallback for all of it, with the plan's
        GPU current. Raises ``UnsupportedError`` where a chosen adapter cannot serve the plan and no fallback can, with
        the reasons of all and once all others are prepared; other refusals are counted."""
        with on(plan.device if isinstance(plan, GdnPlan) else None):
            self._prepare(plan)

    def _prepare(self, plan: GdnPlan) -> None:
        refused: dict[str, tuple[str, ...]] = {}
        for name, adapter in self._used():
            try:
                adapter.prepare(self._part(adapter, plan))
            except UnsupportedError as exc:
                refused[name] = exc.reasons
        chosen = {name for name, _ in self._adapters.values()}
        if chosen & refused.keys() and (self._fallback is None or self._fallback[0] in refused):
            reasons = (reason for own in refused.values() for reason in own)
            raise UnsupportedError(f"plan for {' and for '.join(refused)}", reasons)
        for name, own in refused.items():
            for reason in own:
                self._counters.add("plans_refused", port=PORT, adapter=name, reason=reason)

    def _part(self, adapter: GatedDeltaRule, plan: GdnPlan) -> GdnPlan:
        """``plan`` without tokens or drafts where ``adapter`` is given none; what is no plan is for it to refuse."""
        whole = self._fallback is not None and adapter is self._fallback[1]
        if whole or not isinstance(plan, GdnPlan):
            return plan
        served = {phase for phase, (_, chosen) in self._adapters.items() if chosen is adapter}
        tokens = plan.max_tokens if Phase.EXTEND in served else 0
        return replace(plan, max_tokens=tokens, max_draft=plan.max_draft if Phase.VERIFY in served else 0)

    def supports(self, call: GdnCall) -> Support:
        """Whether the phase's adapter, or else the fallback, would honour ``call``."""
        support = self._adapters[phase_of(call)][1].supports(call)
        if support or self._fallback is None:
            return support
        second = self._fallback[1].supports(call)
        return second if second else Support.of(*support.reasons, *second.reasons)

    def decode(self, call: DecodeCall) -> Tensor:
        """See the port."""
        if self._checked:
            self._check(call)
        return self._decode(call)

    def extend(self, call: ExtendCall) -> ExtendResult:
        """See the port."""
        if self._checked:
            self._check(call)
        return self._extend(call)

    def verify(self, call: VerifyCall) -> Tensor:
        """See the port."""
        if self._checked:
            self._check(call)
        return self._verify(call)

    def commit(self, call: CommitCall) -> None:
        """See the port."""
        if self._checked:
            self._check(call)
        self._commit(call)

    def refresh_parameters(self) -> int:
        """Refresh the copies of every adapter in use."""
        return sum(adapter.refresh_parameters() for _, adapter in self._used())

    def close(self) -> None:
        """Close every adapter in use; what was captured with them is not to be replayed."""
        for _, adapter in self._used():
            adapter.close()
        for route in (self._decode, self._extend, self._verify, self._commit):
            route.captured.clear()

    def _used(self) -> list[tuple[str, GatedDeltaRule]]:
        """Every adapter in use and its name, once each, the fallback last where no phase chose it."""
        used = list(self._adapters.values())
        if self._fallback is not None:
            used.append(self._fallback)
        return list({id(adapter): (name, adapter) for name, adapter in used}.values())

    def _check(self, call: GdnCall) -> None:
        if not capturing():
            check_call(call, values=True)


class ScratchHoldingService(GatedDeltaRuleService):
    """The service over adapters that all say how much scratch they hold: it says it too."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch held now by the adapters of every phase and the fallback."""
        return sum(held.scratch_bytes for _, held in self._used() if isinstance(held, HoldsScratch))

    @property
    def scratch_bound(self) -> int:
        """Bytes of scratch that these adapters never exceed under the current plan."""
        return sum(held.scratch_bound for _, held in self._used() if isinstance(held, HoldsScratch))


def _tensors(call: GdnCall) -> tuple[tuple[str, Tensor], ...]:
    """The tensors on whose place the branch of a captured call hangs."""
    states = (("states", call.states),)
    if isinstance(call, VerifyCall | CommitCall):
        return (*states, ("intermediates", call.intermediates))
    return states


def _branch(saying: Mapping[str, SaysBranches], phase: Phase, name: str) -> str | None:
    """The branch of ``phase`` that the adapter called ``name`` took latest, where it says so."""
    adapter = saying.get(name)
    return None if adapter is None else adapter.branches.get(phase)


def _both(a: Capabilities, b: Capabilities) -> Capabilities:
    """What two adapters can do both."""

    def common(x: frozenset[int] | None, y: frozenset[int] | None) -> frozenset[int] | None:
        return y if x is None else x if y is None else x & y

    return replace(
        a, gates=a.gates & b.gates, token_dtypes=a.token_dtypes & b.token_dtypes,
        state_dtypes=a.state_dtypes & b.state_dtypes, device_types=a.device_types & b.device_types,
        key_widths=common(a.key_widths, b.key_widths), value_widths=common(a.value_widths, b.value_widths),
        head_ratios=common(a.head_ratios, b.head_ratios), byte_alignment=max(a.byte_alignment, b.byte_alignment),
        min_compute_capability=max(a.min_compute_capability or (0, 0), b.min_compute_capability or (0, 0)),
        deviations=MappingProxyType({**a.deviations, **b.deviations}),
    )  # fmt: skip
