"""Triton's decode against FlashInfer's pool kernel, in rounds that alternate. Two minutes on an H200.

    python benchmarks/decode_against_flashinfer.py --out results/decode_against_flashinfer.json

Three ways, all by graph replay with a cold L2. ``in a row``: calls over slots of their own, one after another in one
graph, as ``qwen35 swap`` times them; the launch of one hides behind the one before. ``alone``: one call a graph, the
L2 flushed before each replay, events around it; what a launch costs by itself is in it, alike for both. ``between``: as
in a row, each call behind a kernel that writes its v and ahead of one that reads its output; microseconds of all three.
Float32 states each with a dt_bias in float32, as our model keeps it, and in bfloat16, as SGLang does: another kernel to
a compiler.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

import qwen35
from qwen35.domain.geometry import GdnGeometry
from qwen35.ports.gated_delta_rule import DecodeCall, GatedDeltaRule, GdnPlan
from qwen35.ports.support import dtype_name
from qwen35.testing.machine import versions
from qwen35.testing.measure import copy_bandwidth
from tune_gdn_decode import WIDTH, alone, calls, in_a_row

ADAPTERS = ("flashinfer", "triton")
WAYS = ("in a row", "alone", "between")
ROUNDS = 5
#: Value heads, key heads, rows.
ROWS = ((32, 16, 1), (32, 16, 8), (32, 16, 64), (32, 16, 256), (64, 16, 256), (8, 2, 256))
#: Dtypes of state and dt_bias.
KINDS = ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16))
DEVICE = torch.device("cuda")


def row(
    heads: int, key_heads: int, batch: int, state: torch.dtype, bias: torch.dtype, ceiling: float
) -> dict[str, Any]:
    """Microseconds of each adapter in each round, and the median of the rounds' ratios: Triton's over FlashInfer's."""
    made = calls(batch, heads, key_heads, state, bias)
    out = torch.empty_like(made[0].v)
    found: dict[str, dict[str, list[float]]] = {way: {name: [] for name in ADAPTERS} for way in WAYS}
    plan = GdnPlan(
        geometry=GdnGeometry(key_heads=key_heads, value_heads=heads, key_width=WIDTH, value_width=WIDTH),
        state_dtype=state, device=DEVICE, max_batch=batch, max_tokens=batch, may_pad=False,
    )  # fmt: skip
    decodes = {name: decode_of(name, plan) for name in ADAPTERS}
    thunks = {name: [partial(decode, replace(call, out=out)) for call in made] for name, decode in decodes.items()}
    layers = {name: [partial(between, own, call.v, out) for own, call in zip(thunks[name], made, strict=True)]
              for name in ADAPTERS}  # fmt: skip
    for _ in range(ROUNDS):
        for name, own in thunks.items():
            found["in a row"][name].append(in_a_row(own))
            found["alone"][name].append(alone(own[0]))
            found["between"][name].append(in_a_row(layers[name]))
    floor = 2 * batch * heads * WIDTH * WIDTH * state.itemsize / ceiling * 1e6
    return {
        "state": dtype_name(state), "dt_bias": dtype_name(bias),
        "heads": heads, "key_heads": key_heads, "batch": batch, "floor_us": floor, "us": found,
        "ratio": {way: median(t / f for f, t in zip(us["flashinfer"], us["triton"], strict=True))
                  for way, us in found.items()},
    }  # fmt: skip


def between(decode: Callable[[], object], v: torch.Tensor, out: torch.Tensor) -> None:
    """``decode`` behind a kernel that writes ``v`` and ahead of one that reads ``out``. Both change what they write
    by its sign."""
    torch.neg(v, out=v)
    decode()
    torch.neg(out, out=out)


def decode_of(name: str, plan: GdnPlan) -> Callable[[DecodeCall], torch.Tensor]:
    """The decode of an adapter prepared for rows that never pad, around which FlashInfer's kernel needs no mending."""
    adapter = adapter_of(name)
    adapter.prepare(plan)
    return adapter.decode


@cache
def adapter_of(name: str) -> GatedDeltaRule:
    """One adapter a name, so that it compiles once."""
    adapter: GatedDeltaRule = qwen35.adapter("gated_delta_rule", name)
    return adapter


def main(out: Annotated[Path, typer.Option(help="The JSON document to write.")]) -> None:
    """Measure every row, print it, and write the document after each."""
    torch.manual_seed(0)
    ceiling = copy_bandwidth(DEVICE)
    report: dict[str, Any] = {
        "kind": "decode against FlashInfer", "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]), "device": torch.cuda.get_device_name(), "versions": versions(),
        "ceiling_bytes_per_second": ceiling, "rows": [],
    }  # fmt: skip
    for shape, kind in product(ROWS, KINDS):
        report["rows"].append(row(*shape, *kind, ceiling))
        typer.echo(json.dumps(report["rows"][-1]))
        out.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
