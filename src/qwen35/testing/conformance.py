"""Runs the laws against one adapter and reports clause by clause; ``qwen35 conform`` is a table around it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Step
from hypothesis.errors import FlakyFailure, HypothesisException, Unsatisfiable

from qwen35.domain.capabilities import Clause
from qwen35.domain.errors import ConfigurationError, UnknownNameError
from qwen35.services.counters import Counters
from qwen35.testing.bench import Bench, Refused
from qwen35.testing.case import Case
from qwen35.testing.law import Law
from qwen35.testing.limits import Limits, Profile, limits_for
from qwen35.testing.tables import KITS, LAWS


class LawBroken(Exception):  # noqa: N818 - a finding about an adapter
    """A law's check did not hold, or the adapter raised what it must not; the cause says which."""


class LawStatus(StrEnum):
    """``deviates``: broken, as the adapter's capabilities say."""

    PASSED = "passed"
    FAILED = "failed"
    DEVIATES = "deviates"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class LawReport:
    """How one law ended.

    ``reason`` says why it did not pass (for a deviation, the adapter's own reason first); ``example`` is the
    smallest case that broke it; ``examples`` counts the cases that were checked, ``refused`` those that
    the adapter's ``supports`` declined; ``fallbacks`` the calls that a fallback served, which must be none;
    ``seed`` repeats the run.
    """

    port: str
    clause: Clause
    law: str
    status: LawStatus
    reason: str = ""
    example: str = ""
    examples: int = 0
    refused: int = 0
    fallbacks: int = 0
    seed: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Not failed."""
        return self.status is not LawStatus.FAILED

    def __str__(self) -> str:
        tail = f": {self.reason}" if self.reason else ""
        example = f"\n  smallest example: {self.example}" if self.example else ""
        return f"{self.port}, {self.clause}, {self.law}: {self.status}{tail}{example}\n  seed {self.seed}"


def laws_of(port: str, only: Clause | None = None) -> tuple[Law, ...]:
    """The laws of a port, all or those of one clause, in the order of the contract."""
    if port not in LAWS:
        raise UnknownNameError("port", port, LAWS)
    return tuple(law for clause in Clause if only in (None, clause) for law in LAWS[port].get(clause, ()))


def iter_laws(
    port: str, subject: Any, *, device: str = "cpu", limits: Limits | None = None,
    profile: Profile | None = None, examples: int | None = None, only: Clause | None = None,
    counters: Counters | Callable[[], Counters] | None = None, seed: int | None = None, shrink: bool = True,
) -> Iterator[LawReport]:  # fmt: skip
    """One report after another, as they are ready: ``laws_of(port, only)`` says how many to expect.

    ``subject`` is an adapter or service, used as it is and left open, or a factory of adapters, called once a
    law, whose adapters are closed. ``limits`` (None: those of ``profile``, and that None: by device) bound the cases,
    ``examples`` (None: the profile's) their number. ``counters`` are those of the container that built a
    service, or say after each call of the factory which they are.
    """
    make: Callable[[], Any] | None = subject if callable(subject) else None
    for law in laws_of(port, only):
        adapter = subject if make is None else make()
        chosen = limits
        if chosen is None:
            by_device = Profile.CPU if device.startswith("cpu") else Profile.GPU
            chosen = limits_for(adapter.capabilities, profile or by_device)
        bench = Bench(adapter, KITS[port], device, chosen, make)
        counted = counters() if callable(counters) else counters
        try:
            yield run_law(law, bench, examples=examples, counters=counted, seed=seed, shrink=shrink)
        finally:
            if make is not None:
                adapter.close()


def run_laws(
    port: str, subject: Any, *, device: str = "cpu", limits: Limits | None = None,
    profile: Profile | None = None, examples: int | None = None, only: Clause | None = None,
    counters: Counters | Callable[[], Counters] | None = None, seed: int | None = None, shrink: bool = True,
) -> list[LawReport]:  # fmt: skip
    """Every report of ``iter_laws``."""
    return list(
        iter_laws(
            port, subject, device=device, limits=limits, profile=profile, examples=examples, only=only,
            counters=counters, seed=seed, shrink=shrink,
        )
    )  # fmt: skip


def run_law(
    law: Law, bench: Bench, *, examples: int | None = None, counters: Counters | None = None,
    seed: int | None = None, shrink: bool = True,
) -> LawReport:  # fmt: skip
    """Check one law on ``examples`` drawn cases and shrink what breaks it.

    Raises ``ConfigurationError`` under ``python -O``, which leaves out the assertions that laws are made of.
    """
    if not __debug__:
        raise ConfigurationError("laws are assertions, which python -O and PYTHONOPTIMIZE leave out: run without them")
    seed = random.randrange(2**32) if seed is None else seed
    started, fell_back = time.perf_counter(), _fallbacks(counters, law.port)
    reasons = law.skip_reasons(bench)
    trail = _Trail(law, bench)
    status, reason = LawStatus.PASSED, ""
    if reasons:
        status, reason = LawStatus.SKIPPED, "; ".join(reasons)
    else:
        status, reason = _judge(law, bench, trail, examples, seed, shrink)
    fallbacks = _fallbacks(counters, law.port) - fell_back
    if fallbacks and status is not LawStatus.FAILED:
        status, reason = LawStatus.FAILED, f"a fallback served {fallbacks} calls"
    return LawReport(
        port=law.port, clause=law.clause, law=law.name, status=status, reason=reason,
        example=repr(trail.latest) if status in (LawStatus.FAILED, LawStatus.DEVIATES) else "",
        examples=trail.checked, refused=trail.refused, fallbacks=fallbacks, seed=seed,
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def _fallbacks(counters: Counters | None, port: str) -> int:
    return 0 if counters is None else counters.total("fallbacks", port=port)


class _Trail:
    """Runs a law's check and remembers the latest case: the smallest one, when hypothesis is done."""

    def __init__(self, law: Law, bench: Bench) -> None:
        self._law, self._bench = law, bench
        self.latest: Case[Any] | None = None
        self.first_refused: Case[Any] | None = None
        self.checked = self.refused = 0
        self.refusals: set[str] = set()

    def check(self, case: Case[Any]) -> None:
        if self._law.alike and self.refused:
            hypothesis.reject()
        try:
            self._law.check(self._bench, case)
        except Refused as refusal:
            self.refused += 1
            self.first_refused = self.first_refused or case
            self.refusals.update(refusal.reasons)
            hypothesis.reject()
        except AssertionError as exc:
            self.latest = case
            raise LawBroken(str(exc)) from exc
        except Exception as exc:
            # Kernel packages have exception trees of their own; whatever one raises, the law is broken.
            self.latest = case
            raise LawBroken(f"{type(exc).__name__}: {exc}") from exc
        self.checked += 1


def _judge(
    law: Law, bench: Bench, trail: _Trail, examples: int | None, seed: int, shrink: bool
) -> tuple[LawStatus, str]:
    most = bench.limits.examples if examples is None else examples
    if law.most_examples is not None:
        most = min(most, law.most_examples)
    steps = (Step.generate, Step.shrink) if shrink else (Step.generate,)

    @hypothesis.seed(seed)
    @settings(
        max_examples=most, database=None, deadline=None, phases=steps, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(law.cases(bench.limits))
    def attempt(case: Case[Any]) -> None:
        trail.check(case)

    try:
        attempt()
    except Unsatisfiable:
        return _nothing_served(law, trail)
    except (LawBroken, HypothesisException) as exc:
        said = _said(exc)
        stated = bench.adapter.capabilities.deviations.get(law.clause)
        return (LawStatus.FAILED, said) if stated is None else (LawStatus.DEVIATES, f"{stated} ({said})")
    return (LawStatus.PASSED, "") if trail.checked else _nothing_served(law, trail)


def _nothing_served(law: Law, trail: _Trail) -> tuple[LawStatus, str]:
    """Every case was refused: nothing is shown, and where the law must serve, what the adapter offers is not there."""
    reasons = "; ".join(sorted(trail.refusals))
    if not law.must_serve:
        return LawStatus.SKIPPED, f"every case was refused: {reasons}"
    trail.latest = trail.first_refused
    return LawStatus.FAILED, f"offers {', '.join(sorted(law.phases))} and served no call: {reasons}"


def _said(exc: BaseException) -> str:
    if isinstance(exc, FlakyFailure):
        first = next((str(inner) for inner in exc.exceptions if isinstance(inner, LawBroken)), "")
        return f"{first} (not repeatable: an earlier call or a race shows in the result)"
    return str(exc)
