"""What our Triton adapter says of a rank's device before anything is made, and what is chosen by that."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from finalize_fakes import FakeFusion, Meeting
from finalize_services import CPU

from qwen35.domain.capabilities import Support
from qwen35.domain.errors import ConfigurationError, UnsupportedError
from qwen35.domain.finalize_capabilities import DeviceFacts
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.ports.adapter import AdapterEntry
from qwen35.services.finalize_choice import FusionChoice, choose_fusion
from qwen35.services.registry import AdapterRegistry

pytest.importorskip("triton")

GROUP = object()
FACTS = [
    DeviceFacts(
        device=f"cuda:{rank}", host="a", uuid=f"u{rank}", compute_capability=(9, 0), multiprocessors=132,
        no_multicast=("multicast requires NVLink multicast",),
    )
    for rank in range(2)
]  # fmt: skip
NCCL = "symmetric memory requires torch.distributed with NCCL"
FOREIGN = "symmetric memory backend requires CUDA, got NVSHMEM"


def asked_by(rank: int, **changes: Any) -> WorkspaceSignature:
    values: dict[str, Any] = {"hidden": 2048, "top_k": 8, "max_m": 512, "device": f"cuda:{rank}"} | changes
    return WorkspaceSignature(**({"group": GROUP, "tp_size": 2, "rank": rank} | values))


def fusion(facts: DeviceFacts, backend: str | None = "CUDA") -> Any:
    from qwen35.adapters.triton.finalize_fusion import TritonFinalizeFusion

    return TritonFinalizeFusion(facts, backend_of=lambda _: backend)


@pytest.mark.row("A25")
@pytest.mark.parametrize(
    ("facts", "backend", "changes", "reasons"),
    [
        ({}, "CUDA", {}, ()),
        ({}, None, {}, ()),
        ({}, "NVSHMEM", {}, (FOREIGN,)),
        ({"no_symmetric_memory": (NCCL,)}, "CUDA", {}, (NCCL,)),
        ({"no_symmetric_memory": (NCCL,)}, "NVSHMEM", {}, (NCCL,)),
        ({"no_symmetric_memory": (NCCL,)}, "NVSHMEM", {"tp_size": 1}, ()),
        ({}, "CUDA", {"hidden": 2052}, ("hidden requires a multiple of 8, got 2052",)),
        ({}, "CUDA", {"device": "cpu"}, ("device requires cuda, got cpu",)),
        ({}, "CUDA", {"tp_size": 3}, ()),
    ],
)
def test_every_reason_is_known_before_anything_is_made(
    facts: dict[str, Any], backend: str | None, changes: dict[str, Any], reasons: tuple[str, ...]
) -> None:
    adapter, asked = fusion(replace(FACTS[0], **facts), backend), asked_by(0, **changes)
    assert adapter.supports(asked).reasons == reasons
    if reasons:
        with pytest.raises(UnsupportedError) as refused:
            adapter.prepare(asked)
        assert refused.value.reasons == reasons


def test_a_cpu_is_asked_for_no_backend() -> None:
    from qwen35.adapters.triton.finalize_fusion import TritonFinalizeFusion

    def asks(device: str) -> str:
        raise AssertionError(f"{device} was asked for its symmetric memory")

    assert TritonFinalizeFusion(FACTS[0], backend_of=asks).supports(asked_by(0, device="cpu")).reasons


def chosen_by_two(facts: Sequence[DeviceFacts], backends: Sequence[str | None]) -> list[Any]:
    """What "auto" takes among our adapter, as it is, and one that needs nothing."""
    meeting = Meeting(2)

    def choose(rank: int) -> FusionChoice:
        own = AdapterEntry(
            port="finalize_fusion", name="triton", rank=30, summary="", probe=lambda _: Support.of(),
            create=lambda *_: fusion(facts[rank], backends[rank]),
        )  # fmt: skip
        multicast, ipc = (FakeFusion(name, ("not here",)) for name in ("flashinfer_multicast", "flashinfer_ipc"))
        others = [multicast.entry(rank=40), ipc.entry(rank=20), FakeFusion("plain").entry(rank=10)]
        return choose_fusion(
            AdapterRegistry(CPU, extra=[own, *others]), "auto", asked_by(rank), facts[rank], meeting.side(rank)
        )

    return meeting.run(choose)


@pytest.mark.row("A25")
def test_two_like_gpus_of_one_host_take_ours_without_multicast() -> None:
    out = chosen_by_two(FACTS, ["CUDA", None])
    assert {choice.name for choice in out} == {"triton"}, out


@pytest.mark.row("A25")
@pytest.mark.parametrize(
    ("other", "backend", "why"),
    [
        ({"host": "b"}, "CUDA", "peers require one host, got rank 0 on a and rank 1 on b"),
        ({"closed_peers": ("u0",)}, "CUDA", "peers require memory access, which rank 1 has not to rank 0"),
        ({"uuid": "u0"}, "CUDA", "peers require a device each, got rank 0 and rank 1 on u0"),
        ({"no_symmetric_memory": (NCCL,)}, "CUDA", f"rank 1: {NCCL}"),
        ({}, "NVSHMEM", f"rank 1: {FOREIGN}"),
    ],
)
def test_what_is_amiss_on_one_rank_lets_all_take_the_next(other: dict[str, Any], backend: str, why: str) -> None:
    out = chosen_by_two([FACTS[0], replace(FACTS[1], **other)], ["CUDA", backend])
    assert {choice.name for choice in out} == {"plain"}, out
    assert all(choice.rejected["triton"] == (why,) for choice in out), out


def test_ranks_that_would_cut_a_launch_differently_take_the_next() -> None:
    """Which program owns a row follows from the number of multiprocessors: of two answers one waits for good."""
    from qwen35.adapters.triton.finalize_launch import Cut, Tuning

    cuts = [Cut(asked_by(0, tp_size=3), count, Tuning()) for count in (132, 114)]
    assert len({cut.wave for cut in cuts}) == 2, "the case would show nothing"
    out = chosen_by_two([FACTS[0], replace(FACTS[1], multiprocessors=114)], ["CUDA", "CUDA"])
    assert {choice.name for choice in out} == {"plain"}, out
    assert all("peers require like devices" in " ".join(choice.rejected["triton"]) for choice in out), out


@pytest.mark.parametrize("name", ["pieces", "min_piece"])
def test_pieces_that_no_triton_block_can_have_are_refused_where_they_are_chosen(name: str) -> None:
    """A kernel would refuse them too, while it is compiled, in words of its own."""
    from qwen35.adapters.triton.finalize_launch import Cut, Tuning

    for count in (0, -4, 3, 6, 513):
        with pytest.raises(ConfigurationError, match=f"^{name} must be a power of two, got {count}$"):
            Tuning(**{name: count})
        with pytest.raises(ConfigurationError):
            replace(Tuning(), **{name: count})
    for count in (1, 2, 512):
        cut = Cut(asked_by(0), 132, Tuning(**{name: count}))
        found = {cut.pieces(columns) for columns in (8, 256, 512, 2048, 8192)}
        assert found <= {2**i for i in range(10)}, found


def test_torch_itself_is_asked_for_the_backend_that_the_process_has() -> None:
    """In a process of its own, since the choice is the process's and cannot be taken back."""
    script = (
        "from torch.distributed import _symmetric_memory as memory; from test_triton_choice import FACTS, asked_by; "
        "from qwen35.adapters.triton.finalize_fusion import TritonFinalizeFusion; "
        "ours = TritonFinalizeFusion(FACTS[0]); print(ours.supports(asked_by(0)).reasons); "
        "memory.set_backend('NVSHMEM'); print(ours.supports(asked_by(0)).reasons)"
    )
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["()", str((FOREIGN,))]
