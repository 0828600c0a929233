"""A law: one clause of the contract as a check that must hold for every case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from qwen35.domain.capabilities import Clause, Phase
from qwen35.testing.bench import Bench
from qwen35.testing.case import Case
from qwen35.testing.limits import Limits


def _anywhere(_: Bench) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """``cases(limits)`` are what may be drawn; ``check(bench, case)`` raises ``AssertionError`` where the clause
    is broken. ``phases`` are those that the adapter must offer; ``needs(bench)`` gives reasons to skip.
    ``must_serve``: an adapter that offers the phases and refuses every case that is drawn breaks the law.
    ``alike``: cases differ by their seed only, so one refusal speaks for all, and no other is made."""

    name: str
    port: str
    clause: Clause
    phases: frozenset[Phase]
    cases: Callable[[Limits], SearchStrategy[Case[Any]]]
    check: Callable[[Bench, Case[Any]], None]
    needs: Callable[[Bench], tuple[str, ...]] = _anywhere
    most_examples: int | None = None
    must_serve: bool = False
    alike: bool = False

    def skip_reasons(self, bench: Bench) -> tuple[str, ...]:
        """Why this law cannot be shown with this bench; none: it can."""
        offered = bench.adapter.capabilities.phases
        missing = tuple(f"{phase} is not offered" for phase in sorted(self.phases - offered))
        return missing + self.needs(bench)
