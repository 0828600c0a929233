"""Recorded GDN calls of a live engine against the float64 recurrence, and how two engines drift apart layer by layer.

    python benchmarks/sglang_engine.py run DIR --out off.json --plugin off --record REC/off --engine EAGER
    python benchmarks/sglang_engine.py run DIR --out fi.json --set gdn_extend=flashinfer --record REC/fi --engine EAGER
    python benchmarks/engine_parity.py REC/off REC/fi --adapters triton,flashinfer,sglang --out engine_parity.json

where EAGER is disable_decode_cuda_graph=true. Of the first folder every call is given to every adapter, and compared
with the oracle on the same tokens: the ``error`` rows. "served" is what the engine's own call returned. "oracle,
SGLang's gates" is the float64 recurrence on the gates that SGLang computed for extend, whose beta is rounded: what
that rounding alone costs. The ``drift`` rows compare the same call of both engines: its inputs (what all earlier
layers made of it), its outputs and its states. Errors are relative, Frobenius.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from engine_model import where_and_when
from engine_recording import Recording, recordings
from qwen35.container import adapter
from qwen35.domain.errors import Qwen35Error
from qwen35.ports.gated_delta_rule import ExtendCall, GatedDeltaRule, VerifyCall
from qwen35.services.assembly import guarded
from qwen35.services.counters import Counters
from qwen35.services.platform import detect_platform

ORACLE = "reference64"
SERVED, ROUNDED = "served", "oracle, SGLang's gates"
#: What one call left: its output and the states of the slots that it names, or those behind each of its draft tokens.
Left = tuple[Tensor, Tensor]


def relative(got: Tensor, want: Tensor) -> float:
    """``||got - want|| / ||want||`` in float64; infinite where shapes differ or ``got`` is not finite."""
    if got.shape != want.shape:
        return float("inf")
    got, want = got.double().cpu(), want.double().cpu()
    found = float((got - want).norm() / want.norm().clamp(min=1e-300))
    return found if found == found else float("inf")


def run(rule: GatedDeltaRule, one: Recording, device: str, dtype: torch.dtype | None = None,
        log_gates: bool = False) -> Left:  # fmt: skip
    """``rule`` on copies of a recorded call."""
    call = one.call(device, dtype, log_gates)
    if isinstance(call, VerifyCall):
        return rule.verify(call), call.intermediates
    out = rule.extend(call).out if isinstance(call, ExtendCall) else rule.decode(call)
    return out, call.states


def errors(
    found: Sequence[Recording], names: Sequence[str], device: str
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row a phase, layer and adapter: median and largest error of outputs and states; and who refused, and why."""
    oracle = adapter("gated_delta_rule", ORACLE, device=device)
    rules, refused = {}, {}
    for name in names:
        try:
            rules[name] = guarded(name, adapter("gated_delta_rule", name, device=device), Counters())
        except Qwen35Error as exc:
            refused[name] = str(exc)
    seen: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for one in found:
        want = run(oracle, one, device, torch.float64)
        by: dict[str, Callable[[], Left]] = {SERVED: lambda one=one: (one.tensors["out"], one.tensors["after"])}  # type: ignore[misc]
        if one.phase == "extend":
            by[ROUNDED] = lambda one=one: run(oracle, one, device, torch.float64, True)  # type: ignore[misc]
        by |= {name: lambda rule=rule, one=one: run(rule, one, device) for name, rule in rules.items()}  # type: ignore[misc]
        for name, left in by.items():
            try:
                out, states = left()
            except Qwen35Error as exc:
                refused[f"{name}, {one.phase}"] = str(exc)
                continue
            key = (one.phase, one.layer, name)
            seen.setdefault(key, []).append((relative(out, want[0]), relative(states, want[1])))
    return [_row(key, pairs) for key, pairs in sorted(seen.items())], refused


def _row(key: tuple[str, int, str], pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    phase, layer, name = key
    outs, states = zip(*pairs, strict=True)
    return {
        "phase": phase, "layer": layer, "who": name, "calls": len(pairs), "out": _figures(outs),
        "states": _figures(states),
    }  # fmt: skip


def _figures(values: Sequence[float]) -> dict[str, float]:
    return {"median": float(f"{median(values):.4g}"), "max": float(f"{max(values):.4g}")}


def drift(first: Sequence[Recording], second: Sequence[Recording]) -> list[dict[str, Any]]:
    """A row a phase and layer: how far the same calls of two engines are apart, in what they read and left."""
    rows = []
    for (phase, layer), pairs in _paired(first, second).items():
        row: dict[str, Any] = {"phase": phase, "layer": layer, "calls": len(pairs)}
        for what in ("q", "k", "v", "a", "b", "before", "out", "after"):
            # A prompt's first call starts from zero states.
            apart = [relative(b, a) for a, b in ((x.tensors[what], y.tensors[what]) for x, y in pairs) if a.any()]
            if apart:
                row[what] = _figures(apart)
        rows.append(row)
    return rows


def _paired(
    first: Sequence[Recording], second: Sequence[Recording]
) -> dict[tuple[str, int], list[tuple[Recording, Recording]]]:
    others = {(one.phase, one.layer, one.number): one for one in second}
    pairs: dict[tuple[str, int], list[tuple[Recording, Recording]]] = {}
    for one in first:
        other = others.get((one.phase, one.layer, one.number))
        if other is not None and other.tokens == one.tokens:
            pairs.setdefault((one.phase, one.layer), []).append((one, other))
    return dict(sorted(pairs.items()))


def lines(document: dict[str, Any]) -> Iterator[str]:
    """The document's rows, for a reader."""
    for row in document["error"]:
        yield (
            f"{row['phase']:7} layer {row['layer']:2} {row['who']:24} out {row['out']['max']:.2e} "
            f"states {row['states']['max']:.2e} of {row['calls']} calls"
        )
    for row in document["drift"]:
        apart = " ".join(f"{what} {row[what]['max']:.2e}" for what in ("v", "out", "after") if what in row)
        yield f"{row['phase']:7} layer {row['layer']:2} drift between engines: {apart}"
    for who, why in document["refused"].items():
        yield f"refused by {who}: {why}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the document and say its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="recordings of one engine, or of two to compare")
    parser.add_argument("--adapters", default="triton,flashinfer,sglang")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    device = detect_platform(args.device).device
    found = [recordings(folder) for folder in args.folders]
    rows, refused = errors(found[0], args.adapters.split(","), device)
    document = {
        "kind": "engine parity", **where_and_when(), "recorded": [str(folder) for folder in args.folders],
        "tokens": sorted({one.tokens for one in found[0]}), "error": rows, "refused": refused,
        "drift": [
            {"against": str(folder.name), **row}
            for folder, other in zip(args.folders[1:], found[1:], strict=True) for row in drift(found[0], other)
        ],
    }  # fmt: skip
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write("\n".join(lines(document)) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
