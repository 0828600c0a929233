"""What a swap experiment of the fused finalize writes: a JSON document of a stable shape, and a plot of it.

The document (``SCHEMA`` 1)::

    schema, kind ("swap fusion"), created (UTC, ISO 8601), command, interrupted, seed, ranks, token_dtype
    device      rank 0's, see ``DeviceFacts``;   versions: see ``versions``
    rows[]      geometry, hidden, top_k, m, label, automatic (what "auto" takes; null: nobody), winner, winner_reason
      results[] adapter, ran, reasons[], time_us, low_us, high_us, spread_us, samples, method,
                norm_error, residual_error, bound, bits_agree, broken[], deviations[]

A number that does not exist (did not run, not finite) is null. Times are microseconds a call of the slowest rank,
errors the worst rank's.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qwen35.domain.platform import Platform
from qwen35.testing.machine import device_facts, versions
from qwen35.testing.measure_ranks import METHODS
from qwen35.testing.report_parts import finite, new_figure, timing_fields
from qwen35.testing.swap_fusion import FusionCell, FusionExperiment, FusionProgress, FusionRow, winner

SCHEMA = 1


def document(
    experiment: FusionExperiment, progress: FusionProgress, where: Platform, *,
    ranks: int, command: str, interrupted: bool,
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of the cells measured so far; the module says its shape."""
    begun = {cell.row for cell in progress.cells}
    return {
        "schema": SCHEMA, "kind": "swap fusion", "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command, "interrupted": interrupted, "seed": experiment.seed, "ranks": ranks,
        "token_dtype": experiment.dtype, "device": device_facts(where), "versions": versions(),
        "rows": [_row(progress, row) for row in experiment.rows if row in begun],
    }  # fmt: skip


def _row(progress: FusionProgress, row: FusionRow) -> dict[str, Any]:
    cells = [cell for cell in progress.cells if cell.row == row]
    name, reason = winner(cells)
    return {
        "geometry": row.shape.name, "hidden": row.shape.hidden, "top_k": row.shape.top_k, "m": row.m,
        "label": row.label, "automatic": progress.automatic[row], "winner": name, "winner_reason": reason,
        "results": [_result(cell) for cell in cells],
    }  # fmt: skip


def _result(cell: FusionCell) -> dict[str, Any]:
    t = cell.timing
    return {
        "adapter": cell.adapter, "ran": t is not None, "reasons": list(cell.reasons),
        **timing_fields(t, None if t is None else METHODS[t.method]),
        "norm_error": finite(cell.norm_error), "residual_error": finite(cell.residual_error), "bound": cell.bound,
        "bits_agree": cell.bits_agree, "broken": [str(clause) for clause in cell.broken],
        "deviations": list(cell.deviations),
    }  # fmt: skip


def plot(report: dict[str, Any], path: Path) -> None:
    """A PNG of ``report`` (a ``document``): time by m, one line an adapter, one panel a shape.

    Raises ``UnavailableError`` where matplotlib is not installed.
    """
    shapes = list(dict.fromkeys((row["hidden"], row["top_k"]) for row in report["rows"]))
    figure = new_figure(9.0, len(shapes))
    for at, (hidden, top_k) in enumerate(shapes):
        axes = figure.add_subplot(len(shapes), 1, at + 1)
        _panel(axes, [row for row in report["rows"] if (row["hidden"], row["top_k"]) == (hidden, top_k)])
        axes.set_title(f"hidden {hidden}, top_k {top_k}")
    figure.suptitle(f"fused finalize, {report['ranks']} ranks, {report['token_dtype']}, {report['device']['name']}")
    figure.savefig(path, dpi=120)


def _panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    ran: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for result in row["results"]:
            if result["ran"]:
                ran.setdefault(result["adapter"], []).append((row["m"], result["time_us"]))
    for name, points in ran.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("m (tokens)")
    axes.set_ylabel("microseconds a call")
    if ran:
        axes.legend()
