"""Sweep the tiles of the two chunked prefill kernels on this GPU. Under a minute on an H200.

    python benchmarks/tune_gdn_prefill.py --out results/

The kernels are timed apart, by graph replay; then the adapter as a whole, by replay and by eager calls. Prints tables
and writes prefill_tiles.json. Tiles that win belong into ``kernels/gdn_config.py``.
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

from qwen35.adapters.triton.gated_delta_rule import TritonGatedDeltaRule
from qwen35.adapters.triton.kernels.gdn_config import ExtendConfig
from qwen35.adapters.triton.kernels.gdn_extend_launch import ExtendLaunch
from qwen35.adapters.triton.kernels.gdn_scratch import ExtendScratch, cut, scratch_bytes
from qwen35.ports.gated_delta_rule import ExtendCall, RawGates
from qwen35.testing.machine import versions
from qwen35.testing.measure import time_events, time_graph

WIDTH = 128
SHAPES = ((1, 2048), (1, 16384), (16, 1024), (1, 65536))
#: block_v, warps, stages
SCANS = ((16, 4, 3), (32, 4, 2), (32, 4, 3), (32, 4, 4), (32, 8, 3), (64, 4, 3), (64, 8, 2), (64, 8, 3))
#: warps, registers
CHUNKS = ((4, None), (4, 168), (4, 128), (8, None), (8, 128))


def make_call(sequences: int, length: int, heads: int, key_heads: int) -> ExtendCall:
    """Random tokens of equal sequences, bfloat16, over a float32 pool."""
    on, tokens = torch.device("cuda"), sequences * length
    packed = torch.randn(tokens, 2 * key_heads + heads, WIDTH, device=on, dtype=torch.bfloat16)
    q, k, v = packed[:, :key_heads], packed[:, key_heads : 2 * key_heads], packed[:, 2 * key_heads :]
    a, b = torch.randn(2, tokens, heads, device=on, dtype=torch.bfloat16)
    gates = RawGates(a=a, b=b, A_log=torch.rand(heads, device=on), dt_bias=torch.randn(heads, device=on))
    ends = torch.arange(sequences + 1, device=on, dtype=torch.int32) * length
    states = torch.randn(sequences, heads, WIDTH, WIDTH, device=on) * 0.1
    slots = torch.arange(sequences, device=on, dtype=torch.int32)
    return ExtendCall(q=q, k=k, v=v, gates=gates, states=states, slots=slots, cu_seqlens=ends)


def launch_of(call: ExtendCall, config: ExtendConfig) -> ExtendLaunch:
    return ExtendLaunch(call, config, torch.bfloat16, (call.v.shape[1] * WIDTH, WIDTH))


def scratch_for(call: ExtendCall) -> ExtendScratch:
    tokens, heads = call.v.shape[:2]
    room = torch.empty(scratch_bytes(heads, tokens, torch.bfloat16), dtype=torch.uint8, device=call.v.device)
    return cut(room, heads, tokens, torch.bfloat16)


def time_thunk(thunk: Callable[[], object]) -> float:
    return time_graph([thunk], torch.device("cuda"), replays=4).median_us


def sweep(
    title: str,
    configs: list[ExtendConfig],
    launch: Callable[[ExtendLaunch, ExtendCall, ExtendScratch], object],
    calls: list[ExtendCall],
    console: Console,
) -> list[dict[str, object]]:
    """Time one kernel with every tile on every shape."""
    import triton

    table = Table("tile", *(f"{s}x{n} us" for s, n in SHAPES), title=title)
    results: list[dict[str, object]] = []
    scratch = [scratch_for(call) for call in calls]
    for call, room in zip(calls, scratch, strict=True):
        launch_of(call, configs[0]).chunks(call, room)
    for config in configs:
        try:
            times = [
                time_thunk(partial(launch, launch_of(call, config), call, room))
                for call, room in zip(calls, scratch, strict=True)
            ]
        except triton.runtime.errors.OutOfResources as exc:
            table.add_row(str(config), str(exc))
            continue
        results.append({"kernel": title, "tile": asdict(config), "us": times})
        table.add_row(" ".join(f"{k}={v}" for k, v in asdict(config).items()), *(f"{t:.1f}" for t in times))
    console.print(table)
    return results


def whole(calls: list[ExtendCall], console: Console) -> list[dict[str, object]]:
    """The adapter as it is: kernels under replay, and eager calls from the host."""
    table = Table("shape", "replay us", "eager us", title="adapter")
    adapter = TritonGatedDeltaRule()
    results: list[dict[str, object]] = []
    for (sequences, length), call in zip(SHAPES, calls, strict=True):
        adapter.extend(call)
        replay = time_thunk(partial(adapter.extend, call))
        eager = time_events([partial(adapter.extend, call)], torch.device("cuda"), repeats=10).median_us
        table.add_row(f"{sequences}x{length}", f"{replay:.1f}", f"{eager:.1f}")
        results.append({"kernel": "adapter", "shape": [sequences, length], "replay_us": replay, "eager_us": eager})
    adapter.close()
    console.print(table)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for prefill_tiles.json")
    parser.add_argument("--heads", type=int, default=32, help="value heads")
    parser.add_argument("--key-heads", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    console = Console(width=160)
    calls = [make_call(*shape, options.heads, options.key_heads) for shape in SHAPES]
    outs = {id(call): torch.empty_like(call.v) for call in calls}
    results = whole(calls, console)
    scans = [ExtendConfig(block_v=b, scan_warps=w, scan_stages=s) for b, w, s in SCANS]
    results += sweep("scan", scans, lambda by, c, r: by.scan(c, outs[id(c)], None, r), calls, console)
    chunks = [
        ExtendConfig(block_v=32, scan_warps=4, scan_stages=3, chunk_warps=w, chunk_registers=r) for w, r in CHUNKS
    ]
    results += sweep("chunk", chunks, ExtendLaunch.chunks, calls, console)
    options.out.mkdir(parents=True, exist_ok=True)
    payload = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(["python", *sys.argv]),
        "versions": versions(), "device": torch.cuda.get_device_name(), "shapes": SHAPES, "results": results,
    }  # fmt: skip
    (options.out / "prefill_tiles.json").write_text(json.dumps(payload, indent=1))


if __name__ == "__main__":
    main()
