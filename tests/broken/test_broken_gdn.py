"""Deliberately broken gated delta rules: each must fail the law that was made for it."""

from __future__ import annotations

import pytest
from delegate import Delegate, Gdn, assert_caught, law_that_catches
from gdn_layouts import GDN_LAYOUTS
from gdn_limits import GDN_LIMITS
from gdn_numbers import GDN_NUMBERS
from gdn_sequences import GDN_SEQUENCES
from gdn_slots import GDN_SLOTS
from torch import Tensor

from qwen35.domain.capabilities import Clause
from qwen35.ports.gated_delta_rule import DecodeCall

PORT = "gated_delta_rule"
BROKEN = (*GDN_SLOTS, *GDN_SEQUENCES, *GDN_LIMITS, *GDN_NUMBERS, *GDN_LAYOUTS)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_adapter_fails_a_law_of_the_clause_it_breaks(broken: type[Delegate]) -> None:
    assert_caught(broken, law_that_catches(PORT, broken))


def test_every_clause_that_a_cpu_can_show_has_an_adapter_that_breaks_it() -> None:
    assert {kind.breaks for kind in BROKEN} == set(Clause) - {Clause.CAPTURE}


class CrashesByABug(Gdn):
    """Says that it rounds, and in truth cannot be called."""

    breaks = Clause.PRECISION
    caught_by = "decode: within the stated bound of the oracle"

    def decode(self, call: DecodeCall) -> Tensor:
        raise KeyError(call.q.dtype)


def test_a_fake_that_crashes_by_a_bug_of_its_own_does_not_count_as_caught() -> None:
    report = law_that_catches(PORT, CrashesByABug)
    with pytest.raises(AssertionError, match="CrashesByABug does not break what it says"):
        assert_caught(CrashesByABug, report)
