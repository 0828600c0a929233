"""The adapter-swap experiment of the fused finalize: every rank runs the same cells in the same order.

A cell is one adapter on one row, with a workspace of its own that is destroyed before the next one is made. The
error is taken on a case with dropped and zero-weight choices and NaN where nothing may be read, the time on one
without. Whether a cell runs, every step of it and its time (the slowest rank's) are agreed on by all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from qwen35.domain.errors import AgreementError, CreationError, UnavailableError, UnsupportedError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import FusionCapabilities, FusionClause
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.model import TensorParallel
from qwen35.ports.finalize_fusion import FusionWorkspace, NormAndResidual
from qwen35.services.finalize_agreement import PROCESS_AGREEMENTS, Agreement
from qwen35.services.finalize_choice import PORT, choose_fusion
from qwen35.services.finalize_facts import device_facts
from qwen35.services.finalize_registry import PROCESS_WORKSPACES, WorkspaceRegistry
from qwen35.services.registry import AUTO, AdapterRegistry
from qwen35.testing.finalize_cases import FinalizeCase
from qwen35.testing.finalize_laws import digest, poisoned
from qwen35.testing.measure import Timing, relative_error
from qwen35.testing.measure_ranks import time_together, together


@dataclass(frozen=True, slots=True)
class FusionShape:
    """Where a row's sizes come from: ``name`` is a public geometry's, or "given"."""

    name: str
    hidden: int
    top_k: int


@dataclass(frozen=True, slots=True)
class FusionRow:
    """``m`` tokens of one shape."""

    shape: FusionShape
    m: int

    @property
    def label(self) -> str:
        return f"{self.shape.hidden}x{self.shape.top_k} m={self.m}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionExperiment:
    """What to measure. ``device`` is this rank's; ``repeats`` is replays or eager calls a round, of which two."""

    rows: tuple[FusionRow, ...]
    adapters: tuple[str, ...]
    dtype: str
    device: str
    seed: int = 0
    repeats: int = 20

    def signature(self, row: FusionRow, ranks: TensorParallel) -> WorkspaceSignature:
        """A workspace for exactly this row."""
        return WorkspaceSignature(
            group=ranks.group, tp_size=ranks.size, rank=ranks.rank, hidden=row.shape.hidden, top_k=row.shape.top_k,
            max_m=row.m, dtype=self.dtype, device=self.device, speculative=False,
        )  # fmt: skip

    def case(self, row: FusionRow, ranks: int) -> FinalizeCase:
        """The inputs of ``row`` that the error is taken on, alike for every adapter."""
        return FinalizeCase(
            seed=self.seed, m=row.m, top_k=row.shape.top_k, hidden=row.shape.hidden, tp_size=ranks, dtype=self.dtype,
            device=self.device,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionCell:
    """One adapter on one row, alike on every rank. ``reasons`` say why it did not run; then the rest is None.

    Errors are relative (Frobenius) against float64, the worst rank's; infinite: not finite. ``bits_agree``:
    every rank holds the same bits, but for the sign of zero.
    """

    row: FusionRow
    adapter: str
    reasons: tuple[str, ...] = ()
    timing: Timing | None = None
    norm_error: float | None = None
    residual_error: float | None = None
    bound: float | None = None
    bits_agree: bool | None = None
    deviations: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[FusionClause, ...]:
        """The clauses that this cell saw broken."""
        if self.bound is None or self.norm_error is None or self.residual_error is None:
            return ()
        over = max(self.norm_error, self.residual_error) > self.bound
        seen = ((FusionClause.PRECISION, over), (FusionClause.IDENTICAL, not self.bits_agree))
        return tuple(clause for clause, broke in seen if broke)

    @property
    def eligible(self) -> bool:
        """Whether it may win: it ran, within its bound, alike on every rank, and keeps every clause."""
        return self.timing is not None and not self.broken and not self.deviations


@dataclass(slots=True)
class FusionProgress:
    """The cells measured so far, in order, and the adapter that "auto" takes for a row (None: nobody)."""

    cells: list[FusionCell] = field(default_factory=list)
    automatic: dict[FusionRow, str | None] = field(default_factory=dict)


def run(
    experiment: FusionExperiment, registry: AdapterRegistry, ranks: TensorParallel, into: FusionProgress,
    workspaces: WorkspaceRegistry = PROCESS_WORKSPACES,
) -> Iterator[FusionCell]:  # fmt: skip
    """Measure cell after cell, appending each to ``into`` before it is yielded. Every rank calls this together.

    Raises ``UnknownNameError`` for an adapter that is not known, before anything is measured, and
    ``AgreementError`` where the ranks were asked for different experiments or one is lost.
    """
    for name in experiment.adapters:
        registry.entry(PORT, name)
    agreement = PROCESS_AGREEMENTS.of(ranks.group, ranks.size)
    _agree_on(experiment, agreement)
    facts = device_facts(experiment.device)
    for row in experiment.rows:
        signature = experiment.signature(row, ranks)
        try:
            into.automatic[row] = choose_fusion(registry, AUTO, signature, facts, agreement).name
        except UnavailableError:
            into.automatic[row] = None
        problem: list[_Problem] = []
        for name in experiment.adapters:
            try:
                choose_fusion(registry, name, signature, facts, agreement)
                adapter = registry.adapter(PORT, name)
                workspace = workspaces.obtain(signature, agreement, adapter.prepare, name)
                if not problem:
                    together(agreement, partial(_add_problem, problem, experiment, row, signature))
                cell = _measure(experiment, row, problem[0], workspace, adapter.capabilities, agreement)
            except (UnavailableError, UnsupportedError, CreationError) as exc:
                reasons = tuple(reason.removeprefix(f"{name}: ") for reason in exc.reasons)
                cell = FusionCell(row=row, adapter=name, reasons=reasons)
            finally:
                workspaces.release()
            into.cells.append(cell)
            yield cell


def winner(cells: Sequence[FusionCell]) -> tuple[str | None, str]:
    """The fastest adapter of a row that kept every clause, and why it won; within noise is said to be a tie."""
    able = sorted(
        (c.timing.median_us, c.timing.spread_us, c.adapter) for c in cells if c.eligible and c.timing is not None
    )
    if not able:
        return None, "no adapter ran and kept every clause"
    best = able[0]
    reason = "only one that ran and kept every clause"
    if len(able) > 1:
        second = able[1]
        near = second[0] - best[0] <= max(best[1], second[1])
        apart = f"{second[2]} ties within noise" if near else f"{second[0] / best[0]:.2f}x {second[2]}"
        reason = f"fastest that kept every clause; {apart}"
    faster = [c.adapter for c in cells if c.timing and not c.eligible and c.timing.median_us < best[0]]
    return best[2], reason + (f"; faster but excluded: {', '.join(faster)}" if faster else "")


def _agree_on(experiment: FusionExperiment, agreement: Agreement) -> None:
    asked = (experiment.rows, experiment.adapters, experiment.dtype, experiment.seed, experiment.repeats)
    heard = agreement.exchange(asked)
    reasons = [f"rank {rank} asks for {other}" for rank, other in enumerate(heard) if other != heard[0]]
    if reasons:
        raise AgreementError("the ranks ask for different experiments", [f"rank 0 asks for {heard[0]}", *reasons])


@dataclass(frozen=True, slots=True)
class _Inputs:
    """One rank's arguments of a call."""

    handoff: FinalizeHandoff
    residual: Tensor
    gamma: Tensor


@dataclass(frozen=True, slots=True)
class _Problem:
    """The inputs whose result ``oracle`` (norm and residual) is, and those that are timed."""

    check: _Inputs
    oracle: tuple[Tensor, Tensor]
    timed: _Inputs


def _add_problem(
    to: list[_Problem], experiment: FusionExperiment, row: FusionRow, signature: WorkspaceSignature
) -> None:
    check = experiment.case(row, signature.tp_size)
    plain = FinalizeCase(
        seed=experiment.seed + 1, m=row.m, top_k=row.shape.top_k, hidden=row.shape.hidden, tp_size=signature.tp_size,
        dropped=0.0, zeroed=0.0, dtype=experiment.dtype, device=experiment.device,
    )  # fmt: skip
    of, timed = (_Inputs(c.handoff(signature.rank), c.residual(), c.gamma()) for c in (check, plain))
    to.append(_Problem(of, check.finalize_oracle(signature.eps, signature.weight_bias), timed))


def _measure(
    experiment: FusionExperiment, row: FusionRow, problem: _Problem, workspace: FusionWorkspace,
    capabilities: FusionCapabilities, agreement: Agreement,
) -> FusionCell:  # fmt: skip
    """Raises ``UnsupportedError`` on every rank, with the ranks' reasons, where a step failed on one."""
    seen = together(agreement, partial(_checked, problem, workspace))
    timed = problem.timed
    out = poisoned(timed.residual)
    call = partial(workspace.finalize, timed.handoff, timed.residual, timed.gamma, out)
    captures = FusionClause.CAPTURE not in capabilities.deviations
    timing = time_together(agreement, call, experiment.device, captures=captures, repeats=experiment.repeats)
    return FusionCell(
        row=row, adapter=workspace.adapter, timing=timing, bound=capabilities.bound(experiment.dtype),
        norm_error=max(norm for norm, _, _ in seen), residual_error=max(residual for _, residual, _ in seen),
        bits_agree=len({bits for _, _, bits in seen}) == 1,
        deviations=tuple(f"{clause}: {why}" for clause, why in capabilities.deviations.items()),
    )  # fmt: skip


def _checked(problem: _Problem, workspace: FusionWorkspace) -> tuple[float, float, str]:
    """Errors of norm and residual on this rank, and its bits."""
    given = problem.check
    support = workspace.supports(given.handoff.m)
    if not support:
        raise UnsupportedError(f"m = {given.handoff.m}", support.reasons)
    out: NormAndResidual = poisoned(given.residual)
    workspace.finalize(given.handoff, given.residual, given.gamma, out)
    norm, residual = problem.oracle
    return relative_error(out.norm, norm), relative_error(out.residual, residual), digest(out)
