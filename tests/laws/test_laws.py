"""Every law of the contract against every registered adapter, wherever that adapter runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from qwen35.domain.capabilities import Clause
from qwen35.testing import KITS, LAWS, Law, LawStatus, Profile, laws_of, run_law
from subjects import PLACES, Subject, law_subjects, registered

#: The oracle against itself shows only that the laws can hold; plain torch on a GPU is slow and the same code.
FEW = {("reference64", Profile.CPU): 3, ("reference", Profile.GPU): 3}


def _pairs() -> list[Any]:
    return [
        pytest.param(*subject.values, law, id=f"{port}-{subject.id}-{law.clause}-{law.name}", marks=subject.marks)
        for port in KITS
        for subject in law_subjects(port)
        for law in laws_of(port)
        if law.clause is not Clause.CAPTURE or subject.values[0].profile is Profile.GPU
    ]


@pytest.mark.parametrize(("subject", "law"), _pairs())
def test_law(subject: Subject, law: Law) -> None:
    bench = subject.bench()
    try:
        report = run_law(law, bench, examples=FEW.get((subject.name, subject.profile), settings.default.max_examples))
    finally:
        bench.adapter.close()
    print(report)  # noqa: T201 - pytest shows the seed where the test fails
    if report.status is LawStatus.SKIPPED:
        pytest.skip(report.reason)
    if report.status is LawStatus.DEVIATES:
        pytest.xfail(f"as the adapter states: {report.reason}")
    assert report.ok, str(report)


@pytest.mark.row("I05")
@pytest.mark.parametrize("port", KITS)
def test_every_registered_adapter_is_in_the_suite(port: str) -> None:
    missing = set(registered(port)) - set(PLACES)
    assert not missing, f"adapters of {port} that no law is run on; add them to tests/subjects.py: {sorted(missing)}"


@pytest.mark.row("I05")
@pytest.mark.parametrize("port", KITS)
def test_every_clause_has_a_law(port: str) -> None:
    assert [clause for clause in Clause if not LAWS[port].get(clause)] == []


@pytest.mark.parametrize("port", KITS)
def test_laws_have_names_of_their_own(port: str) -> None:
    names = [(law.clause, law.name) for law in laws_of(port)]
    assert len(names) == len(set(names))
