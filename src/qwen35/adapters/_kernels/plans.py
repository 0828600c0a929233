"""Plans that only widen, so that a second user of an adapter takes nothing from the first."""

from __future__ import annotations

from dataclasses import replace

from qwen35.ports.gdn_calls import GdnPlan


def widened(before: GdnPlan | None, plan: GdnPlan) -> GdnPlan:
    """The plan that serves calls of both, which are of one kind: sizes as large as either's, padding where either may
    pad. The null slot is that of ``plan``, unless rows of the one before alone may pad or ``plan`` names none for rows
    that never do."""
    if before is None:
        return plan
    keep = not plan.may_pad and (before.may_pad or plan.null_slot is None)
    return replace(
        plan, max_batch=max(before.max_batch, plan.max_batch), max_tokens=max(before.max_tokens, plan.max_tokens),
        max_draft=max(before.max_draft, plan.max_draft), may_pad=before.may_pad or plan.may_pad,
        null_slot=before.null_slot if keep else plan.null_slot,
    )  # fmt: skip
