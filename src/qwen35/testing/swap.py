"""The adapter-swap experiment: every adapter on the same calls, its error, its time and the clauses it broke.

Reports are JSON-ready; ``SCHEMA`` counts their versions. A cell is one adapter on one row. Cells arrive one by
one, so that an interrupted experiment keeps what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from qwen35.domain.capabilities import Clause, Phase
from qwen35.domain.errors import CaptureError, Qwen35Error, UnavailableError, UnsupportedError
from qwen35.domain.precision import ErrorBound
from qwen35.ports.gated_delta_rule import GatedDeltaRule
from qwen35.ports.support import dtype_name
from qwen35.services.gated_delta_rule import PORT
from qwen35.services.registry import AdapterRegistry
from qwen35.testing.measure import Timing, cold_sets, copy_bandwidth, time_events, time_graph, time_wall
from qwen35.testing.probe import Broken, Truth, oracle_error, probe, run_call, truth_of
from qwen35.testing.workload import (
    Layout,
    Row,
    Sample,
    TokenCall,
    choose_sample,
    live_slots,
    random_call,
    random_pool,
    with_states,
)

#: State elements times tokens that the oracle recomputes for a row: a second or two of one CPU core.
ORACLE_BUDGET = 2**27
#: Errors of ours, and what a kernel package may raise where it should have refused: a cell that did not run.
_CRASHES = (
    Qwen35Error, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError,
    ImportError, OSError,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What to measure. ``repeats`` is replays (GPU), eager calls (extend on a GPU) or calls (CPU) a round."""

    layout: Layout
    rows: tuple[Row, ...]
    adapters: tuple[str, ...]
    seed: int = 0
    repeats: int = 20
    oracle_budget: int = ORACLE_BUDGET


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One adapter on one row. ``reasons`` say why it did not run, or gave nothing that can be compared; then everything
    measured is None.

    Errors are relative (Frobenius) against float64; infinite means that a result was not finite. ``broken`` are
    clauses seen broken here, ``deviations`` those that the adapter states it cannot keep.
    """

    row: Row
    adapter: str
    reasons: tuple[str, ...] = ()
    timing: Timing | None = None
    ceiling: float | None = None
    output_error: float | None = None
    state_error: float | None = None
    bound: ErrorBound | None = None
    broken: tuple[Broken, ...] = ()
    deviations: tuple[str, ...] = ()

    @property
    def eligible(self) -> bool:
        """Whether it may win: it ran, within its bound, and keeps every clause."""
        return self.timing is not None and not self.broken and not self.deviations


@dataclass(slots=True)
class Progress:
    """The cells measured so far, in order, and the memory ceiling in bytes a second."""

    bandwidth: float | None = None
    cells: list[Cell] = field(default_factory=list)
    samples: dict[Row, Sample] = field(default_factory=dict)


@dataclass(slots=True)
class _Bench:
    """The calls of one row: ``check``, on a copy of ``pool``, is compared with ``truth``, ``calls`` are timed."""

    row: Row
    check: TokenCall
    pool: Tensor
    truth: Truth
    calls: list[TokenCall]


def run(experiment: Experiment, registry: AdapterRegistry, into: Progress) -> Iterator[Cell]:
    """Measure cell after cell, appending each to ``into`` before it is yielded.

    Raises ``UnknownNameError`` for an adapter that is not known, before anything is measured.
    """
    for name in experiment.adapters:
        registry.entry(PORT, name)
    device = experiment.layout.device
    into.bandwidth = copy_bandwidth(device)
    verdicts: dict[tuple[str, Phase], tuple[Broken, ...]] = {}
    for row in experiment.rows:
        into.samples[row] = choose_sample(experiment.layout, row, experiment.oracle_budget)
        bench: _Bench | None = None
        for name in experiment.adapters:
            try:
                adapter = _adapter(registry, name)
                adapter.prepare(experiment.layout.plan(row))
                bench = bench or _bench(experiment, row)
                cell = _measure(experiment, bench, name, adapter, into.bandwidth, verdicts)
            except (UnavailableError, UnsupportedError) as exc:
                cell = Cell(row=row, adapter=name, reasons=exc.reasons)
            except _CRASHES as exc:
                cell = Cell(row=row, adapter=name, reasons=(f"{type(exc).__name__}: {exc}",))
            into.cells.append(cell)
            yield cell


def winner(cells: Sequence[Cell]) -> tuple[str | None, str]:
    """The fastest adapter of a row that stays within its bound and breaks no clause, and why it won.

    Two times closer than the spread of either are a tie, which the reason says.
    """
    able = sorted((c for c in cells if c.eligible and c.timing is not None), key=_time)
    if not able:
        return None, "no adapter ran within its bound and kept every clause"
    best = able[0]
    faster = [c.adapter for c in cells if c.timing is not None and not c.eligible and _time(c) < _time(best)]
    reason = "only one that ran and kept every clause" if len(able) == 1 else "fastest that kept every clause"
    if len(able) > 1:
        second = able[1]
        spread = max(_spread(best), _spread(second))
        apart = _time(second) / _time(best)
        near = _time(second) - _time(best) <= spread
        reason += f"; {second.adapter} ties within noise" if near else f"; {apart:.2f}x {second.adapter}"
    if faster:
        reason += f"; faster but excluded: {', '.join(faster)}"
    return best.adapter, reason


def _time(cell: Cell) -> float:
    return math.inf if cell.timing is None else cell.timing.median_us


def _spread(cell: Cell) -> float:
    return 0.0 if cell.timing is None else cell.timing.spread_us


def _adapter(registry: AdapterRegistry, name: str) -> GatedDeltaRule:
    adapter = registry.adapter(PORT, name)
    if not isinstance(adapter, GatedDeltaRule):
        raise UnavailableError(f"{PORT} adapter {name!r}", ["what it makes does not implement the port"])
    return adapter


def _bench(experiment: Experiment, row: Row) -> _Bench:
    """Fresh tokens, states and slots for ``row``; every adapter gets the same."""
    layout = experiment.layout
    generator = torch.Generator(layout.device).manual_seed(experiment.seed)
    sets = cold_sets(layout.device, layout.bytes_moved(row))
    reserved = 0 if layout.null_slot is None else layout.null_slot + 1
    pool = random_pool(layout, sets * row.batch + reserved, generator)
    slots = live_slots(layout, sets * row.batch, pool.shape[0], generator)
    calls = [
        random_call(layout, row, pool, slots[i * row.batch : (i + 1) * row.batch].clone(), generator)
        for i in range(sets)
    ]
    few = random_pool(layout, row.batch + reserved, generator)
    chosen = live_slots(layout, row.batch, few.shape[0], generator)
    check = random_call(layout, row, few, chosen, generator)
    return _Bench(row, check, few, truth_of(check, row, layout, few[chosen.long()], experiment.oracle_budget), calls)


def _measure(
    experiment: Experiment, bench: _Bench, name: str, adapter: GatedDeltaRule, bandwidth: float,
    verdicts: dict[tuple[str, Phase], tuple[Broken, ...]],
) -> Cell:  # fmt: skip
    layout, row = experiment.layout, bench.row
    deviations = tuple(f"{clause}: {why}" for clause, why in adapter.capabilities.deviations.items())
    check = with_states(bench.check, bench.pool.clone())
    support = adapter.supports(check)
    if not support:
        raise UnsupportedError(f"{row.label} by {name}", support.reasons)
    out = run_call(adapter, check)
    form, comparable = _form(check, layout, out)
    if not comparable:
        reasons = ("its output cannot be compared",)
        return Cell(row=row, adapter=name, reasons=reasons, broken=form, deviations=deviations)
    output_error, state_error = oracle_error(check, row, bench.truth, out)
    bound, broken = _judge(adapter, layout, row, output_error, state_error)
    broken = form + broken
    if (name, row.phase) not in verdicts:
        verdicts[name, row.phase] = tuple(probe(adapter, row.phase, layout, experiment.seed + 1))
        adapter.prepare(layout.plan(row))
    broken += verdicts[name, row.phase]
    timing, uncaptured = _timed(experiment, bench, adapter)
    floor = layout.bytes_moved(row) / bandwidth * 1e6
    return Cell(
        row=row, adapter=name, timing=timing, ceiling=floor / timing.median_us, output_error=output_error,
        state_error=state_error, bound=bound, broken=broken + uncaptured, deviations=deviations,
    )  # fmt: skip


def _form(call: TokenCall, layout: Layout, out: object) -> tuple[tuple[Broken, ...], bool]:
    """What is wrong with the form of an output, and whether its values can be compared all the same.

    A wider dtype than the tokens' has smaller errors, so that one would win by them.
    """
    wanted = f"the output must be {dtype_name(layout.token_dtype)} {list(call.v.shape)}"
    if not isinstance(out, Tensor):
        return (Broken(Clause.PRECISION, f"{wanted}, got {type(out).__name__}"),), False
    comparable = out.shape == call.v.shape
    if comparable and out.dtype == layout.token_dtype:
        return (), True
    return (Broken(Clause.PRECISION, f"{wanted}, got {dtype_name(out.dtype)} {list(out.shape)}"),), comparable


def _judge(
    adapter: GatedDeltaRule, layout: Layout, row: Row, output_error: float, state_error: float
) -> tuple[ErrorBound | None, tuple[Broken, ...]]:
    """The adapter's own bound for this call, and the clauses that its errors break."""
    if not (math.isfinite(output_error) and math.isfinite(state_error)):
        return None, (Broken(Clause.FINITE, "a result is not finite"),)
    precision = adapter.capabilities.precision.get(row.phase)
    if precision is None:
        return None, (Broken(Clause.PRECISION, f"the adapter states no error bound for {row.phase}"),)
    bound = precision.bound(dtype_name(layout.token_dtype), dtype_name(layout.state_dtype))
    broken = tuple(
        Broken(Clause.PRECISION, f"{what} error {got:.1e} is over the stated {limit:.1e}")
        for what, got, limit in (("output", output_error, bound.output), ("state", state_error, bound.state))
        if got > limit
    )
    return bound, broken


def _timed(experiment: Experiment, bench: _Bench, adapter: GatedDeltaRule) -> tuple[Timing, tuple[Broken, ...]]:
    """The time of one call, and the capture clause where a phase that must be capturable is not."""
    device = experiment.layout.device
    thunks = [partial(run_call, adapter, call) for call in bench.calls]
    if device.type != "cuda":
        return time_wall(thunks, experiment.repeats), ()
    if bench.row.phase is Phase.EXTEND and not adapter.capabilities.captures_extend:
        return time_events(thunks, device, experiment.repeats), ()
    try:
        return time_graph(thunks, device, experiment.repeats), ()
    except CaptureError as exc:
        torch.cuda.synchronize(device)
        return time_events(thunks, device, experiment.repeats), (Broken(Clause.CAPTURE, str(exc)),)
