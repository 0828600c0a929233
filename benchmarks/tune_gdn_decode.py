"""Sweep the tiles of the Triton decode kernel on this GPU: graph replay, cold L2. A minute and a half on an H200.

    python benchmarks/tune_gdn_decode.py --out results/

Prints a table a state dtype (in a row, alone: decode_against_flashinfer.py says how they differ) and writes
decode_tiles.json. Tiles that win belong into ``kernels/gdn_config.py``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qwen35.adapters.triton.kernels.gdn_config import DecodeConfig, decode_config
from qwen35.adapters.triton.kernels.gdn_decode import launch_decode
from qwen35.ports.gated_delta_rule import DecodeCall, RawGates
from qwen35.testing.machine import versions
from qwen35.testing.measure import cold_sets, copy_bandwidth, time_events, time_graph

WIDTH = 128
BATCHES = (1, 2, 4, 8, 64, 256)


def tiles() -> list[DecodeConfig]:
    """Every tile that gives a thread 16 to 64 state elements, with and without the hints of ``stream``."""
    return [
        DecodeConfig(block_v=block_v, inner=inner, num_warps=warps, stream=stream)
        for block_v in (4, 8, 16, 32)
        for inner in (64, 128)
        for warps in (1, 2)
        for stream in (True, False)
        if 16 <= block_v * WIDTH // (32 * warps) <= 64
    ]


def calls(
    batch: int, heads: int, key_heads: int, state_dtype: torch.dtype, bias_dtype: torch.dtype = torch.float32
) -> list[DecodeCall]:
    """Calls over one pool, each with slots of its own, so that every one finds the L2 cold."""
    on = torch.device("cuda")
    bytes_a_call = 2 * batch * heads * WIDTH * WIDTH * state_dtype.itemsize
    sets = cold_sets(on, bytes_a_call)
    states = torch.randn(sets * batch, heads, WIDTH, WIDTH, device=on).mul_(0.1).to(state_dtype)
    slots = torch.randperm(sets * batch, device=on, dtype=torch.int32).view(sets, batch)
    A_log, dt_bias = torch.rand(heads, device=on), torch.randn(heads, device=on, dtype=bias_dtype)
    made = []
    for row in slots:
        packed = torch.randn(batch, 2 * key_heads + heads, WIDTH, device=on, dtype=torch.bfloat16)
        a, b = torch.randn(2, batch, heads, device=on, dtype=torch.bfloat16)
        q, k, v = packed[:, :key_heads], packed[:, key_heads : 2 * key_heads], packed[:, 2 * key_heads :]
        gates = RawGates(a=a, b=b, A_log=A_log, dt_bias=dt_bias)
        made.append(DecodeCall(q=q, k=k, v=v, gates=gates, states=states, slots=row))
    return made


def in_a_row(thunks: list[Callable[[], object]]) -> float:
    """Microseconds of one of the calls, one after another in one graph."""
    return time_graph(thunks, torch.device("cuda"), replays=10).median_us


def alone(call: Callable[[], object]) -> float:
    """Microseconds of one call, the only one of its graph, with the L2 flushed before each replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    taken = time_events([graph.replay], torch.device("cuda"), repeats=40, rounds=1).median_us
    graph.reset()
    return taken


def time_tile(made: list[DecodeCall], tile: DecodeConfig) -> dict[str, float]:
    """Microseconds of one call, in a row with others and alone."""
    out = torch.empty_like(made[0].v)
    thunks: list[Callable[[], object]] = [partial(launch_decode, call, out, tile) for call in made]
    return {"in a row": in_a_row(thunks), "alone": alone(thunks[0])}


def sweep(
    state_dtype: torch.dtype, heads: int, key_heads: int, console: Console
) -> list[dict[str, object]]:
    """Time every tile at every batch."""
    inputs = {batch: calls(batch, heads, key_heads, state_dtype) for batch in BATCHES}
    rows = [(tile, {batch: time_tile(inputs[batch], tile) for batch in BATCHES}) for tile in tiles()]
    table = Table("block_v", "inner", "warps", "stream", *(f"B={b} us" for b in BATCHES), title=str(state_dtype))
    for tile, times in sorted(rows, key=lambda row: row[1][BATCHES[-1]]["in a row"]):
        cells: list[str | Text] = []
        for batch, taken in times.items():
            chosen = "*" if tile == decode_config(WIDTH, WIDTH, state_dtype.itemsize, batch * heads) else ""
            best = min(t[batch]["in a row"] for _, t in rows)
            style = "bold green" if taken["in a row"] == best else ""
            cells.append(Text(f"{taken['in a row']:.1f}, {taken['alone']:.1f}{chosen}", style=style))
        table.add_row(str(tile.block_v), str(tile.inner), str(tile.num_warps), str(tile.stream), *cells)
    console.print(table)
    return [{"state": str(state_dtype), "heads": heads, "tile": asdict(tile), "us": times} for tile, times in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for decode_tiles.json")
    parser.add_argument("--heads", type=int, default=32, help="value heads")
    parser.add_argument("--key-heads", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    console = Console(width=140)
    ceiling = copy_bandwidth(torch.device("cuda"))
    console.print(f"copy ceiling {ceiling / 1e12:.2f} TB/s; * what decode_config chooses")
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        results += sweep(dtype, options.heads, options.key_heads, console)
    options.out.mkdir(parents=True, exist_ok=True)
    payload = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(["python", *sys.argv]),
        "versions": versions(), "device": torch.cuda.get_device_name(), "ceiling_bytes_per_second": ceiling,
        "results": results,
    }  # fmt: skip
    (options.out / "decode_tiles.json").write_text(json.dumps(payload, indent=1))


if __name__ == "__main__":
    main()
