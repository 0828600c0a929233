"""Documents of engine suites, and of recorded calls, as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

Row = dict[str, Any]


def engines_table(report: Row) -> str:
    """A row an engine against the first; columns that no engine fills are left out."""
    first, ratios = report["against"], next((r["throughput_ratio"] for r in report["rows"] if r.get("bench")), {})
    found = report["rows"][0].get("device_steps", {})
    steps = [(name, step["span_us"]) for name, step in found.items() if "span_us" in step]
    columns: list[tuple[str, Callable[[Row], str]]] = [
        (f"prompt log-probabilities from {first}'s, mean (largest)", lambda row: _apart(row.get("prompt_logprobs"))),
        ("leading ids as there", _ids),
        ("a second pass, which hits the cache", lambda row: _apart(row.get("second_pass"))),
        ("tokens that the cache spared", lambda row: str(row.get("cached_tokens", {}).get("second", ""))),
        ("weights updated, from a cold engine's", lambda row: _apart(row.get("after_update", {}).get("from_cold"))),
        ("served whole, of those not cancelled", _stress),
        ("drafts verified, tokens", _accepted),
        ("divergences counted", lambda row: str(row.get("divergences", ""))),
        *((name.replace(" tokens/s", ""), _ratio(name)) for name in ratios),
        *((name.replace("decode tokens/s", "device's part of a decode"), _device(name, us)) for name, us in steps),
        ("our calls counted", lambda row: _calls(row.get("counters", {}))),
    ]  # fmt: skip
    used = [column for column in columns if any(column[1](row) for row in report["rows"])]
    spread = any(f["low"] != f["high"] for row in report["rows"] for f in row.get("throughput_ratio", {}).values())
    how = "round by round: the median (quartiles)" if spread else "of each engine's own median"
    device = " The device's part: from the first kernel to the last of a replayed step, and how many times as fast."
    about = f"Ratios are of tokens a second, {how}.{device if steps else ''}"
    lines = [_caption(report, about if ratios else "")]
    lines += ["", f"| engine | {' | '.join(name for name, _ in used)} |", "| --- " * (len(used) + 1) + "|"]
    lines += [f"| {row['tag']} | {' | '.join(cell(row) for _, cell in used)} |" for row in report["rows"]]
    lines += [f"- not there: {name}" for name in report.get("missing", ())]
    return "\n".join(lines)


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


def _stress(row: Row) -> str:
    return f"{row['stress']['complete']} of {row['stress']['of']}" if "stress" in row else ""


def _accepted(row: Row) -> str:
    said = row.get("accepted", {})
    return f"{said['verify_calls']}, {said['tokens']}" if said.get("verify_calls") else ""


def _ratio(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = row.get("throughput_ratio", {}).get(name)
        if not found:
            return ""
        spread = "" if found["low"] == found["high"] else f" ({found['low']:.2f} to {found['high']:.2f})"
        return f"{found['median']:.2f}{spread}"

    return cell


def _device(name: str, first_us: float) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = row.get("device_steps", {}).get(name, {}).get("span_us")
        return "" if found is None else f"{found:.0f} us, {first_us / found:.3f}"

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
