"""The end of the MoE layer in every way that the benchmark compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
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


def ipc_launch(signature: WorkspaceSignature) -> tuple[Any, Callable[..., None]]:
    """FlashInfer's names, and its IPC launch over a workspace of its own."""
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

    return names, run


def fused_ipc(signature: WorkspaceSignature) -> Callable[[Problem], Call]:
    """(iii) FlashInfer's fused IPC finalize."""
    names, run = ipc_launch(signature)

    def method(p: Problem) -> Call:
        routed, weights, indices, shared = handoff_tensors(p.handoff)
        return lambda: run(
            p, routed, names.finalize, expanded_idx_to_permuted_idx=indices, expert_scale_factor=weights,
            shared_expert_output=shared,
        )  # fmt: skip

    return method


def separate_ipc(signature: WorkspaceSignature) -> Callable[[Problem], Call]:
    """(iv) FlashInfer's IPC all-reduce and norm after a separate finalize."""
    names, run = ipc_launch(signature)

    def method(p: Problem) -> Call:
        x = torch.empty_like(p.residual)

        def call() -> None:
            p.finalize_into(x)
            run(p, x, names.all_reduce)

        return call

    return method


def void(_: object) -> None:
    """For a call whose result is a buffer that we know."""


def methods_of(signature: WorkspaceSignature, peers: list[str], sweep: bool) -> dict[str, Callable[[Problem], Call]]:
    """Every method to measure; each makes the call of a problem."""
    found = {"ours": ours(signature)}
    if sweep:
        base = Tuning()
        variants = {
            f"{pieces} pieces of {least} or more": replace(base, pieces=pieces, min_piece=least)
            for pieces, least in ((1, 512), (2, 512), (4, 256), (4, 1024), (8, 512))
        } | {
            "16 words": replace(base, words_a_thread=16), "wave 1": replace(base, wave=1),
            "two-step": replace(base, one_shot_rows={1: 0}),
            "bf16 wire": replace(base, wire="bfloat16"),
        }  # fmt: skip
        found |= {f"ours, {name}": ours(signature, tuning) for name, tuning in variants.items()}
    if "nccl" in peers:
        found["i finalize + nccl + norm"] = through_nccl(signature)
    if "torch" in peers:
        found["ii finalize + torch one-shot + norm"] = through_torch(signature)
    if "ipc" in peers:
        found["iv finalize + flashinfer ipc all-reduce"] = separate_ipc(signature)
    return found
