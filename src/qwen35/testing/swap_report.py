"""What a swap experiment writes: a JSON document of a stable shape, and a plot of it.

The document (``SCHEMA`` 1)::

    schema, kind ("swap"), created (UTC, ISO 8601), command, interrupted, seed
    geometry    name, tp, key_heads, value_heads, key_width, value_width
    token_dtype, state_dtype, null_slot
    device      see ``DeviceFacts``;   versions: see ``versions``
    copy_gb_per_s   the memory ceiling, read and written bytes both counted; null where not measured
    rows[]      phase, label, lengths, bytes, floor_us, winner, winner_reason,
                oracle_sample {sequences, of_sequences, key_heads, of_key_heads}
      results[] adapter, ran, reasons[], time_us, low_us, high_us, spread_us, samples, method,
                percent_of_ceiling, output_error, state_error, output_bound, state_bound,
                broken[] {clause, seen}, deviations[]

A number that does not exist (did not run, not finite) is null. Times are microseconds a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qwen35.domain.platform import Platform
from qwen35.ports.support import dtype_name
from qwen35.testing.machine import device_facts, versions
from qwen35.testing.report_parts import finite, new_figure, timing_fields
from qwen35.testing.swap import Cell, Experiment, Progress, winner
from qwen35.testing.workload import Row

SCHEMA = 1


def document(
    experiment: Experiment, progress: Progress, where: Platform, *,
    geometry_name: str, tp: int, command: str, interrupted: bool,
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of the cells measured so far; the module says its shape."""
    layout, g = experiment.layout, experiment.layout.geometry
    return {
        "schema": SCHEMA, "kind": "swap", "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command, "interrupted": interrupted, "seed": experiment.seed,
        "geometry": {
            "name": geometry_name, "tp": tp, "key_heads": g.key_heads, "value_heads": g.value_heads,
            "key_width": g.key_width, "value_width": g.value_width,
        },
        "token_dtype": dtype_name(layout.token_dtype), "state_dtype": dtype_name(layout.state_dtype),
        "null_slot": layout.null_slot, "device": device_facts(where), "versions": versions(),
        "copy_gb_per_s": None if progress.bandwidth is None else round(progress.bandwidth / 1e9, 1),
        "rows": [_row(experiment, progress, row) for row in experiment.rows if any_of(progress.cells, row)],
    }  # fmt: skip


def any_of(cells: Sequence[Cell], row: Row) -> list[Cell]:
    """The cells of ``row``, in the order in which they were measured."""
    return [cell for cell in cells if cell.row == row]


def _row(experiment: Experiment, progress: Progress, row: Row) -> dict[str, Any]:
    cells = any_of(progress.cells, row)
    sample, moved = progress.samples[row], experiment.layout.bytes_moved(row)
    name, reason = winner(cells)
    floor = None if progress.bandwidth is None else round(moved / progress.bandwidth * 1e6, 2)
    return {
        "phase": str(row.phase), "label": row.label, "lengths": list(row.lengths), "bytes": moved,
        "floor_us": floor, "winner": name, "winner_reason": reason,
        "oracle_sample": {
            "sequences": len(sample.indices), "of_sequences": row.batch,
            "key_heads": len(sample.key_heads), "of_key_heads": experiment.layout.geometry.key_heads,
        },
        "results": [_result(cell) for cell in cells],
    }  # fmt: skip


def _result(cell: Cell) -> dict[str, Any]:
    t, bound = cell.timing, cell.bound
    return {
        "adapter": cell.adapter, "ran": t is not None, "reasons": list(cell.reasons),
        **timing_fields(t, None if t is None else str(t.method)),
        "percent_of_ceiling": None if cell.ceiling is None else float(f"{100 * cell.ceiling:.4g}"),
        "output_error": finite(cell.output_error), "state_error": finite(cell.state_error),
        "output_bound": None if bound is None else bound.output,
        "state_bound": None if bound is None else bound.state,
        "broken": [{"clause": str(b.clause), "seen": b.seen} for b in cell.broken],
        "deviations": list(cell.deviations),
    }  # fmt: skip


def plot(report: dict[str, Any], path: Path) -> None:
    """A PNG of ``report`` (a ``document``): time by row, one bar an adapter, one panel a phase, the floor marked.

    Raises ``UnavailableError`` where matplotlib is not installed.
    """
    phases = list(dict.fromkeys(row["phase"] for row in report["rows"]))
    names = list(dict.fromkeys(r["adapter"] for row in report["rows"] for r in row["results"] if r["ran"]))
    figure = new_figure(10.0, len(phases))
    for at, phase in enumerate(phases):
        axes = figure.add_subplot(len(phases), 1, at + 1)
        _panel(axes, [row for row in report["rows"] if row["phase"] == phase], names)
    g, device = report["geometry"], report["device"]["name"]
    figure.suptitle(
        f"{g['name']}, tensor parallel {g['tp']}: HV/H = {g['value_heads']}/{g['key_heads']}, "
        f"{report['state_dtype']} state, {device}"
    )
    if figure.axes:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, title="hatched: broke a clause", loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=120)


def _panel(axes: Any, rows: list[dict[str, Any]], names: list[str]) -> None:
    width = 0.8 / max(1, len(names))
    for at, name in enumerate(names):
        for x, row in enumerate(rows):
            result = next((r for r in row["results"] if r["adapter"] == name and r["ran"]), None)
            if result is None:
                continue
            left = x - 0.4 + (at + 0.5) * width
            clean = not result["broken"] and not result["deviations"]
            bar = axes.bar(left, result["time_us"], width * 0.95, color=f"C{at}", hatch=None if clean else "//")
            axes.bar_label(bar, [f"{result['time_us']:.3g}"], fontsize=7)
        axes.bar(0, 0, color=f"C{at}", label=name)
    for x, row in enumerate(rows):
        if row["floor_us"] is not None:
            label = "memory floor" if x == 0 else None
            axes.hlines(row["floor_us"], x - 0.4, x + 0.4, colors="black", linestyles="dotted", label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [row["label"] for row in rows])
    axes.set_ylabel("microseconds a call")
