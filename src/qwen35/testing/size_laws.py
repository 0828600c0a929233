"""Laws of both ports about sizes: pools and intermediates past 2**31 elements, 65,536 programs in one axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from qwen35.domain.capabilities import Clause, GateKind, Phase
from qwen35.testing.bench import Bench, Refused
from qwen35.testing.case import Case, ConvSizes, GdnSizes
from qwen35.testing.kit import Kit
from qwen35.testing.law import Law
from qwen35.testing.limits import Limits, Profile
from qwen35.testing.oracle import assert_close, row_of
from qwen35.testing.slot_laws import TOKEN_PHASES
from qwen35.testing.strategies import seeds

#: A page-major pool seen in serving: 540,672 elements from slot to slot, so slot 3,972 starts past 2**31.
SLOT_STRIDE = 540_672
FAR = 3_972
#: B * HV = 65,536, one more than a grid axis other than the first can have.
MANY_ROWS, MANY_HEADS = 2048, 32


def far_pool(near: Tensor, stride: int = SLOT_STRIDE, slots: int = FAR + 2) -> Tensor:
    """An uninitialised pool whose last slots start past 2**31 elements; on a CPU only touched pages cost memory.

    Raises ``Refused`` where the memory cannot be had.
    """
    stride = max(stride, near[0].numel())
    inner = near[0].contiguous().stride()
    return _memory("a pool", stride * slots, near).as_strided((slots, *near.shape[1:]), (stride, *inner))


def far_nodes(near: Tensor) -> Tensor:
    """Dense uninitialised intermediates, whose last two rows start past 2**31 elements; else as ``far_pool``."""
    rows = 2**31 // near[0].numel() + 3
    return _memory("intermediates", rows * near[0].numel(), near).view(rows, *near.shape[1:])


def _memory(what: str, elements: int, like: Tensor) -> Tensor:
    try:
        return torch.empty(elements, dtype=like.dtype, device=like.device)
    except RuntimeError as exc:  # torch.OutOfMemoryError on a GPU, RuntimeError on a CPU
        size = elements * like.element_size() / 1e9
        raise Refused([f"{what} of {size:.1f} GB cannot be allocated: {exc}"]) from exc


def far_slots(bench: Bench, case: Case[Any]) -> None:
    """Slots past 2**31 elements, the case's slot 0, are the ones read and written."""
    trial = bench.trial(case)
    bench.ask(trial.call)  # of the same sizes in a small pool: the far one takes gigabytes
    want = trial.truth()
    pool = far_pool(trial.parts.pool)
    place = [FAR - 1 - i if i else FAR for i in range(case.pool)]
    for near, far in enumerate(place):
        pool[far] = trial.parts.pool[near]
    sentinel = pool[FAR + 1] = torch.full_like(pool[FAR + 1], 7.0)
    moved = {"slots": trial.parts.slots.new_tensor([place[s] for s in case.slots])}
    if case.write_slots is not None:
        moved["write_slots"] = trial.parts.slots.new_tensor([place[s] for s in case.write_slots])
    served = bench.run(trial.replaced(pool=pool, **moved))
    for slot in case.written:
        trial.parts.pool[slot] = pool[place[slot]]
    trial.matches(served, want)
    trial.only_written_slots_changed()
    assert bool((pool[FAR + 1] == sentinel).all()), f"slot {FAR + 1} changed; {case}"


def far_rows(bench: Bench, case: Case[Any]) -> None:
    """Rows of the intermediates past 2**31 elements are the ones written by verify and read by commit."""
    trial = bench.trial(case)
    bench.ask(trial.call)  # as in far_slots
    want, near = trial.truth(), trial.parts.intermediates
    assert near is not None
    nodes = far_nodes(near)
    place = [nodes.shape[0] - 1 - row for row in range(case.capacity)]
    for row, far in enumerate(place):
        nodes[far] = near[row]
    sentinel = nodes[place[-1] - 1] = torch.full_like(near[0], 7.0)
    served = bench.run(trial.replaced(intermediates=nodes, rows=trial.parts.slots.new_tensor(place)))
    for row, far in enumerate(place):
        near[row] = nodes[far]
    trial.matches(served, want)
    trial.other_nodes_unchanged()
    trial.only_written_slots_changed()
    assert bool((nodes[place[-1] - 1] == sentinel).all()), f"row {place[-1] - 1} changed; {case}"


def many_rows(bench: Bench, case: Case[Any]) -> None:
    """B * HV past 65,535 launches, and the last rows are as right as the first."""
    trial = bench.trial(case)
    trial.ask()
    want = trial.truth()
    served = trial.run()
    trial.matches(served, want)
    assert served.out is not None
    assert want.out is not None
    bound, context = 4 * trial.bound().output, f"seed {case.seed}"
    for row in (0, len(case.slots) // 2, len(case.slots) - 1):
        terms = row_of(want.terms, row)
        assert_close(f"out of row {row}", served.out[row], want.out[row], bound, context, terms)


def _plain(kit: Kit, limits: Limits, heads: tuple[int, int] | None = None) -> Any:
    """The simplest sizes; with ``heads`` where the adapter allows their ratio."""
    token, state = limits.token_dtypes[0], limits.state_dtypes[0]
    if kit.port == "short_convolution":
        return ConvSizes(channels=limits.channels[0], width=limits.conv_widths[0], token_dtype=token, state_dtype=state)
    h, hv = heads or limits.heads[0]
    return GdnSizes(
        key_heads=h, value_heads=hv, key_width=limits.widths[0][0], value_width=limits.widths[0][1],
        token_dtype=token, state_dtype=state, gates=limits.gates[0] if limits.gates else GateKind.RAW,
    )  # fmt: skip


def _far_case(kit: Kit, phase: Phase, writes: bool = False) -> Callable[[Limits], st.SearchStrategy[Case[Any]]]:
    def draw(limits: Limits) -> st.SearchStrategy[Case[Any]]:
        more: dict[str, Any] = {}
        if phase is Phase.EXTEND:
            more = {"lengths": (3, 2)}
        elif phase is not Phase.DECODE:
            more = {"draft": 2, "nodes": 2, "capacity": 2, "last": (1, 0) if phase is Phase.COMMIT else ()}
        slots: dict[str, Any] = {"pool": 3, "slots": (0, 1)}
        if writes:
            slots = {"pool": 4, "slots": (1, 2), "write_slots": (0, 3)}
        first = Case(phase=phase, sizes=_plain(kit, limits), seed=0, **slots, **more)
        return seeds.map(lambda seed: replace(first, seed=seed))

    return draw


def _many_case(kit: Kit, phase: Phase) -> Callable[[Limits], st.SearchStrategy[Case[Any]]]:
    def draw(limits: Limits) -> st.SearchStrategy[Case[Any]]:
        h, hv = limits.heads[-1]
        ratio = 2 if (1, 2) in {(1, b // a) for a, b in limits.heads} else hv // h
        sizes = _plain(kit, limits, (MANY_HEADS // ratio, MANY_HEADS // ratio * ratio))
        first, rows = limits.first_slot, MANY_ROWS
        more: dict[str, Any] = {}
        if phase is Phase.EXTEND:
            more = {"lengths": (1,) * rows}
        elif phase is Phase.VERIFY:
            more = {"draft": 1, "nodes": 1, "capacity": rows}
        slots = tuple(range(first, first + rows))
        case = Case(phase=phase, sizes=sizes, seed=0, pool=first + rows, slots=slots, **more)
        return seeds.map(lambda seed: replace(case, seed=seed))

    return draw


def _fast(bench: Bench) -> tuple[str, ...]:
    slow = bench.limits.profile is Profile.INTERPRETER
    return ("65,536 programs take minutes in the interpreter",) if slow else ()


def _no_null_slot(bench: Bench) -> tuple[str, ...]:
    return () if bench.limits.null_slot is None else ("slot 0 is the null slot here",)


def size_laws(kit: Kit) -> list[Law]:
    """The laws of this module for one port."""
    laws = [
        Law(name=f"{phase}: slots past 2**31 elements", port=kit.port, clause=Clause.SIZE, phases=frozenset({phase}),
            cases=_far_case(kit, phase), check=far_slots, needs=_no_null_slot, most_examples=1,
            alike=True)
        for phase in Phase
    ]  # fmt: skip
    laws += [
        Law(name=f"{phase}: write slots past 2**31 elements", port=kit.port, clause=Clause.SIZE,
            phases=frozenset({phase}), cases=_far_case(kit, phase, writes=True), check=far_slots, needs=_no_null_slot,
            most_examples=1, alike=True)
        for phase in (Phase.DECODE, Phase.EXTEND)
    ]  # fmt: skip
    laws += [
        Law(name=f"{phase}: intermediates past 2**31 elements", port=kit.port, clause=Clause.SIZE,
            phases=frozenset({phase}), cases=_far_case(kit, phase), check=far_rows, needs=_no_null_slot,
            most_examples=1, alike=True)
        for phase in (Phase.VERIFY, Phase.COMMIT)
    ]  # fmt: skip
    for phase in TOKEN_PHASES:
        laws.append(
            Law(name=f"{phase}: 65,536 value heads in one call", port=kit.port, clause=Clause.SIZE,
                phases=frozenset({phase}), cases=_many_case(kit, phase), check=many_rows, needs=_fast, most_examples=1,
                alike=True)
        )  # fmt: skip
    return laws
