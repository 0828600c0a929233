"""The end of the MoE layer on two or more GPUs of one host: ours against what else there is, in one run.

    python benchmarks/finalize.py --out finalize.json [--peers nccl,torch,ipc] [--sweep] [--shapes 2048:8,4096:10]

Spawns one process a GPU (``--ranks``), captures ``--calls`` calls of each method in a CUDA graph, replays it, and
reports microseconds a call (the median replay of the slowest rank), and each method's error against float64.
NVLink multicast stays off. Peers: ``nccl`` a finalize kernel, NCCL, residual and norm; ``torch`` the same with
torch's one-shot symmetric-memory all-reduce; ``ipc`` FlashInfer's IPC patterns, fused and after a separate
finalize (its communication module is compiled at first use, for minutes; ``--build`` does only that).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from finalize_methods import EPS, Call, Problem, fused_ipc, methods_of, problem_of
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.testing.finalize_cases import FinalizeCase
from qwen35.testing.machine import versions

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
PEERS = ("nccl", "torch", "ipc")
#: FlashInfer's fused finalize hangs in calls back to back of more rows (F25 in docs/upstream.md).
FUSED_IPC_ROWS = 64


def replayed(call: Call, calls: int, replays: int) -> float:
    """Microseconds a call on this rank: the median of ``replays`` replays of a graph of ``calls`` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    dist.barrier()
    for _ in range(3):
        graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    torch.cuda.synchronize()
    dist.barrier()
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) * 1000 / calls


def kernel_names(call: Call) -> list[str]:
    """Kernels that one call launches, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    call()
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    kinds = (event for event in profiler.events() if str(event.device_type).endswith("CUDA"))
    return [event.name for event in kinds]


def error_of(p: Problem, oracle: tuple[Tensor, Tensor]) -> float:
    """The larger relative error of norm and residual."""
    pairs = zip((p.out.norm, p.out.residual), oracle, strict=True)
    return max(float((got.double() - want).norm() / want.norm()) for got, want in pairs)


class Run:
    """One rank's part of a run; rank 0 writes what there is after every m, so that a hang loses little."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.options, self.device = rank, options, f"cuda:{rank}"
        self.started = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.profiles: dict[str, list[str]] = {}

    def signature(self, hidden: int, top_k: int) -> WorkspaceSignature:
        return WorkspaceSignature(
            group=dist.group.WORLD, tp_size=self.options.ranks, rank=self.rank, hidden=hidden, top_k=top_k,
            max_m=max(self.options.m), device=self.device,
        )  # fmt: skip

    def shape(
        self, signature: WorkspaceSignature, methods: dict[str, Callable[[Problem], Call]], most: int | None = None
    ) -> None:
        """Every m of one shape, up to ``most``, by every method."""
        at = f"{signature.hidden}:{signature.top_k}"
        say(self.rank, f"{at} ready after {time.monotonic() - self.started:.0f} s")
        for m in (m for m in self.options.m if most is None or m <= most):
            case = FinalizeCase(
                seed=m, m=m, top_k=signature.top_k, hidden=signature.hidden, tp_size=signature.tp_size, dropped=0.0,
                zeroed=0.0, device=self.device,
            )  # fmt: skip
            problem, oracle = problem_of(case, self.rank), case.finalize_oracle(EPS, 0.0)
            found = {name: self.measure(problem, oracle, name, method) for name, method in methods.items()}
            if "ours" in found and m == min(self.options.m):
                self.profiles[f"{at} m={m}"] = kernel_names(methods["ours"](problem))
            say(self.rank, f"{at} m={m:5d}  " + "  ".join(f"{n} {us}" for n, us in found.items()) + ratio(found))
            self.write()

    def measure(
        self, problem: Problem, oracle: tuple[Tensor, Tensor], name: str, method: Callable[[Problem], Call]
    ) -> float:
        """Microseconds of the slowest rank."""
        call = method(problem)
        call()
        torch.cuda.synchronize()
        error = error_of(problem, oracle)
        took = torch.tensor(replayed(call, self.options.calls, self.options.replays), device=self.device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        us = round(float(took), 2)
        self.rows.append({
            "hidden": problem.hidden, "top_k": problem.top_k, "m": problem.m, "method": name, "us": us,
            "relative_error": float(f"{error:.2e}"),
        })  # fmt: skip
        return us

    def write(self) -> None:
        if self.rank:
            return
        document = {
            "kind": "finalize", "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": self.options.command, "versions": versions(), "device": torch.cuda.get_device_name(),
            "ranks": self.options.ranks, "calls_a_graph": self.options.calls, "replays": self.options.replays,
            "multicast": "off", "seconds": round(time.monotonic() - self.started, 1), "rows": self.rows,
            "kernels_of_one_call": self.profiles,
        }  # fmt: skip
        self.options.out.write_text(json.dumps(document, indent=1) + "\n")


def ratio(found: dict[str, float]) -> str:
    """Ours against the best peer, where both were measured."""
    peer = min((us for name, us in found.items() if not name.startswith("ours")), default=None)
    return "" if peer is None or "ours" not in found else f"  ours / best peer = {found['ours'] / peer:.2f}"


def work(rank: int, port: int, options: argparse.Namespace) -> None:
    """One rank: measure everything. FlashInfer's fused IPC finalize comes last: it has hung in mixed use."""
    os.environ.update(MULTICAST_OFF | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=options.ranks, device_id=torch.device("cuda", rank))
    run = Run(rank, options)
    signatures = [run.signature(hidden, top_k) for hidden, top_k in options.shapes]
    for signature in signatures:
        methods = methods_of(signature, options.peers, options.sweep)
        if not options.build:
            run.shape(signature, methods)
    if "ipc" in options.peers and not options.build:
        for signature in signatures:
            run.shape(signature, {"iii flashinfer ipc finalize": fused_ipc(signature)}, FUSED_IPC_ROWS)
    dist.barrier()
    dist.destroy_process_group()


def say(rank: int, text: str) -> None:
    if rank == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def shape(text: str) -> tuple[int, int]:
    hidden, _, top_k = text.partition(":")
    return int(hidden), int(top_k)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("finalize.json"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", default="2048:8,4096:10")
    parser.add_argument("--m", default="1,8,32,64,256,1024")
    parser.add_argument("--peers", default="nccl,torch")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--sweep", action="store_true", help="also measure other tunings of ours")
    parser.add_argument("--build", action="store_true", help="make every method's workspace, measure nothing")
    options = parser.parse_args()
    options.command = shlex.join(["python", *sys.argv])
    options.shapes = [shape(text) for text in options.shapes.split(",")]
    options.m = [int(text) for text in options.m.split(",")]
    options.peers = [name for name in options.peers.split(",") if name]
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"--peers must be of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, args=(port, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
