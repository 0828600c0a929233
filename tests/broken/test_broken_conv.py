"""Deliberately broken short convolutions: each must fail the law that was made for it."""

from __future__ import annotations

import pytest
from conv_broken import CONV_BROKEN
from delegate import Delegate, assert_caught, law_that_catches

from qwen35.domain.capabilities import Clause

PORT = "short_convolution"


@pytest.mark.parametrize("broken", CONV_BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_convolution_fails_a_law_of_the_clause_it_breaks(broken: type[Delegate]) -> None:
    assert_caught(broken, law_that_catches(PORT, broken))


def test_every_clause_that_a_cpu_can_show_has_a_convolution_that_breaks_it() -> None:
    assert {kind.breaks for kind in CONV_BROKEN} == set(Clause) - {Clause.CAPTURE}
