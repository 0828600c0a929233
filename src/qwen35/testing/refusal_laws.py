"""Laws of both ports about refusals: what is wrong or cannot be honoured raises before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from qwen35.domain.capabilities import Clause, GateKind, Phase
from qwen35.domain.errors import ClosedError, ContractError, Qwen35Error, UnsupportedError
from qwen35.ports.adapter import HoldsScratch
from qwen35.ports.support import PHASE_OF
from qwen35.testing.bench import Bench, Refused, Trial
from qwen35.testing.capture_laws import changed
from qwen35.testing.case import Case, GdnSizes
from qwen35.testing.kit import Kit, serve
from qwen35.testing.law import Law
from qwen35.testing.limits import Limits
from qwen35.testing.slot_laws import law
from qwen35.testing.spoil import Spoil, spoils_of
from qwen35.testing.strategies import Wish, cases

#: A plan promises that what it holds is not refused later on.
WIDENS = "a smaller plan takes nothing away"


def nothing_written(trial: Trial) -> None:
    """Pool, intermediates, output and inputs are bitwise as before."""
    trial.case = replace(trial.case, slots=(-1,) * len(trial.case.slots), write_slots=None)
    trial.only_written_slots_changed()
    trial.other_nodes_unchanged()
    trial.inputs_unchanged()
    trial.out_unchanged()


def bad_inputs(bench: Bench, case: Case[Any]) -> None:
    """Each way to spoil a call raises an error of our tree, and nothing was written: also by an adapter that has just
    served the good call that it resembles, and may know it by its layout."""
    spoils = spoils_of(bench.kit.port, case.phase, values=bench.place.type == "cpu")
    for like in dict.fromkeys(spoil.like for spoil in spoils):
        with suppress(Refused):
            bench.run(like(bench.trial(case).call))
        for spoil in spoils:
            if spoil.like is like:
                refuse_spoilt(bench, case, spoil)


def refuse_spoilt(bench: Bench, case: Case[Any], spoil: Spoil) -> Qwen35Error:
    """Serve the spoilt call; returns the refusal. Raises ``AssertionError`` where there is none."""
    trial = bench.trial(case)
    call = spoil.call(bench.kit, case.phase, trial.parts)
    refusal = _refusal(bench, call, f"{spoil.name}; {case}", (ContractError, UnsupportedError))
    nothing_written(trial)
    return refusal


def _refusal(bench: Bench, call: Any, what: str, kinds: tuple[type[Qwen35Error], ...]) -> Qwen35Error:
    try:
        serve(bench.adapter, call)
    except kinds as refusal:
        return refusal
    raise AssertionError(f"{PHASE_OF[type(call)]} accepted {what}")


def unsupported_options(bench: Bench, case: Case[Any]) -> None:
    """What ``supports`` declines is refused with reasons and writes nothing; what it allows is honoured, after a plan
    that holds it too, or where that plan, which covers other phases as well, is refused with reasons."""
    trial = bench.trial(case)
    call = trial.call
    support = bench.adapter.supports(call)
    if support:
        assert not support.reasons, f"a supported call has no reasons against it, got {support.reasons}; {case}"
        want = trial.truth()
        _plan(trial)
        trial.matches(bench.run(call), want)
        return
    assert support.reasons, f"a refusal needs a reason; {case}"
    declined = f"a call that supports() declines ({'; '.join(support.reasons)}); {case}"
    refusal = _refusal(bench, call, declined, (UnsupportedError,))
    assert isinstance(refusal, UnsupportedError)
    assert refusal.reasons, f"a refusal needs a reason; {case}"
    nothing_written(trial)


def _plan(trial: Trial) -> None:
    """Prepare for a supported call where its case says so, or have it refused with reasons."""
    try:
        trial.ask()
    except Refused as refused:
        if not refused.reasons:
            raise AssertionError(f"a refusal needs a reason; {trial.case}") from refused


def plans_widen(bench: Bench, case: Case[Any]) -> None:
    """After a smaller plan a call within the first one is served as before, and needs nothing that it did not have.

    Of scratch that is said where the adapter says what it holds: neither the smaller plan nor the second call changes
    it. Engines plan for several users and then capture: what a plan took back would be made inside capture.
    """
    adapter, trial = bench.adapter, bench.trial(case)
    bench.prepare(case)
    bench.run(trial.call)
    held = _scratch(adapter)
    plan = bench.kit.plan(case, bench.place, bench.limits.null_slot)
    adapter.prepare(replace(plan, max_batch=1, max_tokens=1, max_draft=0))
    assert _scratch(adapter) == held, f"a smaller plan turned {held} of scratch into {_scratch(adapter)}; {case}"
    trial.load(bench.trial(changed(bench, case, 1)))
    adapter.refresh_parameters()
    support = adapter.supports(trial.call)
    assert support, f"after a smaller plan a planned call is refused: {'; '.join(support.reasons)}; {case}"
    want = trial.truth()
    trial.matches(bench.run(trial.call), want)
    assert _scratch(adapter) == held, f"a planned call turned {held} of scratch into {_scratch(adapter)}; {case}"


def _scratch(adapter: object) -> tuple[int, ...]:
    """Bytes held and their bound; nothing where the adapter does not say."""
    return (adapter.scratch_bytes, adapter.scratch_bound) if isinstance(adapter, HoldsScratch) else ()


def closed(bench: Bench, case: Case[Any]) -> None:
    """``close`` is idempotent, and a later call raises ``ClosedError`` and writes nothing."""
    assert bench.make is not None
    adapter = bench.make()
    adapter.close()
    adapter.close()
    trial = bench.trial(case)
    _refusal(replace(bench, adapter=adapter), trial.call, f"a call after close; {case}", (ClosedError,))
    nothing_written(trial)


def _good(kit: Kit, phase: Phase) -> Callable[[Limits], st.SearchStrategy[Case[Any]]]:
    """Calls of two rows or more without padding, from which each spoil takes one thing."""

    def plain(case: Case[Any]) -> Case[Any]:
        sizes = case.sizes
        if isinstance(sizes, GdnSizes):
            # One spoil breaks the head ratio, which a ratio of one key head cannot be; another the raw gates.
            sizes = replace(sizes, key_heads=2, value_heads=2 * (sizes.value_heads // sizes.key_heads),
                            gates=GateKind.RAW)  # fmt: skip
        lengths = tuple(max(2, min(n, 5)) for n in case.lengths)
        return replace(
            case, sizes=sizes, lengths=lengths, own_out=phase is not Phase.COMMIT, every=None, shift=0, draft=2,
            nodes=2, capacity=len(case.slots), rows=None, parents=None, fresh=None, write_slots=None,
            last=(1,) * len(case.slots) if phase is Phase.COMMIT else (),
        )  # fmt: skip

    return lambda limits: cases(kit, limits, phase, Wish(pad=False, min_rows=2, writes=False)).map(plain)


def _odd(kit: Kit, phase: Phase) -> Callable[[Limits], st.SearchStrategy[Case[Any]]]:
    """Calls with every option that an adapter may lack, whatever it says it can do."""

    def all_options(limits: Limits) -> Limits:
        multiple = 1 if kit.port == "gated_delta_rule" else limits.checkpoint_multiple
        return replace(
            limits, trees=True, checkpoints=True, checkpoint_multiple=multiple, gates=tuple(GateKind),
            widths=(*limits.widths, (24, 40)), heads=(*limits.heads, (1, 3)), conv_widths=(*limits.conv_widths, 6),
        )  # fmt: skip

    wish = Wish(pad=False, tree=True, checkpoints=kit.port == "gated_delta_rule", min_length=1)
    return lambda limits: cases(kit, all_options(limits), phase, wish)


def _own_instance(bench: Bench) -> tuple[str, ...]:
    return () if bench.make is not None else ("closing needs a factory, and one shared object was given",)


def refusal_laws(kit: Kit) -> list[Law]:
    """The laws of this module for one port."""
    laws = []
    for phase in Phase:
        bad = law(kit, Clause.REFUSAL, phase, "bad inputs raise and write nothing", bad_inputs, most_examples=5)
        laws.append(replace(bad, cases=_good(kit, phase)))
        if phase is not Phase.COMMIT:
            odd = law(kit, Clause.REFUSAL, phase, "an option is honoured or refused with a reason",
                      unsupported_options)  # fmt: skip
            laws.append(replace(odd, cases=_odd(kit, phase)))
        laws.append(law(kit, Clause.REFUSAL, phase, WIDENS, plans_widen, Wish(tree=None), most_examples=5))
        laws.append(law(kit, Clause.REFUSAL, phase, "a closed adapter refuses", closed, needs=_own_instance,
                        most_examples=2))  # fmt: skip
    return laws
