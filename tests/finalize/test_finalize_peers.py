"""Whose devices can work on shared memory together, and what all ranks take where they cannot."""

from __future__ import annotations

from typing import Any

import pytest
from finalize_fakes import FakeFusion, Meeting, signature
from finalize_services import adapters

from qwen35.domain.finalize_capabilities import DeviceFacts, peer_reasons
from qwen35.services.finalize_choice import choose_fusion


def on(rank: int, **changes: Any) -> DeviceFacts:
    """One of two like devices of a host."""
    like: dict[str, Any] = {
        "device": f"cuda:{rank}", "host": "a", "uuid": f"u{rank}", "model": "NVIDIA H200",
        "compute_capability": (9, 0), "multiprocessors": 132,
    }  # fmt: skip
    return DeviceFacts(**(like | changes))


H200 = "NVIDIA H200 (compute capability 9.0, 132 multiprocessors)"


@pytest.mark.row("A25")
def test_ranks_that_can_share_memory_do() -> None:
    assert peer_reasons([on(0), on(1)]) == ()
    assert peer_reasons([DeviceFacts(device="cpu", host="a")] * 2) == (), "without an id nothing is the same device"
    assert peer_reasons([on(0)]) == ()


@pytest.mark.row("A25")
@pytest.mark.parametrize(
    ("other", "got"),
    [
        ({"multiprocessors": 114}, "NVIDIA H200 (compute capability 9.0, 114 multiprocessors)"),
        ({"compute_capability": (10, 0)}, "NVIDIA H200 (compute capability 10.0, 132 multiprocessors)"),
        ({"model": "NVIDIA H100"}, "NVIDIA H100 (compute capability 9.0, 132 multiprocessors)"),
    ],
)
def test_ranks_on_unlike_devices_would_cut_a_launch_differently_and_are_refused(
    other: dict[str, Any], got: str
) -> None:
    assert peer_reasons([on(0), on(1), on(2, **other)]) == (
        f"peers require like devices, got {H200} on rank 0 and {got} on rank 2",
    )


@pytest.mark.row("A25")
def test_ranks_on_one_device_are_no_peers() -> None:
    reasons = peer_reasons([on(0), on(1), on(2, uuid="u0"), on(3, uuid="u0")])
    assert reasons == (
        "peers require a device each, got rank 0 and rank 2 on u0",
        "peers require a device each, got rank 0 and rank 3 on u0",
    )


@pytest.mark.row("A25")
def test_ranks_on_two_hosts_or_without_access_share_no_memory() -> None:
    for facts, why in (
        ([on(0), on(1, multiprocessors=114)], "peers require like devices"),
        ([on(0), on(1, uuid="u0")], "peers require a device each, got rank 0 and rank 1 on u0"),
        ([DeviceFacts(device="cpu", host="a"), DeviceFacts(device="cpu", host="b")], "one host"),
        ([DeviceFacts(device="cuda:0", host="a", uuid="u0", closed_peers=("u1",)),
          DeviceFacts(device="cuda:1", host="a", uuid="u1")], "rank 0 has not to rank 1"),
    ):  # fmt: skip
        meeting = Meeting(2)

        def choose(rank: int, facts: Any = facts, meeting: Meeting = meeting) -> Any:
            found = adapters(FakeFusion("symmetric", one_host=True), FakeFusion("plain"))
            return choose_fusion(found, "auto", signature(tp_size=2, rank=rank), facts[rank], meeting.side(rank))

        out = meeting.run(choose)
        assert {c.name for c in out} == {"plain"}, out
        assert all(why in " ".join(c.rejected["symmetric"]) for c in out), out
