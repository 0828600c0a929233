"""Who wins a row of a swap experiment: the fastest of those that kept every clause."""

from __future__ import annotations

from typing import Any

import pytest

from qwen35.domain.capabilities import Clause, Phase
from qwen35.testing.measure import Method, Timing
from qwen35.testing.probe import Broken
from qwen35.testing.swap import Cell, winner
from qwen35.testing.workload import Row

BROKEN = (Broken(Clause.PRECISION, "state error 1.0e-02 is over the stated 4.0e-06"),)
DEVIATES = ("capture: waits for the device",)


def cell(adapter: str, microseconds: float, spread: float = 0.1, **more: Any) -> Cell:
    timing = Timing(microseconds, microseconds, microseconds, spread, 40, Method.GRAPH)
    return Cell(row=Row(Phase.DECODE, (1,)), adapter=adapter, timing=timing, **more)


def absent(adapter: str) -> Cell:
    return Cell(row=Row(Phase.DECODE, (1,)), adapter=adapter, reasons=("device requires cuda, got cpu",))


@pytest.mark.parametrize("why", [{"broken": BROKEN}, {"deviations": DEVIATES}], ids=["broken", "deviating"])
def test_a_faster_one_that_breaks_or_cannot_keep_a_clause_does_not_win_and_is_named(why: dict[str, Any]) -> None:
    cells = [cell("fast", 1.0, **why), cell("sound", 2.0), cell("slow", 5.0)]
    assert not cells[0].eligible
    assert winner(cells) == ("sound", "fastest that kept every clause; 2.50x slow; faster but excluded: fast")
    assert winner(cells[:2]) == ("sound", "only one that ran and kept every clause; faster but excluded: fast")
    assert winner(cells[::-1]) == winner(cells), "the order of measuring decides nothing"


def test_a_slower_one_that_breaks_a_clause_is_not_called_faster() -> None:
    cells = [cell("sound", 2.0), cell("broken", 3.0, broken=BROKEN), absent("elsewhere")]
    assert winner(cells) == ("sound", "only one that ran and kept every clause")


@pytest.mark.parametrize("spreads", [(0.5, 0.1), (0.1, 0.5)])
def test_times_no_further_apart_than_either_spread_are_a_tie(spreads: tuple[float, float]) -> None:
    first, second = spreads
    near = [cell("b", 10.5, second), cell("a", 10.0, first)]
    assert winner(near) == ("a", "fastest that kept every clause; b ties within noise")
    far = [cell("b", 11.0, second), cell("a", 10.0, first)]
    assert winner(far) == ("a", "fastest that kept every clause; 1.10x b")


@pytest.mark.parametrize(
    "cells",
    [[], [absent("elsewhere")], [cell("a", 1.0, broken=BROKEN), cell("b", 2.0, deviations=DEVIATES), absent("c")]],
    ids=["none", "absent", "excluded"],
)
def test_nobody_wins_where_nobody_ran_and_kept_every_clause(cells: list[Cell]) -> None:
    assert winner(cells) == (None, "no adapter ran within its bound and kept every clause")
