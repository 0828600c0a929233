"""Laws of both ports about sequences over time: composition, verify and commit, empty, fresh."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from qwen35.domain.capabilities import Clause, Phase
from qwen35.testing.bench import Bench
from qwen35.testing.case import Case
from qwen35.testing.kit import Kit, Parts
from qwen35.testing.law import Law
from qwen35.testing.limits import Limits
from qwen35.testing.oracle import assert_close
from qwen35.testing.slot_laws import TOKEN_PHASES, law
from qwen35.testing.strategies import Wish, cases
from qwen35.testing.tensors import same_bits


def _pieces(parts: Parts, spans: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Tokens of these ranges, one after another."""
    device = parts.slots.device
    index = torch.tensor([t for a, b in spans for t in range(a, b)], dtype=torch.int64, device=device)
    return {name: t[index] for name, t in parts.tokens.items()}


def extend_spans(bench: Bench, parts: Parts, spans: list[tuple[int, int]], fresh: Tensor | None) -> Tensor:
    """Extend by these token ranges, one a sequence; returns the outputs."""
    lengths = [b - a for a, b in spans]
    offsets = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], device=parts.slots.device)
    piece = replace(
        parts, tokens=_pieces(parts, spans), cu_seqlens=offsets.to(torch.int32), seq_lens_host=None, fresh=fresh,
        out=None, every=None,
    )  # fmt: skip
    out = bench.run(bench.call(Phase.EXTEND, piece)).out
    assert out is not None
    return out


def decode_tokens(bench: Bench, parts: Parts, spans: list[tuple[int, int]]) -> dict[int, Tensor]:
    """Decode these token ranges step by step, finished sequences as padding; outputs by token."""
    outs: dict[int, Tensor] = {}
    slots = parts.slots.tolist()
    for step in range(max((b - a for a, b in spans), default=0)):
        here = [a + step if a + step < b else -1 for a, b in spans]
        tokens = {name: t[torch.tensor([max(t0, 0) for t0 in here])] for name, t in parts.tokens.items()}
        now = torch.tensor([s if t0 >= 0 else -1 for s, t0 in zip(slots, here, strict=True)], dtype=torch.int32)
        now = now.to(parts.slots.device)
        piece = Parts(pool=parts.pool, slots=now, tokens=tokens, params=parts.params)
        out = bench.run(bench.call(Phase.DECODE, piece)).out
        assert out is not None
        outs |= {t0: out[row] for row, t0 in enumerate(here) if t0 >= 0}
    return outs


def splits(bench: Bench, case: Case[Any]) -> None:
    """extend(T1 + T2) equals extend(T1) then extend(T2)."""
    whole, halves = bench.trial(case), bench.trial(case)
    terms = whole.terms()
    out = whole.run().out
    assert out is not None
    choice, offsets = case.choices(), case.offsets
    cuts = [choice.randint(a, b) for a, b in pairwise(offsets)]
    first = [(offsets[s], cut) for s, cut in enumerate(cuts)]
    second = [(cut, offsets[s + 1]) for s, cut in enumerate(cuts)]
    fresh = halves.parts.fresh
    head = extend_spans(bench, halves.parts, first, fresh)
    # What was fresh stays fresh until it has had a token.
    still = None if fresh is None else fresh & torch.tensor([a == b for a, b in first], device=fresh.device)
    tail = extend_spans(bench, halves.parts, second, still)
    bound = bench.bound(case, Phase.EXTEND, 2)
    joined = torch.empty_like(out)
    for span_set, piece in ((first, head), (second, tail)):
        index = [t for a, b in span_set for t in range(a, b)]
        joined[torch.tensor(index, dtype=torch.int64, device=out.device)] = piece
    assert_close(f"out, cut at {cuts}", joined, out, 2 * bound.output, case, terms)
    for slot in sorted(case.written):
        got, want = halves.parts.pool[slot], whole.parts.pool[slot]
        assert_close(f"state of slot {slot}, cut at {cuts}", got, want, 2 * bound.state, case)


def steps(bench: Bench, case: Case[Any]) -> None:
    """extend(T) equals extend(c) then T - c decodes, for any c: no other layout or rounding between phases."""
    whole, stepped = bench.trial(case), bench.trial(case)
    terms = whole.terms()
    out = whole.run().out
    assert out is not None
    choice, offsets = case.choices(), case.offsets
    least = [max(a, b - bench.limits.max_steps) for a, b in pairwise(offsets)]
    cuts = [choice.choice((a, choice.randint(a, b), max(a, b - 1))) for a, b in zip(least, offsets[1:], strict=True)]
    first = [(offsets[s], cut) for s, cut in enumerate(cuts)]
    head = extend_spans(bench, stepped.parts, first, None)
    second = [(cut, offsets[s + 1]) for s, cut in enumerate(cuts)]
    outs = decode_tokens(bench, stepped.parts, second)
    outs |= dict(zip((t for a, b in first for t in range(a, b)), head, strict=True))
    many = 1 + max((b - a for a, b in second), default=0)
    decode, extend = bench.bound(case, Phase.DECODE, many), bench.bound(case, Phase.EXTEND, 2)
    if outs:
        joined = torch.stack([outs[t] for t in sorted(outs)])
        assert_close(f"out, cut at {cuts}", joined, out, decode.output + extend.output, case, terms)
    for slot in sorted(case.written):
        got, want = stepped.parts.pool[slot], whole.parts.pool[slot]
        assert_close(f"state of slot {slot}, cut at {cuts}", got, want, decode.state + extend.state, case)


def nodes(bench: Bench, case: Case[Any]) -> None:
    """verify reads states and never writes them; node t holds the state after its tokens, at the row it is
    given; a tree node continues from its parent."""
    trial = bench.trial(case)
    want = trial.truth()
    served = trial.run()
    trial.only_written_slots_changed()
    trial.other_nodes_unchanged()
    trial.matches(served, want)


def commits(bench: Bench, case: Case[Any]) -> None:
    """commit copies exactly the accepted node of the right row; -1 copies nothing."""
    trial = bench.trial(case)
    want = trial.truth()
    served = trial.run()
    trial.only_written_slots_changed()
    trial.inputs_unchanged()
    trial.matches(served, want)


def acceptance(bench: Bench, case: Case[Any]) -> None:
    """verify, commit what was accepted, decode: the state follows the accepted tokens only."""
    trial = bench.trial(case)
    rows, choice = len(case.slots), case.choices()
    want = trial.truth()
    trial.run()
    accepted = [choice.randint(-1, case.draft - 1) for _ in range(rows)]
    parts = trial.parts
    before = parts.pool.clone()
    last = torch.tensor(accepted, dtype=torch.int32, device=parts.slots.device)
    bench.run(
        bench.call(
            Phase.COMMIT,
            Parts(pool=parts.pool, slots=parts.slots, intermediates=parts.intermediates, rows=parts.rows, last=last),
        )
    )
    row_of = case.rows or tuple(range(rows))
    bound = bench.bound(case, Phase.VERIFY)
    for i, slot in enumerate(case.slots):
        if slot < 0:
            continue
        if accepted[i] < 0:
            assert same_bits(before[slot], parts.pool[slot]), f"nothing was accepted of row {i}; {case}"
        else:
            want_state = want.nodes[row_of[i], accepted[i]]
            assert_close(f"state of slot {slot} after {accepted[i] + 1} accepted", parts.pool[slot], want_state,
                         bound.state, case)  # fmt: skip
    if Phase.DECODE not in bench.adapter.capabilities.phases:
        return
    tokens = {name: t[:, -1] for name, t in parts.tokens.items()}
    call = bench.call(Phase.DECODE, Parts(pool=parts.pool, slots=parts.slots, tokens=tokens, params=parts.params))
    truth = bench.truth(call)
    out = bench.run(call).out
    assert out is not None
    assert truth.out is not None
    bound = bench.bound(case, Phase.DECODE, 2)
    assert_close("out of the decode that follows", out, truth.out, bound.output, case, truth.terms)


def nothing(bench: Bench, case: Case[Any]) -> None:
    """A call without sequences is legal, returns an empty output and writes nothing."""
    trial = bench.trial(case)
    served = trial.run()
    if case.phase is not Phase.COMMIT:
        assert served.out is not None
        shape = (*case.leading, *bench.kit.out_shape(case.sizes))
        assert tuple(served.out.shape) == shape, f"out is {list(served.out.shape)}, not {list(shape)}; {case}"
    trial.only_written_slots_changed()
    trial.other_nodes_unchanged()


def empty_sequences(bench: Bench, case: Case[Any]) -> None:
    """A sequence of zero length leaves its state and its write slot alone, fresh too; the others are served."""
    trial = bench.trial(case)
    want = trial.truth()
    served = trial.run()
    trial.only_written_slots_changed()
    trial.matches(served, want)


def fresh(bench: Bench, case: Case[Any]) -> None:
    """A sequence flagged fresh starts from zero whatever its slot holds, NaN and infinity included."""
    trial = bench.trial(case)
    assert case.fresh is not None
    junk = (float("nan"), float("inf"), -1e30)
    needed = {slot for slot, flag in zip(case.slots, case.fresh, strict=True) if not flag}
    for i, slot in enumerate(case.slots):
        if slot >= 0 and slot not in needed:
            trial.fill_slots([slot], junk[i % len(junk)])
    want = trial.truth()
    served = trial.run()
    assert served.out is not None
    assert bool(torch.isfinite(served.out).all()), f"outputs of fresh sequences are not finite; {case}"
    trial.matches(served, want)


def _no_rows(kit: Kit, limits: Limits, phase: Phase) -> st.SearchStrategy[Case[Any]]:
    def emptied(case: Case[Any]) -> Case[Any]:
        return replace(
            case, slots=(), write_slots=None, lengths=(), fresh=None, rows=None, parents=None, last=(), every=None
        )

    return cases(kit, limits, phase).map(emptied)


def _with_empty(kit: Kit, limits: Limits, *, fresh: bool) -> st.SearchStrategy[Case[Any]]:
    """Extends in which the sequences picked by the seed have no tokens, and another has some: without any there may be
    nothing to launch. One that is empty is live and would leave a state of its own, had it tokens: a ``fresh`` one in
    place, or else one in another slot."""

    def emptied(case: Case[Any]) -> Case[Any]:
        choice = case.choices()
        keep = [choice.random() < 0.5 for _ in case.lengths]
        live = [i for i, slot in enumerate(case.slots) if slot >= 0]
        one = choice.choice(live or range(len(keep)))
        other = choice.choice([i for i in range(len(keep)) if i != one])
        keep[one], keep[other] = False, True
        case = replace(case, lengths=tuple(n if k else 0 for n, k in zip(case.lengths, keep, strict=True)))
        if not live:
            case = replace(case, slots=_with(case.slots, one, case.pool), pool=case.pool + 1)
        targets = case.slots if case.write_slots is None else case.write_slots
        if fresh:
            case = replace(case, fresh=_with(case.fresh or (False,) * len(keep), one, True))
            # In place, or where it wrote already: a slot of its own may be one that another sequence reads.
            away = targets[one] < 0
        else:
            away = targets[one] in (-1, case.slots[one])
        if not away:
            return case
        return replace(case, write_slots=_with(targets, one, case.pool), pool=case.pool + 1)

    return cases(kit, limits, Phase.EXTEND, Wish(min_rows=2, min_length=1)).map(emptied)


def _without_tokens(case: Case[Any]) -> Case[Any]:
    return replace(case, lengths=(0,) * len(case.lengths))


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def sequence_laws(kit: Kit) -> list[Law]:
    """The laws of this module for one port."""
    both = frozenset({Phase.EXTEND, Phase.DECODE})
    plain = Wish(pad=False, writes=False, min_length=1)
    laws = [
        law(kit, Clause.COMPOSITION, Phase.EXTEND, "a split prompt is the whole prompt", splits,
            Wish(pad=False, writes=False)),
        Law(name="extend, decode: steps are the prompt", port=kit.port, clause=Clause.COMPOSITION, phases=both,
            cases=lambda limits: cases(kit, limits, Phase.EXTEND, plain).map(lambda c: replace(c, fresh=None)),
            check=steps),
        law(kit, Clause.VERIFY, Phase.VERIFY, "nodes of a chain, states untouched", nodes, Wish(tree=False)),
        law(kit, Clause.VERIFY, Phase.VERIFY, "nodes of a tree continue from their parents", nodes, Wish(tree=True),
            needs=_trees),
        law(kit, Clause.VERIFY, Phase.COMMIT, "the accepted node is copied", commits, must_serve=True),
        Law(name="verify, commit: the state follows the accepted tokens", port=kit.port, clause=Clause.VERIFY,
            phases=frozenset({Phase.VERIFY, Phase.COMMIT}), check=acceptance,
            cases=lambda limits: cases(kit, limits, Phase.VERIFY)),
        law(kit, Clause.FRESH, Phase.EXTEND, "fresh sequences start from zero", fresh, Wish(fresh=True, min_length=1)),
    ]  # fmt: skip
    for fresh_one, what in ((True, "state"), (False, "write slot")):
        empty = law(kit, Clause.EMPTY, Phase.EXTEND, f"sequences without tokens leave their {what} alone",
                    empty_sequences)  # fmt: skip
        laws.append(replace(empty, cases=_empty_sequence_cases(kit, fresh_one)))
    tokenless = law(kit, Clause.EMPTY, Phase.EXTEND, "no tokens at all", empty_sequences, most_examples=8)
    laws.append(replace(tokenless, cases=lambda limits: _with_empty(kit, limits, fresh=True).map(_without_tokens)))
    for phase in (*TOKEN_PHASES, Phase.COMMIT):
        empty = law(kit, Clause.EMPTY, phase, "no sequences at all", nothing, most_examples=8)
        laws.append(replace(empty, cases=_empty_cases(kit, phase)))
    return laws


def _empty_sequence_cases(kit: Kit, fresh: bool) -> Any:
    return lambda limits: _with_empty(kit, limits, fresh=fresh)


def _empty_cases(kit: Kit, phase: Phase) -> Any:
    return lambda limits: _no_rows(kit, limits, phase)


def _trees(bench: Bench) -> tuple[str, ...]:
    return () if bench.adapter.capabilities.trees else ("trees are not offered",)
