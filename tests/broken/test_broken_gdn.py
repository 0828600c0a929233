"""Deliberately broken gated delta rules: each must fail the law that was made for it."""

from __future__ import annotations

import pytest
from delegate import Delegate, law_that_catches
from gdn_numbers import GDN_NUMBERS
from gdn_sequences import GDN_SEQUENCES
from gdn_slots import GDN_SLOTS

from qwen35.domain.capabilities import Clause
from qwen35.testing import LawStatus

PORT = "gated_delta_rule"
BROKEN = (*GDN_SLOTS, *GDN_SEQUENCES, *GDN_NUMBERS)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_adapter_fails_a_law_of_the_clause_it_breaks(broken: type[Delegate]) -> None:
    report = law_that_catches(PORT, broken)
    assert report.status is LawStatus.FAILED, f"not noticed: {broken.__doc__}\n{report}"
    assert "Case(" in report.example


def test_every_clause_that_a_cpu_can_show_has_an_adapter_that_breaks_it() -> None:
    assert {kind.breaks for kind in BROKEN} == set(Clause) - {Clause.CAPTURE}
