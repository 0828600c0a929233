"""The fused finalize on two GPUs without multicast: laws, soak, uneven arrival, addresses."""

from __future__ import annotations

from typing import Any

import pytest
from finalize_pool import Pool
from finalize_tasks import arrive_late, check_last_law, check_law, kernels_of_a_call, never_arrive, soak
from prepare_tasks import compiled_by_calls, prepare_without_memory, roll_call_unheard

from qwen35.testing.finalize_laws import CAPTURE_LAWS, LAWS

pytestmark = [pytest.mark.gpu, pytest.mark.row("A25")]

#: One width that is no power of two, one small enough to be cut over few programs, the public ones.
SHAPES: dict[str, dict[str, Any]] = {
    "2048x8": {"hidden": 2048, "top_k": 8, "max_m": 300},
    "3072x8": {"hidden": 3072, "top_k": 8, "max_m": 130, "weight_bias": 1.0},
    "4096x10": {"hidden": 4096, "top_k": 10, "max_m": 70, "shared_expert": False},
}
ADAPTERS = ["triton", "triton two-step", "reference"]


@pytest.mark.parametrize("law", sorted(LAWS))
@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_laws_hold(two_gpus: Pool, adapter: str, shape: str, law: str) -> None:
    two_gpus.run(check_law, adapter, law, 20260, SHAPES[shape])


@pytest.mark.case("C47")
@pytest.mark.row("A10")
@pytest.mark.parametrize("law", sorted(CAPTURE_LAWS))
@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("adapter", ["triton", "triton two-step"])
def test_capture_laws_hold(two_gpus: Pool, adapter: str, shape: str, law: str) -> None:
    two_gpus.run(check_law, adapter, law, 81, SHAPES[shape])


@pytest.mark.parametrize("law", [*sorted(LAWS), *sorted(CAPTURE_LAWS)])
def test_laws_hold_for_flashinfers_ipc(two_gpus: Pool, law: str) -> None:
    pytest.importorskip("flashinfer")
    two_gpus.run(check_law, "flashinfer_ipc", law, 405, SHAPES["2048x8"] | {"max_m": 300})


@pytest.mark.parametrize("adapter", ["triton", "triton two-step"])
def test_a_hundred_thousand_replays_neither_hang_nor_drift(two_gpus: Pool, adapter: str) -> None:
    first, second = two_gpus.run(soak, adapter, 100_000, 3, SHAPES["2048x8"])
    assert first == second


@pytest.mark.parametrize("adapter", ["triton", "triton two-step"])
def test_a_rank_that_comes_three_seconds_late_is_waited_for(two_gpus: Pool, adapter: str) -> None:
    waited, late = two_gpus.run(arrive_late, adapter, 3.0, SHAPES["2048x8"])
    assert waited > 2.0
    assert late < 2.0


def test_checked_mode_names_the_rank_that_never_comes(two_gpus: Pool) -> None:
    named, nobody = two_gpus.run(never_arrive, {"hidden": 2048, "top_k": 8, "max_m": 8})
    assert (named, nobody) == ((1,), ())


@pytest.mark.parametrize("on", [0, 1])
def test_a_rank_whose_memory_is_full_leaves_no_other_in_the_rendezvous(two_gpus: Pool, on: int) -> None:
    first, second = two_gpus.run(prepare_without_memory, on, {"hidden": 2048, "top_k": 8, "max_m": 64})
    assert first == second
    assert f"mailboxes between ranks: rank {on}: OutOfMemoryError: " in first
    assert f"rank {1 - on}: " not in first


def test_a_rank_that_is_not_heard_while_a_workspace_is_made_is_named_on_all(two_gpus: Pool) -> None:
    first, second = two_gpus.run(roll_call_unheard, None, 1_000_000)
    assert first == second
    assert first == "triton workspace: rank 0: RankTimeoutError: the fused finalize timed out: no word from rank 1"


@pytest.mark.parametrize("checked", [False, True])
def test_no_call_compiles_anything_after_prepare(two_gpus: Pool, checked: bool) -> None:
    """Of a width that no other test has: nothing was compiled for one of them."""
    shape = {"hidden": 1536 if checked else 1792, "top_k": 6, "max_m": 300}
    compiled = two_gpus.run(compiled_by_calls, "triton", 17, shape, checked)
    assert [after for _, after in compiled] == [0, 0]
    assert all(before > 6 for before, _ in compiled)


@pytest.mark.parametrize("shared", [False, True])
def test_no_call_of_flashinfers_ipc_compiles_a_kernel_of_ours_after_prepare(two_gpus: Pool, shared: bool) -> None:
    """For a number of choices that no other test has."""
    pytest.importorskip("flashinfer")
    shape = {"hidden": 2048, "top_k": 6 if shared else 5, "max_m": 300, "shared_expert": shared}
    compiled = two_gpus.run(compiled_by_calls, "flashinfer_ipc", 29, shape)
    assert compiled == [(2, 0), (2, 0)], "one for each dtype of weights"


def test_a_one_shot_finalize_is_one_kernel(two_gpus: Pool) -> None:
    for names in two_gpus.run(kernels_of_a_call, "triton", SHAPES["2048x8"]):
        assert len(names) == 1, names
        assert names[0].startswith("finalize_one_shot"), names


@pytest.mark.row("A15")
@pytest.mark.parametrize("adapter", ["triton", "reference"])
def test_destroyed_means_closed(two_gpus: Pool, adapter: str) -> None:
    two_gpus.run(check_last_law, adapter, 9, {"hidden": 2048, "top_k": 8, "max_m": 16})
