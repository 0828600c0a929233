"""Every law of the contract against every registered adapter, wherever that adapter runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings

from qwen35.domain.capabilities import Clause
from qwen35.testing import KITS, LAWS, Law, LawReport, LawStatus, Profile, laws_of, run_law
from qwen35.testing.capture_laws import BOUNDED
from subjects import PLACES, SERVE_ALL, Subject, judge, law_subjects, registered

#: The oracle against itself shows only that the laws can hold; plain torch on a GPU is slow and the same code.
FEW = {("reference64", Profile.CPU): 3, ("reference", Profile.GPU): 3}


def _pairs() -> list[Any]:
    return [
        pytest.param(*subject.values, law, id=f"{port}-{subject.id}-{law.clause}-{law.name}", marks=subject.marks)
        for port in KITS
        for subject in law_subjects(port)
        for law in laws_of(port)
        if law.clause is not Clause.CAPTURE or subject.values[0].profile is Profile.GPU or law.name.endswith(BOUNDED)
    ]


@pytest.mark.parametrize(("subject", "law"), _pairs())
def test_law(subject: Subject, law: Law) -> None:
    bench = subject.bench()
    try:
        report = run_law(law, bench, examples=FEW.get((subject.name, subject.profile), settings.default.max_examples))
    finally:
        bench.adapter.close()
    print(report)  # noqa: T201 - pytest shows the seed where the test fails
    judge(subject, report)


def _report(status: LawStatus, **more: Any) -> LawReport:
    return LawReport(port="gated_delta_rule", clause=Clause.PRECISION, law="a law", status=status, **more)


REFUSED = _report(LawStatus.SKIPPED, reason="every case was refused: key width requires 128, got 64", refused=3)
SOME_REFUSED = _report(LawStatus.PASSED, examples=3, refused=1)


@pytest.mark.parametrize("name", SERVE_ALL)
def test_our_own_adapters_fail_where_they_decline_a_case(name: str) -> None:
    subject = Subject("gated_delta_rule", name, Profile.CPU)
    with pytest.raises(pytest.fail.Exception, match=f"{name}-cpu must serve every case .* key width requires 128"):
        judge(subject, REFUSED)
    with pytest.raises(pytest.fail.Exception, match="declined: 1 cases beside 3 that it served"):
        judge(subject, SOME_REFUSED)
    full = "a pool of 8.6 GB cannot be allocated: out of memory"
    with pytest.raises(pytest.skip.Exception, match="cannot be allocated"):
        judge(subject, replace(REFUSED, reason=f"every case was refused: {full}"))


def test_other_adapters_and_laws_that_need_what_is_not_here_are_skipped() -> None:
    theirs = Subject("gated_delta_rule", "flashinfer", Profile.GPU)
    with pytest.raises(pytest.skip.Exception, match="declined: key width requires 128, got 64"):
        judge(theirs, REFUSED)
    judge(theirs, SOME_REFUSED)
    with pytest.raises(pytest.skip.Exception, match="CUDA graphs need a GPU"):
        judge(Subject("gated_delta_rule", "triton", Profile.INTERPRETER),
              _report(LawStatus.SKIPPED, reason="CUDA graphs need a GPU"))  # fmt: skip


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
