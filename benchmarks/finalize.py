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
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton
import triton.language as tl
from torch import Tensor

from qwen35.adapters.triton.finalize_fusion import TritonFinalizeFusion, TritonWorkspace
from qwen35.adapters.triton.finalize_launch import Cut, Tuning
from qwen35.adapters.triton.finalize_mailboxes import sizes, symmetric_mailboxes
from qwen35.adapters.triton.kernels.finalize_common import BUFFERS
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import handoff_tensors
from qwen35.ports.finalize_fusion import FinalizeHandoff, NormAndResidual
from qwen35.services.finalize_facts import device_facts
from qwen35.testing.finalize_cases import FinalizeCase
from qwen35.testing.machine import versions

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
PEERS = ("nccl", "torch", "ipc")
EPS = 1e-6

Call = Callable[[], None]


@triton.jit
def finalize_rows(
    routed, weights, indices, shared, out, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The plain finalize kernel of the unfused paths: a program for 1,024 columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    total = tl.load(shared + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        index = tl.load(indices + row * TOP_K + j)
        weight = tl.load(weights + row * TOP_K + j).to(tl.float32)
        term = tl.load(routed + index.to(tl.int64) * D + columns, mask=inside & (index >= 0), other=0.0)
        total += tl.where(index >= 0, weight, 0.0) * term.to(tl.float32)
    tl.store(out + row * D + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def residual_norm_rows(x, residual, gamma, norm_out, residual_out, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """Residual add and RMSNorm of the unfused paths, a program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    total = tl.load(x + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / D + eps)
    factor = tl.load(gamma + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_out + row * D + columns, total.to(residual_out.dtype.element_ty), mask=inside)
    tl.store(norm_out + row * D + columns, (total * scale * factor).to(norm_out.dtype.element_ty), mask=inside)


@dataclass
class Problem:
    """One shape and m on one rank."""

    handoff: FinalizeHandoff
    residual: Tensor
    gamma: Tensor
    out: NormAndResidual
    hidden: int
    top_k: int
    m: int

    def finalize_into(self, out: Tensor) -> None:
        routed, weights, indices, shared = handoff_tensors(self.handoff)
        block = min(1024, triton.next_power_of_2(self.hidden))
        finalize_rows[self.m, triton.cdiv(self.hidden, block)](
            routed, weights, indices, shared, out, self.hidden, self.top_k, block, num_warps=4
        )

    def norm_of(self, x: Tensor) -> None:
        block = triton.next_power_of_2(self.hidden)
        residual_norm_rows[(self.m,)](
            x, self.residual, self.gamma, self.out.norm, self.out.residual, EPS, self.hidden, block, num_warps=8
        )


def problem_of(case: FinalizeCase, rank: int) -> Problem:
    residual = case.residual()
    out = NormAndResidual(norm=torch.empty_like(residual), residual=torch.empty_like(residual))
    return Problem(case.handoff(rank), residual, case.gamma(), out, case.hidden, case.top_k, case.m)


def ours(signature: WorkspaceSignature, tuning: Tuning | None = None) -> Callable[[Problem], Call]:
    """The Triton adapter through its port; with a ``tuning``, a workspace that compiles what it meets."""
    facts = device_facts(signature.device)
    if tuning is None:
        workspace = TritonFinalizeFusion(facts).prepare(signature)
    else:
        mail = symmetric_mailboxes(signature, sizes(signature, tuning.wire, BUFFERS))
        workspace = TritonWorkspace(Cut(signature, facts.multiprocessors, tuning), mail, 0)
    return lambda p: lambda: void(workspace.finalize(p.handoff, p.residual, p.gamma, p.out))


def through_nccl(signature: WorkspaceSignature) -> Callable[[Problem], Call]:
    """(i) finalize, NCCL, residual and norm."""

    def method(p: Problem) -> Call:
        x = torch.empty_like(p.residual)

        def call() -> None:
            p.finalize_into(x)
            dist.all_reduce(x, group=signature.group)
            p.norm_of(x)

        return call

    return method


def through_torch(signature: WorkspaceSignature) -> Callable[[Problem], Call]:
    """(ii) finalize, torch's one-shot symmetric-memory all-reduce, residual and norm."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    whole = symmetric_memory.empty(signature.max_m * signature.hidden, dtype=torch.bfloat16, device=signature.device)
    name = signature.group.group_name
    symmetric_memory.rendezvous(whole, name)

    def method(p: Problem) -> Call:
        x = whole[: p.m * p.hidden].view(p.m, p.hidden)

        def call() -> None:
            p.finalize_into(x)
            p.norm_of(torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name))

        return call

    return method


def through_ipc(signature: WorkspaceSignature) -> dict[str, Callable[[Problem], Call]]:
    """(iii) FlashInfer's fused IPC finalize, (iv) its IPC all-reduce and norm after a separate finalize."""
    from qwen35.adapters.flashinfer.finalize_names import ipc_names

    names = ipc_names()
    native = names.make(
        tp_size=signature.tp_size, tp_rank=signature.rank, max_token_num=signature.max_m,
        hidden_dim=signature.hidden, dtype=torch.bfloat16, group=signature.group,
    )  # fmt: skip

    def run(p: Problem, source: Tensor, pattern: Any, **operands: Any) -> None:
        names.launch(
            input=source, workspace=native, pattern=pattern, residual_in=p.residual, residual_out=p.out.residual,
            norm_out=p.out.norm, rms_gamma=p.gamma, rms_eps=EPS, **operands,
        )  # fmt: skip

    def fused(p: Problem) -> Call:
        routed, weights, indices, shared = handoff_tensors(p.handoff)
        return lambda: run(
            p, routed, names.finalize, expanded_idx_to_permuted_idx=indices, expert_scale_factor=weights,
            shared_expert_output=shared,
        )  # fmt: skip

    def separate(p: Problem) -> Call:
        x = torch.empty_like(p.residual)

        def call() -> None:
            p.finalize_into(x)
            run(p, x, names.all_reduce)

        return call

    return {"iii flashinfer ipc finalize": fused, "iv finalize + flashinfer ipc all-reduce": separate}


def void(_: object) -> None:
    """For a call whose result is a buffer that we know."""


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


def methods_of(signature: WorkspaceSignature, peers: list[str], sweep: bool) -> dict[str, Callable[[Problem], Call]]:
    """Every method to measure; each makes the call of a problem."""
    found = {"ours": ours(signature)}
    if sweep:
        base = Tuning()
        never = {1: 0}
        variants = {
            "2 pieces": replace(base, pieces=2), "4 pieces": replace(base, pieces=4),
            "wave 1": replace(base, wave=1), "wave 1, 2 pieces": replace(base, wave=1, pieces=2),
            "crowding 2": replace(base, crowding=2), "crowding 2, 2 pieces": replace(base, crowding=2, pieces=2),
            "16 words": replace(base, words_a_thread=16), "16 words, wave 1": replace(base, words_a_thread=16, wave=1),
            "16 words, crowding 2": replace(base, words_a_thread=16, crowding=2),
            "two-step": replace(base, one_shot_rows=never), "bf16 wire": replace(base, wire="bfloat16"),
        }  # fmt: skip
        found |= {f"ours, {name}": ours(signature, tuning) for name, tuning in variants.items()}
    if "nccl" in peers:
        found["i finalize + nccl + norm"] = through_nccl(signature)
    if "torch" in peers:
        found["ii finalize + torch one-shot + norm"] = through_torch(signature)
    if "ipc" in peers:
        found |= through_ipc(signature)
    return found


def work(rank: int, port: int, options: argparse.Namespace) -> None:
    """One rank: measure everything; rank 0 writes."""
    os.environ.update(MULTICAST_OFF | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    dist.init_process_group("nccl", rank=rank, world_size=options.ranks, device_id=torch.device(device))
    started, rows, profiles = time.monotonic(), [], {}
    for hidden, top_k in options.shapes:
        signature = WorkspaceSignature(
            group=dist.group.WORLD, tp_size=options.ranks, rank=rank, hidden=hidden, top_k=top_k,
            max_m=max(options.m), device=device,
        )  # fmt: skip
        methods = methods_of(signature, options.peers, options.sweep)
        if options.build:
            break
        say(rank, f"{hidden}:{top_k} ready after {time.monotonic() - started:.0f} s")
        for m in options.m:
            case = FinalizeCase(
                seed=m, m=m, top_k=top_k, hidden=hidden, tp_size=options.ranks, dropped=0.0, zeroed=0.0,
                device=device,
            )  # fmt: skip
            problem, oracle = problem_of(case, rank), case.finalize_oracle(EPS, 0.0)
            best: dict[str, float] = {}
            for name, method in methods.items():
                call = method(problem)
                call()
                torch.cuda.synchronize()
                error = error_of(problem, oracle)
                took = torch.tensor(replayed(call, options.calls, options.replays), device=device)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                best[name] = round(float(took), 2)
                rows.append({
                    "hidden": hidden, "top_k": top_k, "m": m, "method": name, "us": best[name],
                    "relative_error": float(f"{error:.2e}"),
                })  # fmt: skip
                if name == "ours" and m == min(options.m):
                    profiles[f"{hidden}:{top_k} m={m}"] = kernel_names(call)
            peer = min((us for name, us in best.items() if not name.startswith("ours")), default=None)
            ratio = "" if peer is None else f"  ours / best peer = {best['ours'] / peer:.2f}"
            say(rank, f"{hidden}:{top_k} m={m:5d}  " + "  ".join(f"{n} {us}" for n, us in best.items()) + ratio)
        del methods
    if rank == 0 and not options.build:
        document = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"), "command": options.command,
            "versions": versions(), "device": torch.cuda.get_device_name(), "ranks": options.ranks,
            "calls_a_graph": options.calls, "replays": options.replays,
            "multicast": "off", "seconds": round(time.monotonic() - started, 1), "rows": rows,
            "kernels_of_one_call": profiles,
        }  # fmt: skip
        options.out.write_text(json.dumps(document, indent=1) + "\n")
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
