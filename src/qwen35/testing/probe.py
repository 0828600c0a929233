"""A quick look at one adapter at one geometry: which clauses of the contract a phase breaks there.

One call a clause, at the widths that are measured. It is no substitute for the law suites, which search for
counterexamples; it keeps a benchmark from praising a kernel that is fast because it skips its duties.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from qwen35.container import adapter as make_adapter
from qwen35.domain.capabilities import Clause, Phase
from qwen35.domain.errors import UnsupportedError
from qwen35.ports.gated_delta_rule import DecodeCall, ExtendCall, GatedDeltaRule, VerifyCall
from qwen35.services.gated_delta_rule import PORT
from qwen35.testing.measure import relative_error
from qwen35.testing.workload import (
    Layout,
    Row,
    Sample,
    TokenCall,
    choose_sample,
    random_call,
    random_pool,
    raw_gates,
    sampled_call,
    sampled_results,
    with_states,
)

#: Lengths of the probe's calls: a zero length, one token, and both sides of a chunk of 64 where the phase has them.
_LENGTHS = {Phase.DECODE: (1,) * 5, Phase.EXTEND: (3, 2, 65, 0, 5), Phase.VERIFY: (3,) * 5}
#: Slots of the five rows in a pool of ten: two padding rows; first and last slot stay free to show a clamp or a wrap.
_SLOTS, _WRITES, _POOL = (3, -1, 6, 4, -1), (3, -1, -1, 7, 8), 10
_EVERYTHING = 2**62


@dataclass(frozen=True, slots=True)
class Broken:
    """A clause that a probe saw broken, and what it saw."""

    clause: Clause
    seen: str


@cache
def float64_oracle() -> GatedDeltaRule:
    """The float64 reference on the CPU; it keeps no state between calls."""
    made: GatedDeltaRule = make_adapter(PORT, "reference64", device="cpu")
    return made


def run_call(adapter: GatedDeltaRule, call: TokenCall) -> Tensor:
    """The output of ``call`` by ``adapter``, whatever its phase."""
    if isinstance(call, DecodeCall):
        return adapter.decode(call)
    if isinstance(call, ExtendCall):
        return adapter.extend(call).out
    return adapter.verify(call)


@dataclass(frozen=True, slots=True)
class Truth:
    """What float64 makes of a sample of a call: outputs, and states or intermediates."""

    sample: Sample
    out: Tensor
    states: Tensor


def truth_of(call: TokenCall, row: Row, layout: Layout, before: Tensor, budget: int = _EVERYTHING) -> Truth:
    """Of as much of ``call`` as ``budget`` allows. ``before``: its slots' states, in its order."""
    sample = choose_sample(layout, row, budget)
    oracle = sampled_call(call, row, sample, before)
    out = run_call(float64_oracle(), oracle)
    return Truth(sample, out, oracle.intermediates if isinstance(oracle, VerifyCall) else oracle.states)


def oracle_error(call: TokenCall, row: Row, truth: Truth, out: Tensor) -> tuple[float, float]:
    """Relative errors of outputs and states of a finished ``call``."""
    got_out, got = sampled_results(call, row, truth.sample, out)
    return relative_error(got_out, truth.out), relative_error(got, truth.states)


def probe(adapter: GatedDeltaRule, phase: Phase, layout: Layout, seed: int) -> list[Broken]:
    """Every clause that ``phase`` of ``adapter`` was seen to break at this geometry.

    A probe call that the adapter refuses breaks nothing: refusing is allowed. The reference is read on the
    host, so this synchronises.
    """
    row = Row(phase, _LENGTHS[phase])
    generator = torch.Generator(layout.device).manual_seed(seed)
    pool = random_pool(layout, _POOL, generator)
    slots = torch.tensor(_SLOTS, dtype=torch.int32, device=layout.device)
    call = random_call(layout, row, pool.clone(), slots, generator)
    adapter.prepare(layout.plan(row))
    broken: list[Broken] = []
    for check in (_padded, _permuted, _extreme, _fresh, _packed):
        try:
            broken += check(adapter, row, layout, with_states(call, pool.clone()), pool)
        except UnsupportedError:
            continue
    return broken


def _padded(adapter: GatedDeltaRule, row: Row, layout: Layout, call: TokenCall, pool: Tensor) -> Iterator[Broken]:
    """Padding, write slots, isolation, the empty sequence, and the values of the live rows beside them."""
    writes = list(_SLOTS)
    if not isinstance(call, VerifyCall):
        writes = list(_WRITES)
        call = replace(call, write_slots=torch.tensor(writes, dtype=torch.int32, device=layout.device))
    inputs = [t.clone() for t in _inputs(call)]
    out = run_call(adapter, call)
    for name, before, after in zip(("q", "k", "v", "slots"), inputs, _inputs(call), strict=True):
        if not torch.equal(before, after):
            yield Broken(Clause.ISOLATION, f"{name} was written")
    padding = [i for i, slot in enumerate(_SLOTS) if slot < 0]
    if any(bool((part != 0).any()) for part in _rows_of(row, out, padding)):
        yield Broken(Clause.PADDING, "the output of a row with slot -1 is not zero")
    if isinstance(call, VerifyCall) and not bool(call.intermediates[padding].isnan().all()):
        yield Broken(Clause.PADDING, "a row with slot -1 wrote intermediates")
    yield from _changed_slots(row, layout, call, pool, writes)
    yield from _live_values(row, layout, call, pool, writes, out)


def _changed_slots(row: Row, layout: Layout, call: TokenCall, pool: Tensor, writes: list[int]) -> Iterator[Broken]:
    """Slots that changed although no live row writes them, by the clause that forbids it."""
    allowed = {layout.null_slot}
    if not isinstance(call, VerifyCall):
        live = zip(_SLOTS, writes, row.lengths, strict=True)
        allowed |= {write for read, write, length in live if read >= 0 and write >= 0 and (length or write != read)}
    for slot in range(_POOL):
        if slot in allowed or torch.equal(call.states[slot], pool[slot]):
            continue
        if isinstance(call, VerifyCall):
            yield Broken(Clause.VERIFY, f"slot {slot} of the pool was written")
        elif slot in (0, _POOL - 1, 8):  # 8 is the write slot of a padding row
            yield Broken(Clause.PADDING, f"slot {slot} was written for a row with slot -1")
        elif slot in _SLOTS and row.lengths[_SLOTS.index(slot)] == 0:
            yield Broken(Clause.EMPTY, f"slot {slot} of a sequence without tokens was written")
        elif slot in _SLOTS:
            yield Broken(Clause.WRITE_SLOTS, f"slot {slot} was written although its write slot is another or -1")
        else:
            yield Broken(Clause.ISOLATION, f"slot {slot}, which the call does not name, was written")


def _live_values(
    row: Row, layout: Layout, call: TokenCall, pool: Tensor, writes: list[int], out: Tensor
) -> Iterator[Broken]:
    """Each live row against the oracle, generously: a wrong row is wrong by far."""
    sample = choose_sample(layout, row, _EVERYTHING)
    live = [i for i, slot in enumerate(_SLOTS) if slot >= 0 and row.lengths[i]]
    sample = replace(sample, indices=tuple(live), lengths=tuple(row.lengths[i] for i in live))
    oracle = sampled_call(call, row, sample, pool[call.slots.long()])
    expected = run_call(float64_oracle(), oracle)
    got = sampled_results(call, row, sample, out)[0]
    if relative_error(got, expected) > _GROSS:
        yield Broken(Clause.WRITE_SLOTS, "the outputs of live rows beside padding rows are wrong")
    for at, i in enumerate(live):
        if isinstance(oracle, VerifyCall) and isinstance(call, VerifyCall):
            if relative_error(call.intermediates[i].cpu(), oracle.intermediates[at]) > _GROSS:
                yield Broken(Clause.VERIFY, f"the intermediates of row {i} are wrong")
        elif writes[i] >= 0 and relative_error(call.states[writes[i]].cpu(), oracle.states[at]) > _GROSS:
            yield Broken(Clause.WRITE_SLOTS, f"the state of row {i} did not arrive in write slot {writes[i]}")


def _permuted(adapter: GatedDeltaRule, row: Row, layout: Layout, call: TokenCall, pool: Tensor) -> Iterator[Broken]:
    """The same rows in reverse order: outputs and states bitwise alike."""
    if isinstance(call, ExtendCall):
        return  # reversing packed tokens moves chunk borders of the whole batch; the law suites do it
    forward = run_call(adapter, call)
    gates = raw_gates(call)
    gates = replace(gates, a=gates.a.flip(0), b=gates.b.flip(0))
    turned = replace(
        with_states(call, pool.clone()), q=call.q.flip(0), k=call.k.flip(0), v=call.v.flip(0), gates=gates,
        slots=call.slots.flip(0),
    )  # fmt: skip
    backward = run_call(adapter, turned)
    if not torch.equal(forward, backward.flip(0)):
        yield Broken(Clause.ORDER, "reversing the batch changed outputs")
    if not torch.equal(_kept(layout, call.states), _kept(layout, turned.states)):
        yield Broken(Clause.ORDER, "reversing the batch changed states")


def _extreme(adapter: GatedDeltaRule, row: Row, layout: Layout, call: TokenCall, pool: Tensor) -> Iterator[Broken]:
    """Zero keys in one row, and a gate past softplus' linear range in all."""
    k, gates = call.k.clone(), raw_gates(call)
    k[0] = 0
    extreme = replace(call, k=k, gates=replace(gates, a=torch.full_like(gates.a, 80.0)))
    out = run_call(adapter, extreme)
    if not bool(torch.isfinite(out).all()) or not bool(torch.isfinite(_kept(layout, extreme.states)).all()):
        yield Broken(Clause.FINITE, "a zero key or a gate input of 80 gave a result that is not finite")


def _fresh(adapter: GatedDeltaRule, row: Row, layout: Layout, call: TokenCall, pool: Tensor) -> Iterator[Broken]:
    """A slot of NaN behind a fresh sequence."""
    if not isinstance(call, ExtendCall):
        return
    call.states[_SLOTS[0]] = float("nan")
    fresh = torch.zeros(row.batch, dtype=torch.bool, device=layout.device)
    fresh[0] = True
    out = run_call(adapter, replace(call, fresh=fresh))
    if not bool(torch.isfinite(out).all()) or not bool(torch.isfinite(call.states[_SLOTS[0]]).all()):
        yield Broken(Clause.FRESH, "a fresh sequence read the NaN in its slot")


def _packed(adapter: GatedDeltaRule, row: Row, layout: Layout, call: TokenCall, pool: Tensor) -> Iterator[Broken]:
    """Tokens as views of one packed projection: the same result as from tensors of their own."""
    apart = run_call(adapter, call)
    axis = call.q.dim() - 2
    parts = [t.flatten(axis) for t in (call.q, call.k, call.v)]
    packed = torch.split(torch.cat(parts, dim=-1), [p.shape[-1] for p in parts], dim=-1)
    q, k, v = (p.view(*p.shape[:-1], *t.shape[axis:]) for p, t in zip(packed, (call.q, call.k, call.v), strict=True))
    views = replace(with_states(call, pool.clone()), q=q, k=k, v=v)
    together = run_call(adapter, views)
    states = (_kept(layout, one.states) for one in (views, call))
    if relative_error(together, apart) > _GROSS or relative_error(*states) > _GROSS:
        yield Broken(Clause.STRIDES, "tokens that are views of a packed projection give another result")


#: A relative error that no rounding to bfloat16 reaches and that a wrong row passes by far.
_GROSS = 0.05


def _kept(layout: Layout, states: Tensor) -> Tensor:
    """The slots of ``states`` that are somebody's: rows of padding may write the null slot, and meet in it."""
    return states if layout.null_slot is None else states[torch.arange(states.shape[0]) != layout.null_slot]


def _inputs(call: TokenCall) -> tuple[Tensor, ...]:
    return call.q, call.k, call.v, call.slots


def _rows_of(row: Row, out: Tensor, rows: list[int]) -> Iterator[Tensor]:
    """The outputs of the call's rows or sequences ``rows``."""
    starts = [sum(row.lengths[:i]) for i in range(row.batch + 1)]
    for i in rows:
        yield out[starts[i] : starts[i + 1]] if row.phase is Phase.EXTEND else out[i]
