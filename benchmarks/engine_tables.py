"""Documents of engine suites, and of recorded calls, as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from engine_compare import own_rounds, paired

Row = dict[str, Any]


def engines_table(report: Row) -> str:
    """A row an engine against the first, how far the first's own rounds are apart, then ours against SGLang's best;
    columns that no engine fills are left out."""
    first, rows = report["against"], [row | _ratios(report["rows"][0], row) for row in report["rows"]]
    ratios: Mapping[str, Row] = next((row["throughput_ratio"] for row in rows if "throughput_ratio" in row), {})
    steps = _steps(report)
    columns: list[tuple[str, Callable[[Row], str]]] = [
        (f"prompt log-probabilities from {first}'s, mean (largest)", lambda row: _apart(row.get("prompt_logprobs"))),
        ("leading ids as there", _ids),
        ("log-probabilities of those ids, mean (largest) of how many", lambda row: _of(row.get("output_logprobs"))),
        ("of all ids that it decoded, from transformers float32's", lambda row: _of(row.get("decoded_from_truth"))),
        ("a second pass, which hits the cache", lambda row: _apart(row.get("second_pass"))),
        ("a batch of all, from one by one", _batch),
        ("tokens that the cache spared", lambda row: str(row.get("cached_tokens", {}).get("second", ""))),
        ("weights updated, from a cold engine's", lambda row: _apart(row.get("after_update", {}).get("from_cold"))),
        ("served whole, of those not cancelled", _stress),
        ("cancelled, and ended before their last token", _ended),
        ("drafts verified, tokens", _accepted),
        ("divergences counted", lambda row: str(row.get("divergences", ""))),
        *((name.replace(" tokens/s", ""), _ratio(name)) for name in ratios),
        *((f"device's part of a {name.replace(' tokens/s', '')}", _device(name, *of)) for name, of in steps.items()),
        ("our calls counted", lambda row: _calls(row.get("counters", {}))),
    ]  # fmt: skip
    used = [column for column in columns if any(column[1](row) for row in rows)]
    own, best = (_own(rows[0], "the first engine's"), against_best(rows)) if ratios else ([], [])
    rows += [*own, *best]
    compared = f"{_ratios_are(rows)} {_cut(rows)}" if ratios else _cut(rows[:1])
    about = f"{compared}{_parts(steps, rows)}"
    lines = [_caption(report, about)]
    lines += ["", f"| engine | {' | '.join(name for name, _ in used)} |", "| --- " * (len(used) + 1) + "|"]
    lines += [f"| {row['tag']} | {' | '.join(cell(row) for _, cell in used)} |" for row in rows]
    if report.get("missing"):
        lines.append(f"- not in this run: {', '.join(report['missing'])}")
    return "\n".join(lines)


def _ratios_are(rows: list[Row]) -> str:
    """What ratios are, and when they show nothing: the host sets the pace, and rounds are few."""
    said = "of each engine's own median."
    if any(found["low"] != found["high"] for row in rows for found in row.get("throughput_ratio", {}).values()):
        own = "; nor where a ratio lies between the quartiles of one engine's own rounds, here over their median"
        said = (
            "round by round: the median (quartiles), then that of the engines' own medians. Where 1 lies between the "
            "quartiles, or between the two, neither engine is shown to be faster"
            f"{own if any('own' in row for row in rows) else ''}."
        )
    return f"Ratios are of tokens a second, {said}"


def _own(row: Row, whose: str) -> list[Row]:
    """A row of how far the rounds of one engine are apart, where it has several."""
    own = own_rounds(row.get("samples", {}))
    return [{"tag": f"{whose} own rounds: quartiles", "own": own}] if own else []


def _cut(rows: Iterable[Row]) -> str:
    """Which measures have fewer rounds than were asked for; older documents do not say how many those were."""
    made: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        for name, count in row.get("rounds", {}).get("made", {}).items():
            made.setdefault((name, row["rounds"]["asked"]), []).append(count)
    fewer = [
        f"{name.replace(' tokens/s', '')}: {_between(min(counts), max(counts))} of {asked}"
        for (name, asked), counts in made.items() if min(counts) < asked
    ]  # fmt: skip
    return f"Rounds were cut off ({'; '.join(fewer)}). " if fewer else ""


def _between(low: float, high: float) -> str:
    return f"{low} to {high}" if low != high else f"{low}"


def against_best(rows: list[Row]) -> list[Row]:
    """Of each measure, SGLang's own setting with the best median, and every engine of ours against that; none where
    SGLang ran with one setting only."""
    own = [row for row in rows if row.get("plugin") in ("off", "absent") and row.get("samples")]
    settings = {json.dumps(row["engine"] | {"port": None}, sort_keys=True) for row in own}
    if len(settings) < 2:
        return []
    names = [name for name in own[0]["samples"] if all(name in row["samples"] for row in own)]
    best = {name: max(own, key=lambda row: median(row["samples"][name])) for name in names}
    samples = {name: row["samples"][name] for name, row in best.items()}
    return [
        {"tag": "SGLang's best setting, by its median", "best": {name: row["tag"] for name, row in best.items()}},
        *_own({"samples": samples}, "that setting's"),
        *({"tag": f"{row['tag']}, against that", "throughput_ratio": paired(samples, row["samples"])}
          for row in rows if row.get("plugin") == "on" and row.get("samples")),
    ]  # fmt: skip


def parity_table(report: Row) -> str:
    """Each adapter on the recorded calls of every layer, and how far engines drift apart from layer to layer."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in report["error"]:
        found.setdefault((row["phase"], row["who"]), []).append(row)
    lines = [
        _caption(report, f"Calls of {', '.join(map(str, report['tokens']))} tokens, relative errors against float64."),
        "", "| phase | by | calls | out: median, largest | states: median, largest |", "| --- " * 5 + "|",
    ]  # fmt: skip
    for (phase, who), rows in sorted(found.items()):
        calls = sum(row["calls"] for row in rows)
        lines.append(f"| {phase} | {who} | {calls} | {_worst(rows, 'out')} | {_worst(rows, 'states')} |")
    lines += [f"\n- refused by {who}: {why}" for who, why in report["refused"].items()]
    others = list(dict.fromkeys(row["against"].removeprefix("recorded-") for row in report["drift"]))
    drift: dict[tuple[str, int], dict[str, Row]] = {}
    for row in report["drift"]:
        drift.setdefault((row["phase"], row["layer"]), {})[row["against"].removeprefix("recorded-")] = row
    lines += [
        "", "The same calls of two engines, the first against another: how far apart what they read and returned is.",
        "Phases in which the first layer read different tokens are left out.",
        "", f"| phase | layer | {' | '.join(f'{other}: v, out' for other in others)} |",
        "| --- " * (len(others) + 2) + "|",
    ]  # fmt: skip
    first = dict(sorted(drift, reverse=True))  # the smallest layer of each phase comes last, and stays
    other_tokens = {phase for phase, layer in first.items() if any(r["v"]["max"] for r in drift[phase, layer].values())}
    for (phase, layer), by in sorted(drift.items()):
        if phase in other_tokens:
            continue
        cells = (f"{by[o]['v']['median']:.1e}, {by[o]['out']['median']:.1e}" if o in by else "" for o in others)
        lines.append(f"| {phase} | {layer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def used(versions: dict[str, str | None], *names: str) -> str:
    """Those of ``names`` that were there, with their versions."""
    return ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))


def _caption(report: Row, more: str) -> str:
    packages = used(report["versions"], "sglang", "torch", "triton", "flashinfer")
    return f"{report['device']}, {packages}, {report['created'][:10]}. {more}".rstrip()


def _apart(found: Row | None) -> str:
    return "" if found is None else f"{found['mean']:.4f} ({found['max']:.3f})"


def _ids(row: Row) -> str:
    if "equal_leading_ids" not in row:
        return ""
    return "all" if row["same_ids"] else ", ".join(map(str, row["equal_leading_ids"]))


def _of(found: Row | None) -> str:
    return f"{_apart(found)} of {found['tokens']}" if found else ""


def _batch(row: Row) -> str:
    """Shown where prompts share prefixes: a batch may read states that one of its prompts has just written."""
    return _apart(row.get("noise")) if "second_pass" in row else ""


def _stress(row: Row) -> str:
    return f"{row['stress']['complete']} of {row['stress']['of']}" if "stress" in row else ""


def _ended(row: Row) -> str:
    stress = row.get("stress", {})
    return f"{stress['ended']} of {stress['cancelled']}" if "ended" in stress else ""


def _accepted(row: Row) -> str:
    said = row.get("accepted", {})
    return f"{said['verify_calls']}, {said['tokens']}" if said.get("verify_calls") else ""


def _ratios(first: Row, row: Row) -> Row:
    """Anew of what both were timed at: older documents lack the ratio of medians."""
    if not (first.get("samples") and row.get("samples")):
        return {}
    return {"throughput_ratio": paired(first["samples"], row["samples"])}


def _ratio(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = row.get("throughput_ratio", {}).get(name)
        if name in row.get("own", {}):
            low, high = row["own"][name]
            return f"{low:.2f} to {high:.2f}"
        if not found:
            return str(row.get("best", {}).get(name, ""))
        if found["low"] == found["high"]:
            return f"{found['median']:.2f}"
        own = f", {found['of_medians']:.2f}" if "of_medians" in found else ""
        return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f}){own}"

    return cell


def _steps(report: Row) -> dict[str, tuple[str, float]]:
    """By measure, which figure is shown of the device, and the first engine's. None where engines have several ranks:
    kernels that wait for the other rank would count as work."""
    first = report["rows"][0]
    if {**report.get("engine", {}), **first.get("engine", {})}.get("tp_size", 1) > 1:
        return {}
    steps = {}
    for name, step in first.get("device_steps", {}).items():
        what = "kernels_us" if "forwards" in step else "span_us"
        if what in step:
            steps[name] = (what, step[what])
    return steps


def _parts(steps: Mapping[str, tuple[str, float]], rows: Iterable[Row]) -> str:
    """What figures of the device are."""
    said = {
        "span_us": "of a decode from the first kernel to the last of a replayed step",
        "kernels_us": "of a prefill the sum of its kernels' times, without the host's time between them",
    }
    parts = [text for what, text in said.items() if any(shown == what for shown, _ in steps.values())]
    ranged = any(_range(row, name, what) for row in rows for name, (what, _) in steps.items())
    several = "; the median (lowest to highest) of several traces" if ranged else ""
    return f"The device's part: {', '.join(parts)}{several}; and how many times as fast." if parts else ""


def _range(row: Row, name: str, what: str) -> str:
    """Lowest and highest of several traces, where there were several."""
    step = row.get("device_steps", {}).get(name, {})
    if step.get("traces", 1) < 2:
        return ""
    low, high = step[f"{what}_range"]
    return f" ({low:.1f} to {high:.1f})"


def _device(name: str, what: str, first_us: float) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = row.get("device_steps", {}).get(name, {}).get(what)
        return "" if found is None else f"{found:.0f} us{_range(row, name, what)}, {first_us / found:.3f}"

    return cell


def _calls(counters: dict[str, float]) -> str:
    """Calls by adapter and phase, of a service's counters."""
    found: dict[str, float] = {}
    for name, value in counters.items():
        if name.startswith("qwen35_calls_total"):
            labels = dict(pair.split("=", 1) for pair in name.split()[1:])
            who = f"{labels.get('adapter', '?')} {labels.get('phase', '')}".strip()
            found[who] = found.get(who, 0) + value
    return ", ".join(f"{who} {value:.0f}" for who, value in sorted(found.items()))


def _worst(rows: Iterable[Row], what: str) -> str:
    rows = list(rows)
    return f"{median(row[what]['median'] for row in rows):.1e}, {max(row[what]['max'] for row in rows):.1e}"
