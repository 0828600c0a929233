"""The plans that calls are decided under, and what was measured of this release's kernels for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from qwen35.adapters._kernels.plans import null_slot_reasons, widened
from qwen35.adapters.flashinfer.admission import StepCall, phase_of
from qwen35.adapters.flashinfer.behaviour import decode_batches, measure_decode, measure_verify
from qwen35.adapters.flashinfer.mends import Behaviour, Mend, decode_mend, verify_mend
from qwen35.adapters.flashinfer.release import FlashInferKernels
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ConfigurationError
from qwen35.ports.gdn_calls import DecodeCall, ExtendCall, GdnPlan, VerifyCall
from qwen35.ports.gdn_checks import call_geometry


class Plans:
    """One plan for each geometry, pair of dtypes and device. ``generation``: how often one became wider."""

    def __init__(self, kernels: FlashInferKernels) -> None:
        self._kernels, self.generation = kernels, 0
        self._plans: dict[tuple[object, ...], GdnPlan] = {}
        self._stated: set[tuple[object, ...]] = set()
        self._measured: dict[tuple[object, ...], Behaviour] = {}

    @property
    def behaviours(self) -> Mapping[str, Behaviour]:
        """What was measured, by phase and state dtype."""
        return MappingProxyType({f"{key[0]}, {key[1]}": found for key, found in self._measured.items()})

    def adopt(self, plan: GdnPlan, *, stated: bool) -> tuple[GdnPlan, bool]:
        """Widen the plan for calls of this kind by ``plan``; what it is now, and whether that is news.

        ``stated``: by a user, who knows which slot is null; what covers a call does not say. Raises
        ``ConfigurationError`` where another user knows otherwise and a live slot of either would be written. Where one
        names none and the kernel skips padded rows, neither has one from then on: only write slots need it.
        """
        key = _plan_key(plan)
        before = self._plans.get(key)
        wide = widened(before, plan)
        if before is not None:
            reasons = null_slot_reasons(before, plan) if stated and key in self._stated else ()
            if reasons and (None not in (before.null_slot, plan.null_slot) or not self._skip_padding(before, wide)):
                # No fallback answers for this: calls under either plan would still be served under the other's slot.
                raise ConfigurationError(f"a second plan for FlashInfer: {'; '.join(reasons)}")
            named = before.null_slot if plan.null_slot is None else plan.null_slot
            wide = replace(wide, null_slot=None if reasons else named)
        if stated:
            self._stated.add(key)
        self._plans[key] = wide
        news = wide != before
        self.generation += news
        return wide, news

    def covering(self, call: StepCall | ExtendCall) -> GdnPlan:
        """The plan for such calls where it covers ``call``, or the smallest that covers both."""
        batch = call.slots.shape[0]
        tokens = call.v.shape[0] if isinstance(call, ExtendCall) else 0
        draft = call.q.shape[1] if isinstance(call, VerifyCall) else 0
        least = GdnPlan(
            geometry=call_geometry(call), state_dtype=call.states.dtype, device=call.states.device, max_batch=batch,
            max_tokens=tokens, max_draft=draft, token_dtype=call.q.dtype,
        )  # fmt: skip
        plan = self._plans.get(_plan_key(least))
        if plan is None:
            return least
        if batch <= plan.max_batch and tokens <= plan.max_tokens and draft <= plan.max_draft:
            return plan
        return replace(
            plan, max_batch=max(batch, plan.max_batch), max_tokens=max(tokens, plan.max_tokens),
            max_draft=max(draft, plan.max_draft),
        )  # fmt: skip

    def ready(self, phase: Phase, plan: GdnPlan) -> bool:
        """Whether ``plan`` was adopted and its kernels of ``phase`` were measured."""
        return plan == self._plans.get(_plan_key(plan)) and _behaviour_key(phase, plan) in self._measured

    def measure(self, phase: Phase, plan: GdnPlan) -> None:
        """Run the kernels of ``phase`` once, which also compiles them, unless that was done."""
        key = _behaviour_key(phase, plan)
        if key not in self._measured:
            measure = measure_decode if phase is Phase.DECODE else measure_verify
            self._measured[key] = measure(self._kernels, plan)

    def mend(self, call: StepCall, plan: GdnPlan) -> Mend:
        """The detours of ``call`` under ``plan``; one without rows takes none."""
        if not call.q.shape[0]:
            return Mend()
        behaviour = self._behaviour(phase_of(call), plan)
        if isinstance(call, DecodeCall):
            return decode_mend(call, plan, behaviour)
        return verify_mend(call, plan, behaviour)

    def _skip_padding(self, *plans: GdnPlan) -> bool:
        """Whether the decode kernels of all ``plans``, as far as they were measured, touch nothing for padded rows."""
        return all(self._behaviour(Phase.DECODE, plan).skips_padding for plan in plans)

    def _behaviour(self, phase: Phase, plan: GdnPlan) -> Behaviour:
        known = self._measured.get(_behaviour_key(phase, plan))
        if known is not None:
            return known
        # 0.6.18: the float32 decode skips padding and takes any gate; nothing else does.
        float32 = plan.state_dtype == torch.float32
        return Behaviour(skips_padding=float32, finite_softplus=float32 and phase is Phase.DECODE)


def _behaviour_key(phase: Phase, plan: GdnPlan) -> tuple[object, ...]:
    """Heads are part of it because measuring also compiles, rows because kernels are chosen by them."""
    dtype = str(plan.state_dtype).removeprefix("torch.")
    size = plan.max_draft if phase is Phase.VERIFY else decode_batches(plan)
    return (str(phase), dtype, plan.geometry, plan.token_dtype, plan.device, size)


def _plan_key(plan: GdnPlan) -> tuple[object, ...]:
    return (plan.geometry, plan.state_dtype, plan.token_dtype, plan.device)
