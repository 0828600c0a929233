"""Plans that only widen, so that a second user of an adapter takes nothing from the first."""

from __future__ import annotations

from dataclasses import replace

from qwen35.ports.gdn_calls import GdnPlan


def widened(before: GdnPlan | None, plan: GdnPlan) -> GdnPlan:
    """The plan that serves calls of both, which are of one kind: sizes as large as either's, padding where either may
    pad. The null slot is that of ``plan``; for kernels that write one see ``null_slot_reasons``."""
    if before is None:
        return plan
    return replace(
        plan, max_batch=max(before.max_batch, plan.max_batch), max_tokens=max(before.max_tokens, plan.max_tokens),
        max_draft=max(before.max_draft, plan.max_draft), may_pad=before.may_pad or plan.may_pad,
    )  # fmt: skip


def null_slot_reasons(before: GdnPlan, plan: GdnPlan) -> tuple[str, ...]:
    """Why kernels that write the null slot for padding cannot serve calls of both plans: nothing tells whose a call is,
    and the null slot of one is a live slot of the other. One that names none is served with that of the other only
    where none of its rows may pad."""
    named, wanted = before.null_slot, plan.null_slot
    if named == wanted or (named is None and not before.may_pad) or (wanted is None and not plan.may_pad):
        return ()
    pads = " and rows that may pad"
    return (
        f"null slot requires that of the plan before for this geometry, these dtypes and this device, which names "
        f"{named}{pads if named is None else ''}, got {wanted}{pads if wanted is None else ''}: name the same slot, or "
        "make an adapter for each",
    )
