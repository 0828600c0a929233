"""What the rank processes execute."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from finalize_pool import Ranked

from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.finalize_checks import handoff_tensors
from qwen35.ports.finalize_fusion import FinalizeFusion
from qwen35.services.finalize_agreement import GroupAgreement
from qwen35.services.finalize_facts import device_facts
from qwen35.testing.finalize_cases import FinalizeCase
from qwen35.testing.finalize_laws import CAPTURE_LAWS, LAST_LAW, LAWS, FinalizeKit, digest, poisoned


def fusion_named(name: str, device: str, **options: Any) -> FinalizeFusion:
    """An adapter of the port, made in this process."""
    if name == "reference":
        from qwen35.adapters.reference.finalize_fusion import ReferenceFinalizeFusion

        return ReferenceFinalizeFusion(torch.float32, device.partition(":")[0])
    if name == "flashinfer_ipc":
        from qwen35.adapters.flashinfer.finalize_ipc import FlashInferIpcFusion

        return FlashInferIpcFusion(device_facts(device))
    from qwen35.adapters.triton.finalize_fusion import TritonFinalizeFusion
    from qwen35.adapters.triton.finalize_launch import Tuning

    tuning = Tuning(one_shot_rows={1: 0}) if name == "triton two-step" else Tuning()
    return TritonFinalizeFusion(device_facts(device), tuning=tuning, **options)


def signature_for(ranked: Ranked, **changes: Any) -> WorkspaceSignature:
    values = {"hidden": 96, "top_k": 4, "max_m": 40} | changes
    return WorkspaceSignature(group=ranked.group, tp_size=ranked.size, rank=ranked.rank, device=ranked.device, **values)


def kit_for(ranked: Ranked, name: str, **changes: Any) -> FinalizeKit:
    """One workspace for each (adapter, signature) and process, kept from task to task."""
    key = f"{name} {sorted(changes.items())}"
    if key not in ranked.kept:
        fusion = fusion_named(name, ranked.device)
        weight_dtypes = ("bfloat16",) if name == "flashinfer_ipc" else ("bfloat16", "float32")
        ranked.kept[key] = FinalizeKit(
            fusion.prepare(signature_for(ranked, **changes)), fusion.capabilities, GroupAgreement(ranked.group),
            weight_dtypes,
        )  # fmt: skip
    return ranked.kept[key]  # type: ignore[no-any-return]


def check_law(ranked: Ranked, name: str, law: str, seed: int, changes: dict[str, Any]) -> None:
    (LAWS | CAPTURE_LAWS)[law](kit_for(ranked, name, **changes), seed)


def check_last_law(ranked: Ranked, name: str, seed: int, changes: dict[str, Any]) -> None:
    LAST_LAW(kit_for(ranked, name, **changes), seed)
    ranked.kept.clear()


def reduced_after_inference_mode(ranked: Ranked) -> list[float]:
    """Ones of every rank, summed outside inference mode by a workspace that was prepared inside it."""
    with torch.inference_mode():
        workspace = fusion_named("reference", ranked.device).prepare(signature_for(ranked))
    gamma, ones = (torch.ones(*rows, 96, dtype=torch.bfloat16, device=ranked.device) for rows in ((), (2,)))
    found = workspace.all_reduce(ones, torch.zeros_like(ones), gamma).residual[:, 0].tolist()
    workspace.destroy()
    return found  # type: ignore[no-any-return]


def check_case(ranked: Ranked, case: FinalizeCase, changes: dict[str, Any]) -> str:
    """One drawn case on the reference; the digest of its result."""
    kit = kit_for(ranked, "reference", **changes)
    s = kit.workspace.signature
    got = kit.finalize(case)
    kit.assert_near(got, case.finalize_oracle(s.eps, s.weight_bias), case)
    return digest(got)


def soak(ranked: Ranked, name: str, replays: int, seed: int, changes: dict[str, Any]) -> tuple[str, str]:
    """Replays of one graph whose calls feed on one another, with pauses of one rank or the other now and then.

    The graph turns the indices to other rows, finalizes few rows (shared by programs) and reduces many (looped
    over); each result becomes the next residual, so one wrong bit at any time changes all that follows. Returns
    the digest of the last results and of a running fold over all of them.
    """
    kit = kit_for(ranked, name, **changes)
    w, s = kit.workspace, kit.workspace.signature
    few, many = kit.case(seed, min(5, s.max_m), weight_dtype="bfloat16"), kit.case(seed + 1, s.max_m)
    routed, weights, indices, shared = handoff_tensors(few.handoff(kit.rank))
    routed.nan_to_num_(0.5)
    handoff = few.handoff(kit.rank)
    handoff = type(handoff)(
        routed_output=routed, expert_weights=weights, permuted_indices=indices, gated_shared_output=shared, m=few.m
    )
    local, gamma = many.local(kit.rank), many.gamma()
    first, second = few.residual(), many.residual()
    out, wide = poisoned(first), poisoned(second)
    before = first.clone()
    fold = torch.zeros(few.m, s.hidden, dtype=torch.int32, device=s.device)
    rows = routed.shape[0]

    def step() -> None:
        indices.copy_(torch.where(indices >= 0, (indices + 1) % rows, indices))
        before.copy_(first)
        w.finalize(handoff, first, gamma, out)
        w.all_reduce(local, second, gamma, wide)
        first.copy_(out.norm)
        second.copy_(wide.norm)
        fold.mul_(31).add_(out.norm.view(torch.int16)).add_(wide.norm[: few.m].view(torch.int16))

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    addresses = w.addresses
    pauses = random.Random(1000 * seed + ranked.rank)
    for i in range(replays):
        graph.replay()
        if pauses.random() < 0.001:
            torch.cuda._sleep(int(pauses.random() * 4e6))  # up to about 2 ms on this rank's stream alone
        if pauses.random() < 0.0001:
            torch.cuda.synchronize()
            time.sleep(pauses.random() * 0.05)
        if i % 10_000 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert w.addresses == addresses
    residual = before.double()
    assert bool(out.norm.isfinite().all()), f"seed {seed}: not finite after {replays} replays"
    scale = (out.residual.double().pow(2).mean(-1, keepdim=True) + s.eps) ** -0.5
    want = out.residual.double() * scale * (gamma.double() + s.weight_bias)
    bound = 3 * kit.capabilities.bound(s.dtype)
    assert (out.norm.double() - want).norm() <= bound * want.norm(), f"seed {seed}: the last norm is wrong"
    assert not torch.equal(residual, out.residual.double())
    return digest(out), str(fold.sum(dtype=torch.int64).item())


def arrive_late(ranked: Ranked, name: str, seconds: float, changes: dict[str, Any]) -> float:
    """Rank 1 comes ``seconds`` late; the others wait. Returns how long this rank's call took."""
    kit = kit_for(ranked, name, **changes)
    case = kit.case(77, 3)
    handoff, residual, gamma = case.handoff(kit.rank), case.residual(), case.gamma()
    kit.agreement.exchange("ready")
    if ranked.rank == 1:
        time.sleep(seconds)
    started = time.monotonic()
    got = kit.workspace.finalize(handoff, residual, gamma)
    if ranked.device != "cpu":
        torch.cuda.synchronize()
    took = time.monotonic() - started
    kit.assert_alike(got, case)
    return took


def never_arrive(ranked: Ranked, changes: dict[str, Any]) -> tuple[int, ...]:
    """In checked mode rank 1 makes no call at all: the ranks that rank 0 names."""
    from qwen35.domain.errors import RankTimeoutError

    fusion = fusion_named("triton", ranked.device, checked=True, timeout_s=1.0)
    workspace = fusion.prepare(signature_for(ranked, **changes))
    agreement = GroupAgreement(ranked.group)
    agreement.exchange("ready")
    named: tuple[int, ...] = ()
    if ranked.rank == 0:
        kit = FinalizeKit(workspace, fusion.capabilities, agreement)
        try:
            kit.finalize(kit.case(1, 2))
        except RankTimeoutError as exc:
            named = exc.ranks
        assert not workspace.supports(1)
    agreement.exchange("done")
    workspace.destroy()
    return named


def kernels_of_a_call(ranked: Ranked, name: str, changes: dict[str, Any]) -> list[str]:
    """Names of the kernels that one finalize launches, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    kit = kit_for(ranked, name, **changes)
    case = kit.case(5, 4)
    handoff, residual, gamma, out = case.handoff(kit.rank), case.residual(), case.gamma(), poisoned(case.residual())
    kit.workspace.finalize(handoff, residual, gamma, out)
    kit.agreement.exchange("ready")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        kit.workspace.finalize(handoff, residual, gamma, out)
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if str(e.device_type).endswith("CUDA")]
