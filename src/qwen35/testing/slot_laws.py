"""Laws of both ports about slots: padding, write slots, isolation, order, views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qwen35.domain.capabilities import Clause, Phase
from qwen35.testing.bench import Bench
from qwen35.testing.case import Case, Strides
from qwen35.testing.kit import Kit, Parts
from qwen35.testing.law import Law
from qwen35.testing.limits import Limits
from qwen35.testing.strategies import Wish, cases
from qwen35.testing.tensors import same_bits

TOKEN_PHASES = (Phase.DECODE, Phase.EXTEND, Phase.VERIFY)
Check = Callable[[Bench, Case[Any]], None]


def law(kit: Kit, clause: Clause, phase: Phase, name: str, check: Check, wish: Wish | None = None, **more: Any) -> Law:
    """A law over the cases of one phase."""
    wished = wish or Wish()
    return Law(
        name=f"{phase}: {name}", port=kit.port, clause=clause, check=check, phases=frozenset({phase}),
        cases=lambda limits: cases(kit, limits, phase, wished), **more,
    )  # fmt: skip


def padded_rows(bench: Bench, case: Case[Any]) -> None:
    """A row with slot -1 gives zeros whatever its tokens hold, and changes no slot; live rows are not disturbed."""
    trial = bench.trial(case)
    trial.poison_padding()
    want = trial.truth()
    served = trial.run()
    trial.padded_rows_are_zero(served)
    trial.only_written_slots_changed()
    trial.other_nodes_unchanged()
    trial.states_are(want.states, trial.bound().state)


def padded_commits(bench: Bench, case: Case[Any]) -> None:
    """A commit of a row with slot -1 copies nothing."""
    trial = bench.trial(case)
    trial.run()
    trial.only_written_slots_changed()
    trial.other_nodes_unchanged()


def write_slots(bench: Bench, case: Case[Any]) -> None:
    """States are written to the write slots only; -1 computes the output and writes none."""
    trial = bench.trial(case)
    want = trial.truth()
    served = trial.run()
    trial.only_written_slots_changed()
    trial.matches(served, want)


def isolation(bench: Bench, case: Case[Any]) -> None:
    """Slots that the call does not write are bitwise unchanged; inputs and gaps are never written."""
    trial = bench.trial(case)
    trial.run()
    trial.only_written_slots_changed()
    trial.inputs_unchanged()
    trial.out_gaps_unchanged()
    trial.other_nodes_unchanged()


def right_slots(bench: Bench, case: Case[Any]) -> None:
    """The slots that are named, in either index width, are the ones read and written."""
    trial = bench.trial(case)
    want = trial.truth()
    trial.run()
    trial.only_written_slots_changed()
    trial.states_are(want.states, trial.bound().state)


def order(bench: Bench, case: Case[Any]) -> None:
    """Permuting the sequences of a batch permutes outputs and leaves the same states, bitwise."""
    rows = len(case.slots)
    turn = list(range(rows))
    case.choices().shuffle(turn)
    if turn == sorted(turn):
        turn.reverse()
    first, second = bench.trial(case), bench.trial(case)
    tokens = _token_order(case, turn, bench.place)
    straight = first.run()
    turned = bench.run(bench.call(case.phase, permuted(second.parts, case, turn, tokens)))
    assert straight.out is not None
    assert turned.out is not None
    assert same_bits(straight.out[tokens], turned.out), f"outputs do not follow the order {turn}; {case}"
    if bench.limits.null_slot is not None:  # its content is nobody's
        second.parts.pool[bench.limits.null_slot].copy_(first.parts.pool[bench.limits.null_slot])
    assert same_bits(first.made.pool.base, second.made.pool.base), f"states differ in the order {turn}; {case}"
    if first.made.intermediates is not None and second.made.intermediates is not None:
        assert same_bits(first.made.intermediates.base, second.made.intermediates.base), (
            f"intermediates differ in the order {turn}; {case}"
        )


def _token_order(case: Case[Any], turn: list[int], device: torch.device) -> Tensor:
    if case.phase is not Phase.EXTEND:
        return torch.tensor(turn, dtype=torch.int64, device=device)
    offsets = case.offsets
    index = [t for s in turn for t in range(offsets[s], offsets[s + 1])]
    return torch.tensor(index, dtype=torch.int64, device=device)


def permuted(parts: Parts, case: Case[Any], turn: list[int], tokens: Tensor) -> Parts:
    """The same call with its sequences in the order ``turn``, over the same pool and in the same views.

    Strides stay: a kernel may sum in another order where it can load in another width.
    """
    for values in parts.tokens.values():
        values.copy_(values[tokens])
    index = torch.tensor(turn, dtype=torch.int64, device=tokens.device)

    def pick(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[index]

    rows = parts.rows
    if case.phase is Phase.VERIFY and rows is None:
        rows = torch.arange(len(turn), dtype=torch.int32, device=tokens.device)
    lengths = tuple(case.lengths[s] for s in turn) if case.lengths else ()
    return replace(
        parts,
        slots=parts.slots[index], write_slots=pick(parts.write_slots), out=None, fresh=pick(parts.fresh),
        cu_seqlens=None if parts.cu_seqlens is None else parts.cu_seqlens.new_tensor(
            replace(case, lengths=lengths).offsets
        ),
        seq_lens_host=None if parts.seq_lens_host is None else lengths,
        rows=pick(rows), parents=pick(parts.parents),
    )  # fmt: skip


def views(bench: Bench, case: Case[Any]) -> None:
    """Views of a packed projection, paged pools and a strided output serve as dense tensors do; the caller's
    ``out`` is the object returned."""
    trial = bench.trial(case)
    want = trial.truth()
    served = trial.run()
    assert served.out is trial.parts.out, f"the caller's out must be the object returned; {case}"
    trial.matches(served, want)


def own_strides(bench: Bench, case: Case[Any]) -> None:
    """No tensor is read or written by the stride of another, and nothing is written between rows, heads or nodes."""
    trial = bench.trial(case)
    want = trial.truth()
    trial.matches(trial.run(), want)
    trial.inputs_unchanged()
    trial.out_gaps_unchanged()
    trial.other_nodes_unchanged()


def offset_views(bench: Bench, case: Case[Any]) -> None:
    """Read-only tensors may start anywhere: one element past an aligned address, several of them at once."""
    trial = bench.trial(case)
    want = trial.truth()
    trial.matches(trial.run(), want)


def slot_laws(kit: Kit) -> list[Law]:
    """The laws of this module for one port."""
    laws = [
        law(kit, Clause.PADDING, phase, "padded rows are zero and touch no slot", padded_rows, Wish(pad=True))
        for phase in TOKEN_PHASES
    ]
    laws.append(law(kit, Clause.PADDING, Phase.COMMIT, "padded rows copy nothing", padded_commits, Wish(pad=True)))
    for phase in (Phase.DECODE, Phase.EXTEND):
        laws.append(
            law(kit, Clause.WRITE_SLOTS, phase, "states go to the write slots only", write_slots, Wish(writes=True))
        )
    for phase in Phase:
        laws.append(law(kit, Clause.ISOLATION, phase, "nothing else is written", isolation, Wish(tree=None)))
    for phase in (Phase.DECODE, Phase.EXTEND):
        laws.append(
            law(kit, Clause.ISOLATION, phase, "the named slots are the ones used", right_slots, Wish(writes=False))
        )
    for phase in TOKEN_PHASES:
        laws.append(law(kit, Clause.ORDER, phase, "outputs and states follow the sequences", order, Wish(min_rows=2)))
        laws.append(law(kit, Clause.STRIDES, phase, "views serve as dense tensors do", views, Wish(views=True)))
        laws.append(law(kit, Clause.STRIDES, phase, "inputs may start at any element", offset_views, Wish(shift=True)))
        laws.append(_own_strides(kit, phase, "each tensor has rows of its own length", Strides.ROWS))
        if kit.port == "gated_delta_rule" or phase is Phase.VERIFY:  # elsewhere nothing but rows has a stride
            laws.append(_own_strides(kit, phase, "each tensor has strides of its own", Strides.ALL))
    return laws


def _own_strides(kit: Kit, phase: Phase, name: str, strides: Strides) -> Law:
    """Two live rows or more, of two tokens in a draft and two key heads or more, without which strides do not count."""
    wish = Wish(
        strides=strides, views=True, pad=False, min_rows=2, min_length=1, min_draft=2, tree=strides is Strides.ALL
    )

    def several_heads(limits: Limits) -> Limits:
        pairs = tuple(pair for pair in limits.heads if pair[0] > 1)
        return replace(limits, heads=pairs or tuple((2 * keys, 2 * values) for keys, values in limits.heads))

    made = law(kit, Clause.STRIDES, phase, name, own_strides, wish)
    return replace(made, cases=lambda limits: cases(kit, several_heads(limits), phase, wish))
