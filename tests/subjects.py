"""Which adapters the law suite runs, and where. A registered adapter that is missing here fails a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import pytest

import qwen35
from qwen35.domain.errors import UnavailableError
from qwen35.services.assembly import guarded
from qwen35.services.counters import Counters
from qwen35.services.discovery import installed_entries
from qwen35.testing import KITS, Bench, LawReport, LawStatus, Profile, limits_for

#: Adapter to where its laws run: on any CPU, on a CPU under Triton's interpreter, on a GPU.
PLACES: dict[str, tuple[Profile, ...]] = {
    "reference": (Profile.CPU, Profile.GPU),
    "reference64": (Profile.CPU,),
    "triton": (Profile.INTERPRETER, Profile.GPU),
    "flashinfer": (Profile.GPU,),
    "sglang": (Profile.GPU,),
}
#: Kernels that serve some calls only where a slot is nobody's: their laws run without one and with slot 0 named.
WANTS_NULL_SLOT = ("flashinfer",)
#: Adapters with kernels that write a slot for padding: their laws run once more with slot 0 named as nobody's.
RESERVES = ("flashinfer",)
#: Adapters that serve every case within their own limits, wherever they have a place: one declined is a failure.
SERVE_ALL = ("reference", "reference64", "triton")
#: What even these may be spared, by how the refusal begins, and why.
SPARED = {
    "a pool of ": "slots past 2**31 elements take gigabytes, which a shared machine may not have",
    "intermediates of ": "so do rows of intermediates",
}
_MARKS = {Profile.CPU: (), Profile.INTERPRETER: (pytest.mark.interpreter,), Profile.GPU: (pytest.mark.gpu,)}


@dataclass(frozen=True)
class Subject:
    """An adapter in one place."""

    port: str
    name: str
    profile: Profile
    null_slot: int | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.profile}" + ("" if self.null_slot is None else "-null-slot")

    @property
    def device(self) -> str:
        return "cuda" if self.profile is Profile.GPU else "cpu"

    def make(self) -> Any:
        """A new adapter, behind the guard where its kernels want aligned addresses; skips where it cannot be used."""
        try:
            adapter = qwen35.adapter(self.port, self.name, device=self.device)
        except UnavailableError as exc:
            declined(self, str(exc))
        return guarded(self.name, adapter, Counters()) if self.port == "gated_delta_rule" else adapter

    def bench(self) -> Bench:
        """A bench with limits by what the adapter can do."""
        adapter = self.make()
        limits = limits_for(adapter.capabilities, self.profile, null_slot=self.null_slot)
        return Bench(adapter, KITS[self.port], self.device, limits, self.make)


def registered(port: str) -> tuple[str, ...]:
    """Every adapter of ``port`` that an installed package declares."""
    return tuple(sorted(name for of, name in installed_entries() if of == port))


def subjects(port: str) -> list[Any]:
    """One parameter an adapter and place, with the mark of the place."""
    return [
        pytest.param(subject, id=str(subject), marks=_MARKS[subject.profile])
        for name in registered(port)
        for profile in PLACES.get(name, ())
        for null_slot in ((None, 0) if name in WANTS_NULL_SLOT else (None,))
        for subject in [Subject(port, name, profile, null_slot)]
    ]


def law_subjects(port: str) -> list[Any]:
    """``subjects``, and with a null slot those of ``RESERVES``."""
    reserving = [
        pytest.param(Subject(port, name, profile, null_slot=0), id=f"{name}-{profile}-null-slot", marks=_MARKS[profile])
        for name in registered(port)
        if name in RESERVES
        for profile in PLACES[name]
    ]
    return [*subjects(port), *reserving]


def declined(subject: Subject, why: str) -> NoReturn:
    """Skip with the reasons why ``subject`` declines a case, or fail where it must serve every one."""
    if subject.name in SERVE_ALL and not why.startswith(tuple(SPARED)):
        pytest.fail(f"{subject} must serve every case of its limits, and declined: {why}", pytrace=False)
    pytest.skip(f"declined: {why}")


def judge(subject: Subject, report: LawReport) -> None:
    """Pass, skip, xfail or fail by ``report``. A law that needs what is not here is skipped for every adapter."""
    assert report.ok, str(report)
    if report.status is LawStatus.DEVIATES:
        pytest.xfail(f"as the adapter states: {report.reason}")
    if report.status is LawStatus.SKIPPED and not report.refused:
        pytest.skip(report.reason)
    if report.status is LawStatus.SKIPPED:
        declined(subject, report.reason.removeprefix("every case was refused: "))
    if report.refused and subject.name in SERVE_ALL:
        declined(subject, f"{report.refused} cases beside {report.examples} that it served; {report}")
