"""Hypothesis strategies for cases: geometries, slots with padding, sequences, draft trees.

Everything drawn is a plain value; tensors follow from the drawn seed, so that shrinking works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from qwen35.domain.capabilities import Phase
from qwen35.testing.case import Case, Strides
from qwen35.testing.kit import Kit
from qwen35.testing.limits import Limits

seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a law wants of its cases, beyond what may come anyway.

    ``pad``: at least one row with slot -1; True or False, None leaves it open. ``writes``: write slots are
    given. ``fresh``: some sequence is flagged fresh. ``tree``: parents are given. ``views``: packed,
    paged, own output; ``strides``: each tensor has its own; ``shift``: tensors that start one element into their
    buffer.
    """

    pad: bool | None = None
    writes: bool | None = None
    fresh: bool = False
    tree: bool | None = False
    views: bool | None = None
    strides: Strides = Strides.DENSE
    shift: bool = False
    min_rows: int = 1
    min_length: int = 0
    min_draft: int = 1
    checkpoints: bool = False


_ANY = Wish()


@st.composite
def slot_rows(draw: st.DrawFn, rows: int, limits: Limits, pad: bool | None) -> tuple[int, tuple[int, ...]]:
    """A pool size and ``rows`` distinct slots of it, -1 in random places."""
    first = limits.first_slot
    pool = first + rows + draw(st.integers(1, 4))
    slots = list(draw(st.permutations(range(first, pool))))[:rows]
    if pad is not False:
        padded = [draw(st.integers(0, 3)) == 3 for _ in range(rows)]
        if pad and rows and not any(padded):
            padded[draw(st.integers(0, rows - 1))] = True
        slots = [-1 if gone else slot for slot, gone in zip(slots, padded, strict=True)]
    return pool, tuple(slots)


@st.composite
def write_targets(draw: st.DrawFn, pool: int, slots: tuple[int, ...]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Write slots: the row's own slot, another one that nobody reads, or -1; never one that another row reads. Rows
    that do not write in place may read the same slot. Returns pool, slots and write slots."""
    free = list(range(pool, pool + len(slots)))
    read = list(slots)
    live = [i for i, slot in enumerate(slots) if slot >= 0]
    shared: set[int] = set()
    if len(live) > 1 and draw(st.booleans()):
        read[live[1]] = read[live[0]]
        shared = {live[0], live[1]}
    targets = []
    for i, slot in enumerate(read):
        kinds = ("other", "none") if i in shared or slot < 0 else ("other", "none", "same")
        kind = draw(st.sampled_from(kinds))
        targets.append({"other": free[i], "none": -1, "same": slot}[kind])
    return pool + len(slots), tuple(read), tuple(targets)


def lengths(limits: Limits, rows: int, least: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Lengths of ``rows`` sequences: short ones, empty ones, and ones around the chunk sizes of kernels."""
    one = st.one_of(st.integers(least, 6), st.sampled_from(limits.long_lengths))
    return st.lists(one, min_size=rows, max_size=rows).map(lambda drawn: _within(drawn, limits.max_tokens, least))


def _within(drawn: list[int], most: int, least: int) -> tuple[int, ...]:
    room, kept = most, []
    for length in drawn:
        kept.append(max(least, min(length, room)))
        room -= kept[-1]
    return tuple(kept)


@st.composite
def trees(draw: st.DrawFn, rows: int, draft: int) -> tuple[tuple[int, ...], ...]:
    """Parents: -1 or an earlier node."""
    return tuple(tuple(draw(st.integers(-1, t - 1)) for t in range(draft)) for _ in range(rows))


@st.composite
def cases(draw: st.DrawFn, kit: Kit, limits: Limits, phase: Phase, wish: Wish = _ANY) -> Case[Any]:
    """A case of one phase within ``limits``."""
    extend = phase is Phase.EXTEND
    most = limits.max_sequences if extend else limits.max_rows
    rows = draw(st.integers(wish.min_rows, max(wish.min_rows, most)))
    pool, slots = draw(slot_rows(rows, limits, wish.pad))
    writes = None
    if phase in (Phase.DECODE, Phase.EXTEND) and (draw(st.booleans()) if wish.writes is None else wish.writes):
        pool, slots, writes = draw(write_targets(pool, slots))
    views = draw(st.booleans()) if wish.views is None else wish.views
    more: dict[str, Any] = {}
    if extend:
        more = draw(_sequences(limits, rows, wish))
    elif phase in (Phase.VERIFY, Phase.COMMIT):
        more = draw(_drafts(limits, phase, slots, wish))
    return Case(
        phase=phase, sizes=draw(kit.sizes(limits)), seed=draw(seeds), pool=pool, slots=slots, write_slots=writes,
        packed=views and wish.strides is Strides.DENSE, strides=wish.strides,
        paged=views if wish.views else draw(st.booleans()), shift=int(wish.shift), long=draw(st.booleans()),
        own_out=views if wish.views else draw(st.booleans()), prepared=draw(st.booleans()), **more,
    )  # fmt: skip


@st.composite
def _sequences(draw: st.DrawFn, limits: Limits, rows: int, wish: Wish) -> dict[str, Any]:
    fresh: tuple[bool, ...] | None = None
    if wish.fresh or draw(st.booleans()):
        flags = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        if wish.fresh and not any(flags):
            flags[0] = True
        fresh = tuple(flags)
    every = None
    if wish.checkpoints and limits.checkpoints:
        every = limits.checkpoint_multiple * draw(st.integers(1, 3 if limits.checkpoint_multiple > 1 else 40))
    drawn = draw(lengths(limits, rows, wish.min_length))
    return {"lengths": drawn, "fresh": fresh, "host_lengths": draw(st.booleans()), "every": every}


@st.composite
def _drafts(draw: st.DrawFn, limits: Limits, phase: Phase, slots: tuple[int, ...], wish: Wish) -> dict[str, Any]:
    rows, draft = len(slots), draw(st.integers(wish.min_draft, max(wish.min_draft, limits.max_draft)))
    made: dict[str, Any] = {"draft": draft, "nodes": draft + draw(st.integers(0, 1)), "capacity": rows}
    if draw(st.booleans()):
        capacity = max(rows, 1) + draw(st.integers(0, 2))
        owned = list(draw(st.permutations(range(capacity))))[:rows]
        # Padding rows write nothing, so they may point at a row that a live one owns.
        made |= {"capacity": capacity, "rows": tuple(
            owned[0] if slot < 0 else row for slot, row in zip(slots, owned, strict=True)
        )}  # fmt: skip
    if phase is Phase.VERIFY and limits.trees and (draw(st.booleans()) if wish.tree is None else wish.tree):
        made["parents"] = draw(trees(rows, draft))
    if phase is Phase.COMMIT:
        made["last"] = tuple(draw(st.integers(-1, draft - 1)) for _ in range(rows))
    return made
