"""``qwen35 swap``: the adapter-swap experiment on screen and in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from qwen35.cli import parse
from qwen35.cli.house import (
    DEVICE_HELP,
    EXIT_FINDING,
    EXIT_INTERRUPTED,
    command_line,
    make_folder,
    open_registry,
    refuse_existing,
    replace_file,
    settings_in_force,
)
from qwen35.cli.screen import errors, progress_bar
from qwen35.cli.swap_fusion import DOCUMENT, INTERRUPTED, INTERRUPTED_EARLY, SIZES, FusionRequest, swap_fusion
from qwen35.cli.swap_show import error_text, finding, show_winners, time_text, write_plot
from qwen35.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from qwen35.domain.geometry import GdnGeometry
    from qwen35.services.registry import AdapterRegistry
    from qwen35.testing.swap import Experiment, Progress
    from qwen35.testing.workload import Row

#: The oracle itself: in the list only when named.
_ORACLE = "reference64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of one experiment, as the command line spells them.

    ``gdn`` empty: every usable adapter but the oracle; ``device`` empty: what the settings say; ``null_slot`` 0: the
    pool's slot 0 is nobody's, as in some engines; -1: none.
    """

    model: Path | None = None
    geometry: str = "35B-A3B"
    tp: int = 1
    gdn: str = ""
    decode_batches: str = "1,8,64,256"
    prefill: str = "1x2048;16x1024"
    verify: str = "8x4"
    state_dtype: str = "float32"
    dtype: str = "auto"
    null_slot: int = -1
    device: str = ""
    seed: int = 0
    repeats: int = 20

    def command(self) -> str:
        """The command that repeats the experiment."""
        options: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            left_out = value == field.default == ""  # an option that was emptied is one that was given
            if not left_out and not (field.name == "geometry" and self.model is not None):
                options[field.name] = value
        return command_line(["qwen35", "swap"], options)


_DEFAULT = Request()


def swap(
    model: Path | None = typer.Option(None, help="Checkpoint folder whose config.json gives the geometry."),
    geometry: str = typer.Option(
        "", help=f"Public geometry: 35B-A3B, 122B-A10B or 397B-A17B; default: {_DEFAULT.geometry}. Not with --model."
    ),
    tp: int = typer.Option(_DEFAULT.tp, min=1, help="Tensor-parallel ranks; one rank's part is measured."),
    gdn: str = typer.Option("", help="Adapters joined by commas; default: all that are usable, the oracle apart."),
    decode_batches: str = typer.Option(_DEFAULT.decode_batches, help="Decode batch sizes."),
    prefill: str = typer.Option(_DEFAULT.prefill, help="Length sets joined by ';', each COUNTxLENGTH,..."),
    verify: str = typer.Option(_DEFAULT.verify, help="Verify widths, BATCHxDRAFT joined by commas."),
    state_dtype: str = typer.Option(_DEFAULT.state_dtype, help="State pool: float32 or bfloat16."),
    dtype: str = typer.Option(_DEFAULT.dtype, help="Tokens: auto, float32, bfloat16 or float16."),
    null_slot: int = typer.Option(_DEFAULT.null_slot, min=-1, max=0, help="0: the pool reserves slot 0; -1: none."),
    device: str = typer.Option("", help=DEVICE_HELP),
    seed: int = typer.Option(_DEFAULT.seed, help="Seed of tokens, states and slots."),
    repeats: int = typer.Option(_DEFAULT.repeats, min=1, help="Replays or eager calls a round; there are two."),
    fusion: str = typer.Option("", help="Compare these adapters of the fused finalize (or all), under torchrun."),
    tokens: str = typer.Option("", help=f"With --fusion: tokens of a call, m; default: {SIZES}."),
    hidden: int | None = typer.Option(None, min=1, help="With --fusion: this hidden size, not the geometry's."),
    top_k: int | None = typer.Option(None, min=1, help="With --fusion: this top_k, not the geometry's."),
    out: Path | None = typer.Option(None, help="Folder for swap.json and swap.png; default: runs/swap-DATE."),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace the swap.json that --out holds; without it such a folder is refused."
    ),
) -> None:
    """Run adapters on the same calls: error against float64, time, memory ceiling, broken clauses, winner.

    Exit code 1 where an adapter broke a clause that it does not state, or a row has no winner.
    """
    if model is not None and geometry:
        raise ConfigurationError("--model and --geometry each give a geometry, got both: leave one out")
    request = Request(
        model=model, geometry=geometry or _DEFAULT.geometry, tp=tp, gdn=gdn, decode_batches=decode_batches,
        prefill=prefill, verify=verify, state_dtype=state_dtype, dtype=dtype, null_slot=null_slot, device=device,
        seed=seed, repeats=repeats,
    )  # fmt: skip
    folder = out or Path("runs") / f"swap-{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}"
    refuse_existing("--out", [folder / DOCUMENT], overwrite)
    if fusion:
        code = swap_fusion(_fusion_request(request, fusion, tokens, hidden, top_k), folder)
    elif tokens or hidden is not None or top_k is not None:
        raise ConfigurationError("--tokens, --hidden and --top-k are of the fused finalize: give --fusion too")
    else:
        report = measure(request, folder)
        code = EXIT_INTERRUPTED if report["interrupted"] else EXIT_FINDING if finding(report, broken_clauses) else 0
    if code:
        raise typer.Exit(code)


def _fusion_request(request: Request, fusion: str, tokens: str, hidden: int | None, top_k: int | None) -> FusionRequest:
    """The same for the fused finalize. Raises ``ConfigurationError`` for options that it would leave unread."""
    read = replace(
        _DEFAULT, geometry=request.geometry, dtype=request.dtype, device=request.device, seed=request.seed,
        repeats=request.repeats,
    )  # fmt: skip
    if request != read:
        raise ConfigurationError(
            "--fusion goes with --tokens, --geometry, --hidden, --top-k, --dtype, --device, --seed, --repeats and "
            "--out only"
        )
    return FusionRequest(
        fusion=fusion, geometry=request.geometry, tokens=tokens or SIZES, hidden=hidden, top_k=top_k,
        dtype=request.dtype, device=request.device, seed=request.seed, repeats=request.repeats,
    )  # fmt: skip


def make_rows(decode_batches: str, prefill: str, verify: str) -> tuple[Row, ...]:
    """The rows that the options name, each once. Raises ``ConfigurationError`` where there is none."""
    from qwen35.domain.capabilities import Phase
    from qwen35.testing.workload import Row

    rows = [Row(Phase.DECODE, (1,) * batch) for batch in parse.sizes("--decode-batches", decode_batches)]
    rows += [Row(Phase.EXTEND, lengths) for lengths in parse.length_sets("--prefill", prefill)]
    rows += [Row(Phase.VERIFY, (draft,) * batch) for batch, draft in parse.pairs("--verify", verify)]
    if not rows:
        raise ConfigurationError("nothing to measure: --decode-batches, --prefill and --verify are all empty")
    return tuple(dict.fromkeys(rows))


def measure(request: Request, folder: Path) -> dict[str, Any]:
    """Run the experiment, show its table, write swap.json and swap.png into ``folder``; the document.

    It is written after every cell, marked interrupted until the last: Ctrl-C keeps what was measured, and so does a
    kernel that takes the process down. Where there is no cell yet an earlier document stays as it was.
    """
    from qwen35.testing.swap import Progress
    from qwen35.testing.swap_report import document

    registry = open_registry(settings_in_force(request.device))
    name, sizes = parse.geometry(request.model, request.geometry, request.tp)
    experiment = _experiment(request, registry, sizes)
    named = replace(request, gdn=",".join(experiment.adapters), device=registry.platform.device)
    make_folder("--out", folder)
    path, progress, finished = folder / DOCUMENT, Progress(), False

    def report() -> dict[str, Any]:
        return document(
            experiment, progress, registry.platform, geometry_name=name, tp=request.tp, command=named.command(),
            interrupted=not finished,
        )  # fmt: skip

    def keep() -> None:
        replace_file(path, json.dumps(report(), indent=1, allow_nan=False) + "\n")

    try:
        _measure_with_bar(experiment, registry, progress, keep)
        finished = True
        keep()
    except KeyboardInterrupt:
        errors().print(INTERRUPTED if progress.cells else INTERRUPTED_EARLY, style="yellow")
    finally:
        registry.close()
    whole = report()
    if progress.cells:
        _show(whole, path, folder / "swap.png")
    return whole


def _show(report: dict[str, Any], path: Path, picture: Path) -> None:
    show_table(report)
    for line in remarks(report):
        typer.echo(line)
    typer.echo(f"wrote {path}")
    _plot(report, picture)


def _experiment(request: Request, registry: AdapterRegistry, geometry: GdnGeometry) -> Experiment:
    """Everything is parsed, and every adapter known, before anything is measured."""
    import torch

    from qwen35.services.gated_delta_rule import PORT
    from qwen35.testing.swap import Experiment
    from qwen35.testing.workload import Layout

    adapters = parse.names("--gdn", request.gdn)
    for name in adapters:
        registry.entry(PORT, name)
    if not adapters:
        adapters = tuple(n for n in registry.names(PORT) if n != _ORACLE and registry.usable(PORT, n))
    layout = Layout(
        geometry=geometry, token_dtype=parse.token_dtype(request.dtype, registry.platform.device_type),
        state_dtype=parse.state_dtype(request.state_dtype), device=torch.device(registry.platform.device),
        null_slot=None if request.null_slot < 0 else request.null_slot,
    )  # fmt: skip
    return Experiment(
        layout=layout, rows=make_rows(request.decode_batches, request.prefill, request.verify), adapters=adapters,
        seed=request.seed, repeats=request.repeats,
    )  # fmt: skip


def _measure_with_bar(
    experiment: Experiment, registry: AdapterRegistry, progress: Progress, keep: Callable[[], None]
) -> None:
    """``keep`` is called after every cell."""
    from qwen35.testing.swap import run

    with progress_bar() as bar:
        task = bar.add_task("measuring", total=len(experiment.rows) * len(experiment.adapters))
        for cell in run(experiment, registry, progress):
            keep()
            bar.update(task, advance=1, description=f"{cell.row.label}, {cell.adapter}")


def _plot(report: dict[str, Any], path: Path) -> None:
    from qwen35.testing.swap_report import plot

    write_plot(plot, report, path)


def show_table(report: dict[str, Any]) -> None:
    """Print the table of a swap document: the winner of each row in green."""
    g, copy = report["geometry"], report["copy_gb_per_s"]
    show_winners(
        report,
        title=f"{g['name']}, tp {g['tp']}: HV/H {g['value_heads']}/{g['key_heads']}, {report['state_dtype']} state",
        caption=f"{report['device']['name']}, copy {copy or '-'} GB/s. +-: between rounds. Errors: against float64.",
        columns=("us", "ceiling", "out error", "state error"),
        cells=_cells,
    )


def remarks(report: dict[str, Any]) -> list[str]:
    """Who won each row and why, then what kept adapters from running or winning, each said once."""
    lines = [f"{row['label']}: {row['winner'] or 'nobody'} ({row['winner_reason']})" for row in report["rows"]]
    seen = []
    for row in report["rows"]:
        for result in row["results"]:
            who = f"{result['adapter']}, {row['phase']}"
            seen += [f"{who}: did not run: {reason}" for reason in result["reasons"]]
            seen += [f"{who}: broke {broken['clause']}: {broken['seen']}" for broken in result["broken"]]
            seen += [f"{result['adapter']}: states that it cannot keep {why}" for why in result["deviations"]]
    return lines + list(dict.fromkeys(seen))


def broken_clauses(result: dict[str, Any]) -> list[str]:
    """The clauses that an adapter was seen to break, each once."""
    return list(dict.fromkeys(broken["clause"] for broken in result["broken"]))


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    if not result["ran"]:
        return "-", "-", "-", "-", "did not run"
    broke = broken_clauses(result)
    broke += [f"{deviation.partition(':')[0]} (stated)" for deviation in result["deviations"]]
    return (
        time_text(result), f"{result['percent_of_ceiling']:.3g} %", error_text(result["output_error"]),
        error_text(result["state_error"]), ", ".join(broke),
    )  # fmt: skip
