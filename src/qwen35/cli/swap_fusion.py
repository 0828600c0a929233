"""``torchrun ... -m qwen35 swap --fusion``: the fused finalize's adapters, compared by all ranks together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from qwen35.cli import parse
from qwen35.cli.house import (
    EXIT_FINDING,
    EXIT_INTERRUPTED,
    command_line,
    make_folder,
    open_registry,
    replace_file,
    settings_in_force,
)
from qwen35.cli.launch import joined
from qwen35.cli.screen import errors, progress_bar
from qwen35.cli.swap_show import error_text, finding, show_winners, time_text, write_plot
from qwen35.domain.errors import ConfigurationError
from qwen35.domain.geometry import public_geometry

if TYPE_CHECKING:
    from qwen35.model import TensorParallel
    from qwen35.services.registry import AdapterRegistry
    from qwen35.testing.swap_fusion import FusionExperiment, FusionProgress, FusionShape

#: Stands for every installed adapter.
ALL = "all"
SIZES = "1,8,32,64,256,1024,4096"
#: The document of either experiment, in the folder that --out names.
DOCUMENT = "swap.json"
#: What Ctrl-C is answered with where cells were measured, and where none was: then nothing is written.
INTERRUPTED = "interrupted: keeping what was measured"
INTERRUPTED_EARLY = "interrupted before anything was measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionRequest:
    """The options of one experiment. ``geometry`` may be several names; ``hidden`` and ``top_k`` replace theirs.

    ``tokens`` are the m: an option called --m would be taken by torchrun, as short for one of its own.
    """

    fusion: str
    geometry: str = "35B-A3B"
    tokens: str = SIZES
    hidden: int | None = None
    top_k: int | None = None
    dtype: str = "auto"
    device: str = ""
    seed: int = 0
    repeats: int = 20

    def command(self, ranks: int) -> str:
        """The command that repeats the experiment on one host."""
        words = ["torchrun", "--nproc-per-node", str(ranks), "-m", "qwen35", "swap"]
        options = {
            "fusion": self.fusion, "geometry": self.geometry, "tokens": self.tokens, "hidden": self.hidden,
            "top_k": self.top_k, "dtype": self.dtype, "device": self.device, "seed": self.seed,
            "repeats": self.repeats,
        }  # fmt: skip
        return command_line(words, {name: value for name, value in options.items() if value != ""})


def swap_fusion(request: FusionRequest, folder: Path) -> int:
    """Measure on the ranks that torchrun started; the exit code. A finding is rank 0's alone to tell, which shows it:
    torchrun stops the other ranks as soon as one of them ends with a code.

    Everything is parsed, and every adapter known, before ranks join. Raises ``ConfigurationError`` for a process
    alone, saying how to start several.
    """
    from qwen35.settings import launch_environment

    settings = settings_in_force(request.device)
    adapters = _adapters(request, open_registry(settings))
    shapes, sizes = shapes_of(request), sizes_of(request)
    if launch_environment().world_size == 1:
        raise ConfigurationError(
            f"--fusion compares what several ranks do together, got one process; start it as: {request.command(2)}"
        )
    if launch_environment().rank == 0:
        make_folder("--out", folder)
    with joined(settings) as (own, ranks):
        registry = open_registry(own)
        experiment = experiment_of(request, registry, adapters, shapes, sizes)
        report = measure(request, experiment, registry, ranks, folder)
    if report["interrupted"]:
        return EXIT_INTERRUPTED
    return EXIT_FINDING if ranks.rank == 0 and finding(report, broken_clauses) else 0


def _adapters(request: FusionRequest, registry: AdapterRegistry) -> tuple[str, ...]:
    """The adapters that were named; raises ``UnknownNameError``, or ``ConfigurationError`` where there is none."""
    from qwen35.services.finalize_choice import PORT

    if request.fusion.strip() == ALL:
        return registry.names(PORT)
    names = parse.names("--fusion", request.fusion)
    for name in names:
        registry.entry(PORT, name)
    if not names:
        raise ConfigurationError(f"--fusion must name adapters or be {ALL}; known: {', '.join(registry.names(PORT))}")
    return names


def shapes_of(request: FusionRequest) -> tuple[FusionShape, ...]:
    """Hidden size and top_k of every geometry; sizes that were given by themselves replace them all."""
    from qwen35.testing.swap_fusion import FusionShape

    shapes = []
    for name in parse.names("--geometry", request.geometry):
        g = public_geometry(name)
        given = request.hidden is not None or request.top_k is not None
        shapes.append(FusionShape("given" if given else name, request.hidden or g.hidden, request.top_k or g.top_k))
    if not shapes:
        raise ConfigurationError(f"--geometry must name a geometry, got {request.geometry!r}")
    return tuple(dict.fromkeys(shapes))


def sizes_of(request: FusionRequest) -> tuple[int, ...]:
    """The m to measure, each once: at most as many as our model fuses."""
    from qwen35.model.boundary import MAX_FUSED_TOKENS

    sizes = tuple(dict.fromkeys(parse.sizes("--tokens", request.tokens)))
    if not sizes or max(sizes) > MAX_FUSED_TOKENS:
        asked = f"sizes in 1..{MAX_FUSED_TOKENS} joined by commas"
        raise ConfigurationError(f"--tokens must be {asked}, got {request.tokens!r}")
    return sizes


def experiment_of(
    request: FusionRequest, registry: AdapterRegistry, adapters: tuple[str, ...], shapes: tuple[FusionShape, ...],
    sizes: tuple[int, ...],
) -> FusionExperiment:  # fmt: skip
    """The experiment on the registry's device, m after m of each shape."""
    from qwen35.ports.support import dtype_name
    from qwen35.testing.swap_fusion import FusionExperiment, FusionRow

    dtype = parse.token_dtype(request.dtype, registry.platform.device_type)
    return FusionExperiment(
        rows=tuple(FusionRow(shape, m) for shape in shapes for m in sizes), adapters=adapters,
        dtype=dtype_name(dtype), device=registry.platform.device, seed=request.seed, repeats=request.repeats,
    )  # fmt: skip


def measure(
    request: FusionRequest, experiment: FusionExperiment, registry: AdapterRegistry, ranks: TensorParallel,
    folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Run the experiment; the document. Rank 0 shows it and writes ``folder``/swap.json after every cell, swap.png at
    the end.

    So whatever ends the run (Ctrl-C, a lost rank, a kill), the cells measured so far are there, marked interrupted;
    where there are none, an earlier document stays as it was.
    """
    from qwen35.testing.swap_fusion import FusionProgress
    from qwen35.testing.swap_fusion_report import document

    speaks, progress, finished = ranks.rank == 0, FusionProgress(), False
    path = folder / DOCUMENT

    def report() -> dict[str, Any]:
        return document(
            experiment, progress, registry.platform, ranks=ranks.size, command=request.command(ranks.size),
            interrupted=not finished,
        )  # fmt: skip

    def keep() -> None:
        if speaks and progress.cells:
            replace_file(path, json.dumps(report(), indent=1, allow_nan=False) + "\n")

    try:
        _run(experiment, registry, ranks, progress, keep)
        finished = True
    except KeyboardInterrupt:
        if speaks:
            errors().print(INTERRUPTED if progress.cells else INTERRUPTED_EARLY, style="yellow")
    finally:
        keep()
        registry.close()
    whole = report()
    if speaks and progress.cells:
        _show(whole, path, folder / "swap.png")
    return whole


def _run(
    experiment: FusionExperiment, registry: AdapterRegistry, ranks: TensorParallel, progress: FusionProgress,
    keep: Callable[[], None],
) -> None:  # fmt: skip
    from qwen35.testing.swap_fusion import run

    with progress_bar() as bar:
        total = len(experiment.rows) * len(experiment.adapters)
        task = bar.add_task("measuring", total=total, visible=ranks.rank == 0)
        for cell in run(experiment, registry, ranks, progress):
            keep()
            bar.update(task, advance=1, description=f"{cell.row.label}, {cell.adapter}")


def _show(report: dict[str, Any], path: Path, picture: Path) -> None:
    from qwen35.testing.swap_fusion_report import plot

    show_table(report)
    for line in remarks(report):
        typer.echo(line)
    typer.echo(f"wrote {path}")
    write_plot(plot, report, picture)


def show_table(report: dict[str, Any]) -> None:
    """Print the table of a document: the winner of each row in green."""
    show_winners(
        report,
        title=f"fused finalize, {report['ranks']} ranks, {report['token_dtype']}",
        caption=f"{report['device']['name']}. The slowest rank's time, +- between rounds; the worst rank's errors, "
        "relative to float64.",
        columns=("us", "norm", "residual", "bits"),
        cells=_cells,
    )


def remarks(report: dict[str, Any]) -> list[str]:
    """Who won each row, why, and what "auto" takes; then what kept adapters from running or winning, said once."""
    lines, seen = [], []
    for row in report["rows"]:
        auto = row["automatic"] or "nobody"
        lines.append(f"{row['label']}: {row['winner'] or 'nobody'} ({row['winner_reason']}); auto takes {auto}")
        for result in row["results"]:
            who = result["adapter"]
            seen += [f"{who}: did not run: {reason}" for reason in result["reasons"]]
            seen += [f"{who}: broke {clause}" for clause in broken_clauses(result)]
            seen += [f"{who}: states that it cannot keep {why}" for why in result["deviations"]]
    return lines + list(dict.fromkeys(seen))


def broken_clauses(result: dict[str, Any]) -> list[str]:
    """The clauses that an adapter was seen to break."""
    return list(result["broken"])


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    if not result["ran"]:
        return "-", "-", "-", "-", "did not run"
    broke = broken_clauses(result) + [f"{why.partition(':')[0]} (stated)" for why in result["deviations"]]
    return (
        time_text(result), error_text(result["norm_error"]), error_text(result["residual_error"]),
        "alike" if result["bits_agree"] else "differ", ", ".join(broke),
    )  # fmt: skip
