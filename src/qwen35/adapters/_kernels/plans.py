"""Plans that only widen, so that a second user of an adapter takes nothing from the first."""

from __future__ import annotations

from dataclasses import replace

from qwen35.ports.gdn_calls import GdnPlan


def widened(before: GdnPlan | None, plan: GdnPlan) -> GdnPlan:
    """The plan that serves calls of both, which are of one kind: sizes as large as either's, padding where either may
    pad. The null slot is that of ``plan``, or of the one before where ``plan`` has no rows that pad."""
    if before is None:
        return plan
    return replace(
        plan, max_batch=max(before.max_batch, plan.max_batch), max_tokens=max(before.max_tokens, plan.max_tokens),
        max_draft=max(before.max_draft, plan.max_draft), may_pad=before.may_pad or plan.may_pad,
        null_slot=plan.null_slot if plan.may_pad else before.null_slot,
    )  # fmt: skip
