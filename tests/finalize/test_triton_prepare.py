"""Two processes make our workspace in Triton's interpreter, their mailboxes in files that both map."""

from __future__ import annotations

from pathlib import Path

import pytest
from finalize_pool import Pool
from prepare_tasks import made_and_called, roll_call_unheard

pytestmark = pytest.mark.interpreter


@pytest.mark.row("A10")
@pytest.mark.row("A12")
@pytest.mark.parametrize("spin_limit", [0, 10**6], ids=["unchecked", "checked"])
def test_ranks_that_run_at_once_end_with_the_oracles_rows_and_the_same_bits(
    two_ranks: Pool, tmp_path: Path, spin_limit: int, seed: int
) -> None:
    first, second = two_ranks.run(made_and_called, tmp_path, spin_limit, seed)
    assert first == second, f"seed {seed}"


def test_a_rank_that_is_not_heard_is_named_on_all_and_no_launch_goes_on_for_good(
    two_ranks: Pool, tmp_path: Path
) -> None:
    first, second = two_ranks.run(roll_call_unheard, tmp_path, 500)
    assert first == second
    assert first == "triton workspace: rank 0: RankTimeoutError: the fused finalize timed out: no word from rank 1"
