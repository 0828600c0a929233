"""Rewrites the tables of README.md and benchmarks/README.md from the committed measurements.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` and comes from ``results/NAME.json``, which
``qwen35 swap`` or a script of this folder wrote. ``--check`` writes nothing and
exits with 1 where a table is not what its document says.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from engine_tables import engines_table, parity_table, used

ROOT = Path(__file__).parents[1]
_MARKED = re.compile(r"(<!-- table: (?P<name>[^ ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(
    check: Annotated[bool, typer.Option("--check", help="Only say whether the tables are up to date.")] = False,
    readme: Annotated[list[Path] | None, typer.Option(help="The documents to rewrite; default: both READMEs.")] = None,
    results: Annotated[Path, typer.Option(help="Where the measurements are.")] = ROOT / "benchmarks" / "results",
) -> None:
    """Rewrite, or check, every marked table."""
    stale = []
    for document in readme or (ROOT / "README.md", ROOT / "benchmarks" / "README.md"):
        old = document.read_text(encoding="utf-8")
        try:
            new = rewritten(old, results)
        except FileNotFoundError as missing:
            typer.echo(f"{document}: a table names a result that is not there: {missing.filename}", err=True)
            raise typer.Exit(1) from None
        if new == old:
            typer.echo(f"{document}: tables are up to date")
        elif check:
            stale.append(f"{document}: tables are stale; run python benchmarks/tables.py")
        else:
            document.write_text(new, encoding="utf-8")
            typer.echo(f"{document}: tables rewritten")
    if stale:
        typer.echo("\n".join(stale), err=True)
        raise typer.Exit(1)


def rewritten(text: str, results: Path) -> str:
    """``text`` with every marked table made anew. Raises ``FileNotFoundError`` naming a document that is not there."""

    def fill(match: re.Match[str]) -> str:
        path = results / f"{match['name']}.json"
        report = json.loads(path.read_text(encoding="utf-8"))
        return f"{match[1]}{table(report)}\n{match[3]}"

    return _MARKED.sub(fill, text)


def table(report: dict[str, Any]) -> str:
    """One document as a Markdown table, by its kind."""
    kinds = {
        "gdn integration": claims_table, "finalize": finalize_table, "engines": engines_table,
        "engine parity": parity_table, "decode against FlashInfer": decode_table,
    }  # fmt: skip
    return kinds.get(report["kind"], swap_table)(report)


def finalize_table(report: dict[str, Any]) -> str:
    """A row a shape and m, microseconds a method; other tunings of ours are left out."""
    rows: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in report["rows"]:
        if not row["method"].startswith("ours,"):
            rows.setdefault((row["hidden"], row["top_k"], row["m"]), {})[row["method"]] = row["us"]
    methods = list(dict.fromkeys(name for found in rows.values() for name in found))
    lines = [
        f"{report['ranks']} x {report['device']}, NVLink multicast {report['multicast']}, {_used(report['versions'])}, "
        f"{report['created'][:10]}. Microseconds a call inside a graph of {report['calls_a_graph']}, the slower rank's "
        "median.",
        "", f"| hidden, top_k | m | {' | '.join(methods)} | ours / best peer |", "| --- " * (len(methods) + 3) + "|",
    ]  # fmt: skip
    for (hidden, top_k, m), found in rows.items():
        peers = [us for name, us in found.items() if name != "ours"]
        ratio = f"{found['ours'] / min(peers):.2f}" if peers and "ours" in found else "-"
        cells = " | ".join(f"{found[name]:.1f}" if name in found else "-" for name in methods)
        lines.append(f"| {hidden}, {top_k} | {m} | {cells} | {ratio} |")
    return "\n".join(lines)


def decode_table(report: dict[str, Any]) -> str:
    """A row a size: microseconds of either adapter, the median of its rounds, and the median of the rounds' ratios."""
    ways = list(report["rows"][0]["us"])
    cells = [f"{way}: flashinfer, triton | ratio" for way in ways]
    lines = [
        f"{report['device']}, {_used(report['versions'])}, {report['created'][:10]}. Microseconds, and Triton's over "
        "FlashInfer's.",
        "", f"| state | HV/H | rows | {' | '.join(cells)} |", "| --- " * (3 + 2 * len(ways)) + "|",
    ]  # fmt: skip
    for row in report["rows"]:
        taken = (", ".join(f"{median(us):.1f}" for us in row["us"][way].values()) for way in ways)
        found = (f"{us} | {row['ratio'][way]:.3f}" for way, us in zip(ways, taken, strict=True))
        state = f"{row['state']}, dt_bias {row['dt_bias']}" if "dt_bias" in row else row["state"]
        lines.append(f"| {state} | {row['heads']}/{row['key_heads']} | {row['batch']} | {' | '.join(found)} |")
    return "\n".join(lines)


def claims_table(report: dict[str, Any]) -> str:
    """A row a claim: what was measured, its goal, and whether that was met."""
    lines = [_claims_caption(report), "", "| what | measured | goal | |", "| --- | --- | --- | --- |"]
    for row in report["rows"]:
        measured = "-" if row["value"] is None else f"{row['value']:.2f} {row['unit']}"
        verdict = {None: "", True: "met", False: "**missed**"}[row["met"]]
        lines.append(f"| {row['what']} | {measured} | {_goal(row)} | {verdict} |")
    reasons = [f"- {row['what']}: not measured: {reason}" for row in report["rows"] for reason in row["reasons"]]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _goal(row: dict[str, Any]) -> str:
    bounds = (("at least", row["at_least"]), ("at most", row["at_most"]))
    return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def _claims_caption(report: dict[str, Any]) -> str:
    g = report["geometry"]
    return (
        f"HV/H {g['value_heads']}/{g['key_heads']}, {report['device']['name']}, {_used(report['versions'])}, "
        f"{report['created'][:10]}."
    )


def swap_table(report: dict[str, Any]) -> str:
    """A row a call, microseconds and percent of the ceiling an adapter."""
    names = list(dict.fromkeys(r["adapter"] for row in report["rows"] for r in row["results"]))
    lines = [_caption(report), "", f"| call | floor us | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    for row in report["rows"]:
        by_name = {result["adapter"]: result for result in row["results"]}
        cells = [_cell(by_name.get(name), name == row["winner"]) for name in names]
        lines.append(f"| {row['label']} | {_us(row['floor_us'])} | {' | '.join(cells)} |")
    if notes := _notes(report):
        lines += ["", *notes]
    return "\n".join(lines)


def _caption(report: dict[str, Any]) -> str:
    g, used = report["geometry"], _used(report["versions"])
    partial = " (interrupted)" if report["interrupted"] else ""
    return (
        f"{g['name']} at tensor parallel {g['tp']}: HV/H {g['value_heads']}/{g['key_heads']}, {report['state_dtype']} "
        f"state, {report['token_dtype']} tokens, {report['device']['name']}, copy {report['copy_gb_per_s']} GB/s, "
        f"{used}, {report['created'][:10]}{partial}. Microseconds (percent of the memory ceiling); "
        "winners in bold; cells marked eager hold the host's part of a call and are not to be compared with graph "
        "replays."
    )


def _used(versions: dict[str, str | None]) -> str:
    return used(versions, "torch", "triton", "flashinfer", "sglang")


def _cell(result: dict[str, Any] | None, won: bool) -> str:
    if result is None or not result["ran"]:
        return "-"
    text = f"{_us(result['time_us'])} ({result['percent_of_ceiling']:.0f} %)"
    if not any(word in result["method"] for word in _DEVICE_ALONE):
        text += " eager"
    if result["broken"] or result["deviations"]:
        text += " †"
    return f"**{text}**" if won else text


#: Methods, by a word of theirs, whose times hold nothing of the host's part.
_DEVICE_ALONE = ("graph", "queued before")


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _notes(report: dict[str, Any]) -> list[str]:
    """Why cells are empty or marked, each reason once."""
    said = []
    for row in report["rows"]:
        for result in row["results"]:
            who = f"{result['adapter']}, {row['phase']}"
            said += [f"- {who}: did not run: {reason}" for reason in result["reasons"]]
            said += [f"- † {who}: broke {broken['clause']}: {broken['seen']}" for broken in result["broken"]]
            said += [f"- † {result['adapter']} states that it cannot keep {why}" for why in result["deviations"]]
    return list(dict.fromkeys(said))


if __name__ == "__main__":
    typer.run(main)
