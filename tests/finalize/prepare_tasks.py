"""What the rank processes execute to make a workspace of ours, whether or not something is amiss on one of them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from finalize_pool import Ranked
from finalize_tasks import signature_for
from torch import Tensor

from qwen35.domain.errors import AgreementError, CreationError
from qwen35.domain.finalize import FinalizeHandoff
from qwen35.domain.finalize_capabilities import FusionCapabilities
from qwen35.ports.finalize_checks import handoff_tensors
from qwen35.services.finalize_agreement import Agreements, GroupAgreement
from qwen35.services.finalize_facts import device_facts
from qwen35.testing.finalize_laws import FinalizeKit, digest

#: Of a pretended device so small that a few rows are looped over.
MULTIPROCESSORS = 2


class OwnMemory:
    """Memory of one rank that says it is everybody's. ``fails`` names the step that raises; ``met`` counts meetings."""

    def __init__(self, fails: str | None = None) -> None:
        self.fails, self.met = fails, 0

    def allocate(self, size: int, device: str) -> Tensor:
        if self.fails == "allocate":
            raise torch.OutOfMemoryError("no room for mailboxes")
        return torch.empty(size, dtype=torch.uint8, device=device)

    def meet(self, own: Tensor, group: Any) -> tuple[Sequence[Tensor], Any]:
        """Waits for the group, as a rendezvous does."""
        self.met += 1
        dist.barrier(group=group)
        if self.fails == "meet":
            raise OSError("peer access is closed")
        return [own] * dist.get_world_size(group), own


class MappedMemory:
    """Memory of every rank in a file that all of them map. ``deaf``: whom this rank writes to in vain."""

    def __init__(self, directory: Path, rank: int, deaf: int | None = None) -> None:
        self._directory, self._rank, self._deaf = directory, rank, deaf

    def _map(self, rank: int, size: int) -> Tensor:
        return torch.from_file(str(self._directory / f"{rank}"), shared=True, size=size, dtype=torch.uint8)

    def allocate(self, size: int, device: str) -> Tensor:
        assert device == "cpu"
        return self._map(self._rank, size)

    def meet(self, own: Tensor, group: Any) -> tuple[Sequence[Tensor], Any]:
        dist.barrier(group=group)
        ranks = range(dist.get_world_size(group))
        every = [own if rank == self._rank else self._map(rank, own.numel()) for rank in ranks]
        return [torch.clone(m) if rank == self._deaf else m for rank, m in enumerate(every)], every


class DeafTo:
    """Torch's symmetric memory, but for one rank whose memory this one reaches no more."""

    def __init__(self, rank: int | None) -> None:
        from qwen35.adapters.triton.finalize_mailboxes import SymmetricMemory

        self._rank, self._whole = rank, SymmetricMemory()

    def allocate(self, size: int, device: str) -> Tensor:
        return self._whole.allocate(size, device)

    def meet(self, own: Tensor, group: Any) -> tuple[Sequence[Tensor], Any]:
        every, owner = self._whole.meet(own, group)
        return [torch.clone(m) if rank == self._rank else m for rank, m in enumerate(every)], (every, owner)


def cut_for(ranked: Ranked, **changes: Any) -> Any:
    """One-shot launches up to two rows, two-step ones above."""
    from qwen35.adapters.triton.finalize_launch import Cut, Tuning

    facts = device_facts(ranked.device)
    tuning = Tuning(max_splits=1, min_slice=8, one_shot_rows={1: 2})
    return Cut(signature_for(ranked, **changes), facts.multiprocessors or MULTIPROCESSORS, tuning)


def mailboxes_where(ranked: Ranked, fails: str, on: int) -> tuple[str, int]:
    """What making mailboxes says where rank ``on`` fails in ``fails``, and how often this rank met the others."""
    from qwen35.adapters.triton.finalize_mailboxes import sizes, symmetric_mailboxes

    here = fails if ranked.rank == on else None
    memory = OwnMemory(here)

    def compile_alone(_: object) -> None:
        if here == "compile":
            raise KeyError("sm_90")

    asked = signature_for(ranked, hidden=32)
    try:
        symmetric_mailboxes(
            asked, sizes(asked, "float32", 4), agreement=GroupAgreement(ranked.group), memory=memory,
            alone=compile_alone,
        )  # fmt: skip
    except CreationError as exc:
        return str(exc), memory.met
    return "made", memory.met


def made_and_called(ranked: Ranked, directory: Path, spin_limit: int, seed: int) -> list[str]:
    """Digests of calls of every kind on a workspace whose ranks share files; each is near the oracle."""
    from qwen35.adapters.triton.finalize_fusion import make_workspace

    cut = cut_for(ranked, hidden=32, top_k=2, max_m=5, dtype="float32")
    agreement = GroupAgreement(ranked.group)
    memory = MappedMemory(directory, ranked.rank)
    workspace = make_workspace(cut, agreement, spin_limit, memory=memory, roll_call_limit=10**6)
    kit = FinalizeKit(workspace, FusionCapabilities(), agreement)
    digests, s = [], cut.signature
    for m in (1, 5, 2, 1):
        case = kit.case(seed + m, m)
        got = kit.finalize(case)
        kit.assert_near(got, case.finalize_oracle(s.eps, s.weight_bias), case)
        digests.append(digest(got))
        got = kit.workspace.all_reduce(case.local(kit.rank), case.residual(), case.gamma())
        kit.assert_near(got, case.all_reduce_oracle(s.eps, s.weight_bias), case)
        digests.append(digest(got))
    return digests


def roll_call_unheard(ranked: Ranked, directory: Path | None, reads: int) -> str:
    """What making a workspace says where rank 1 reaches rank 0 no more; without a ``directory`` on a GPU."""
    from qwen35.adapters.triton.finalize_fusion import make_workspace

    deaf = 0 if ranked.rank == 1 else None
    memory = DeafTo(deaf) if directory is None else MappedMemory(directory, ranked.rank, deaf)
    cut = cut_for(ranked, hidden=32, top_k=2, max_m=2)
    try:
        make_workspace(cut, GroupAgreement(ranked.group), 0, memory=memory, roll_call_limit=reads)
    except CreationError as exc:
        return str(exc)
    return "made"


def asks_for(ranked: Ranked, settings: Sequence[str], multiplexed: Sequence[bool]) -> tuple[str, str]:
    """What ``prepare`` of a service says on this rank, by type and text, where each rank has settings of its own."""
    from finalize_fakes import FakeFusion
    from finalize_services import service

    agreements = Agreements(GroupAgreement)
    each = service(FakeFusion(), requested=settings[ranked.rank], agreements=agreements)
    try:
        each.prepare(signature_for(ranked, dtype="float32"), multiplexed_streams=multiplexed[ranked.rank])
    except (AgreementError, ValueError) as exc:
        return type(exc).__name__, str(exc)
    finally:
        prepared = each.is_prepared
        each.close()
    return "prepared" if prepared else "nothing", ""


class Full:
    """Torch's symmetric memory, which has no more on one rank: what is asked of the GPU there is more than any has."""

    def __init__(self, full: bool) -> None:
        from qwen35.adapters.triton.finalize_mailboxes import SymmetricMemory

        self._size, self._whole = 2**50 if full else 0, SymmetricMemory()

    def allocate(self, size: int, device: str) -> Tensor:
        if self._size:
            return torch.empty(self._size, dtype=torch.uint8, device=device)
        return self._whole.allocate(size, device)

    def meet(self, own: Tensor, group: Any) -> tuple[Sequence[Tensor], Any]:
        return self._whole.meet(own, group)


def prepare_without_memory(ranked: Ranked, on: int, changes: dict[str, Any]) -> str:
    """What ``prepare`` says where the memory of rank ``on`` is full; then it works again."""
    from qwen35.adapters.triton.finalize_fusion import make_workspace

    cut, agreement, said = cut_for(ranked, **changes), GroupAgreement(ranked.group), "made"
    try:
        make_workspace(cut, agreement, 0, memory=Full(ranked.rank == on)).destroy()
    except CreationError as exc:
        said = str(exc)
    make_workspace(cut, agreement, 0).destroy()
    return said


def compiled_by_calls(
    ranked: Ranked, name: str, seed: int, changes: dict[str, Any], checked: bool = False
) -> tuple[int, int]:
    """How many kernels of Triton's ``prepare`` compiles, and how many the calls after it, of every kind, eager and
    captured."""
    import triton
    from finalize_tasks import fusion_named

    fusion = fusion_named(name, ranked.device, **({"checked": True} if checked else {}))
    agreement, found = GroupAgreement(ranked.group), []

    def note(**given: Any) -> None:
        found.append(given["key"])

    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        kit = FinalizeKit(fusion.prepare(signature_for(ranked, **changes)), fusion.capabilities, agreement)
        before, most, draw = len(found), kit.workspace.signature.max_m, random.Random(seed)
        for m in sorted({1, 2, most, *(draw.randrange(1, most + 1) for _ in range(20))}):
            for dtype in ("bfloat16", "float32"):
                case = kit.case(seed, m, weight_dtype=dtype)
                kit.finalize(case)
                if m > 1:  # the end of a step: weights and indices start anywhere
                    kit.workspace.finalize(end_of(case.handoff(kit.rank)), case.residual()[1:], case.gamma())
            kit.workspace.all_reduce(case.local(kit.rank), case.residual(), case.gamma())
        handoff, residual, gamma, local = case.handoff(kit.rank), case.residual(), case.gamma(), case.local(kit.rank)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            kit.workspace.finalize(handoff, residual, gamma)
            kit.workspace.all_reduce(local, residual, gamma)
        after = len(found) - before
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
        agreement.exchange("done")
    kit.workspace.destroy()
    return before, after


def end_of(handoff: FinalizeHandoff) -> FinalizeHandoff:
    """All rows but the first."""
    routed, weights, indices, shared = handoff_tensors(handoff)
    return FinalizeHandoff(
        routed_output=routed, expert_weights=weights[1:], permuted_indices=indices[1:],
        gated_shared_output=None if shared is None else shared[1:], m=handoff.m - 1,
    )  # fmt: skip


def meets_on_a_twin(ranked: Any, missing: int, seconds: float) -> tuple[str, str, float]:
    """What comes of an agreement on a group without a CPU side, to which rank ``missing`` does not come; how long it
    took."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  a backend of that name

    group = dist.new_group(list(range(ranked.size)), backend="fake")
    since = time.monotonic()
    if ranked.rank == missing:
        return "stayed away", "", 0.0
    try:
        heard = GroupAgreement(group, timedelta(seconds=seconds)).exchange(ranked.rank)
    except AgreementError as exc:
        return type(exc).__name__, str(exc), time.monotonic() - since
    return "heard", str(heard), time.monotonic() - since
