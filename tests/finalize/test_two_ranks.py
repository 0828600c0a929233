"""The reference over gloo: two processes on the loopback interface against the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
from finalize_pool import Pool
from finalize_tasks import check_case, check_last_law, check_law, reduced_after_inference_mode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen35.adapters.reference.finalize_fusion import CHUNK
from qwen35.testing.finalize_cases import FinalizeCase, finalize_cases
from qwen35.testing.finalize_laws import LAWS

SHAPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"hidden": 96, "top_k": 4, "max_m": 40},
    "float32": {"hidden": 64, "top_k": 3, "max_m": 9, "dtype": "float32", "weight_bias": 1.0, "shared_expert": False},
}


@pytest.mark.row("A10")
@pytest.mark.row("A11")
@pytest.mark.row("A12")
@pytest.mark.row("A13")
@pytest.mark.row("A24")
@pytest.mark.row("A26")
@pytest.mark.row("A27")
@pytest.mark.case("C46")
@pytest.mark.parametrize("law", sorted(LAWS))
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_laws_hold(two_ranks: Pool, shape: str, law: str) -> None:
    two_ranks.run(check_law, "reference", law, 7, SHAPES[shape])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.integers(1, 10).flatmap(lambda top_k: finalize_cases(tp_size=2, hidden=96, max_m=40, top_k=top_k)))
def test_drawn_cases_equal_the_oracle_on_every_rank(two_ranks: Pool, case: FinalizeCase) -> None:
    """Drawn: m, top_k, padding rows, shares of -1 and of zero weights, the weights' dtype."""
    first, second = two_ranks.run(check_case, case, SHAPES["bfloat16"] | {"top_k": case.top_k})
    assert first == second


@pytest.mark.case("C42")
def test_sixty_four_tokens_reach_all_of_far_more_routed_rows(two_ranks: Pool) -> None:
    case = FinalizeCase(seed=4, m=64, top_k=8, hidden=32, tp_size=2, padding=2000, dropped=0.0)
    two_ranks.run(check_case, case, {"hidden": 32, "top_k": 8, "max_m": 64})


def test_more_tokens_than_one_collective_takes_are_all_served(two_ranks: Pool) -> None:
    m = CHUNK + 6
    case = FinalizeCase(seed=6, m=m, top_k=2, hidden=16, tp_size=2)
    first, second = two_ranks.run(check_case, case, {"hidden": 16, "top_k": 2, "max_m": m})
    assert first == second


def test_a_workspace_that_was_prepared_in_inference_mode_takes_calls_outside_it(two_ranks: Pool) -> None:
    assert two_ranks.run(reduced_after_inference_mode) == [[2.0, 2.0]] * 2


@pytest.mark.row("A15")
def test_destroyed_means_closed(two_ranks: Pool) -> None:
    two_ranks.run(check_last_law, "reference", 5, SHAPES["bfloat16"])
