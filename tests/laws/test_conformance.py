"""What a run of the laws reports: deviations, refusals, fallbacks, seeds and errors of any kind."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

import qwen35
from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.domain.capabilities import Clause, Phase, Support
from qwen35.domain.errors import UnknownNameError, UnsupportedError
from qwen35.ports.adapter import AdapterEntry
from qwen35.ports.gated_delta_rule import CommitCall, DecodeCall, ExtendCall, RawGates, VerifyCall
from qwen35.testing import KITS, Bench, LawReport, LawStatus, Profile, iter_laws, laws_of, limits_for, run_law, run_laws

PORT = "gated_delta_rule"


class KernelError(Exception):
    """Of a kernel package's own tree."""


class Plain(ReferenceGatedDeltaRule):
    def __init__(self, **changes: Any) -> None:
        super().__init__(torch.float32, "cpu")
        self.capabilities = replace(self.capabilities, **changes)


class Doubled(Plain):
    """Outputs twice what they should be."""

    def decode(self, call: DecodeCall) -> Tensor:
        out = super().decode(call)
        return out.mul_(2)


class Crashing(Plain):
    def decode(self, call: DecodeCall) -> Tensor:
        if len(call.slots) > 1:
            raise KernelError("too many rows")
        return super().decode(call)


class Refusing(Plain):
    """Says beforehand that it declines batches."""

    def supports(self, call: Any) -> Support:
        if isinstance(call, DecodeCall) and len(call.slots) > 1:
            return Support.of("decode requires one row")
        return super().supports(call)

    def decode(self, call: DecodeCall) -> Tensor:
        if len(call.slots) > 1:
            raise UnsupportedError("decode", ["decode requires one row"])
        return super().decode(call)


def deviation(reason: str) -> dict[str, Any]:
    return {"deviations": MappingProxyType({Clause.PRECISION: reason})}


def by_law(subject: Any, clause: Clause = Clause.PRECISION, **options: Any) -> dict[str, Any]:
    return {r.law: r for r in run_laws(PORT, subject, only=clause, examples=15, **options)}


def test_a_stated_deviation_is_run_and_reported_with_its_reason() -> None:
    report = by_law(lambda: Doubled(**deviation("doubles")))["decode: within the stated bound of the oracle"]
    assert report.status is LawStatus.DEVIATES
    assert report.ok
    assert "doubles" in report.reason
    assert "relative error" in report.reason
    assert "Case(" in report.example


def test_a_stated_deviation_that_holds_passes() -> None:
    assert {r.status for r in by_law(lambda: Plain(**deviation("not really"))).values()} == {LawStatus.PASSED}


def test_an_unstated_one_fails_with_the_smallest_example() -> None:
    report = by_law(Doubled)["decode: within the stated bound of the oracle"]
    assert report.status is LawStatus.FAILED
    assert not report.ok
    assert "slots=(0,)" in report.example, f"not shrunk: {report.example}"


def test_a_seed_repeats_a_run() -> None:
    (first, again) = (by_law(Doubled, seed=7)["decode: within the stated bound of the oracle"] for _ in range(2))
    assert first.seed == again.seed == 7
    assert (first.reason, first.example) == (again.reason, again.example)


def test_phases_that_are_not_offered_are_skipped_with_the_reason() -> None:
    phases = frozenset({Phase.DECODE})
    reports = by_law(lambda: Plain(phases=phases))
    assert reports["decode: within the stated bound of the oracle"].status is LawStatus.PASSED
    skipped = reports["extend: within the stated bound of the oracle"]
    assert skipped.status is LawStatus.SKIPPED
    assert skipped.reason == "extend is not offered"


class ReturnsNothing(Plain):
    def decode(self, call: DecodeCall) -> Any:
        super().decode(call)

    def extend(self, call: Any) -> Any:
        return super().extend(call).out


def test_what_a_method_must_return_is_said() -> None:
    reports = by_law(ReturnsNothing)
    for phase, said in (("decode", "Tensor, got NoneType"), ("extend", "ExtendResult, got Tensor")):
        report = reports[f"{phase}: within the stated bound of the oracle"]
        assert report.status is LawStatus.FAILED
        assert report.reason == f"{phase} must return {said}"


def test_no_law_is_judged_without_assertions() -> None:
    code = (
        "import qwen35; from qwen35.testing import run_laws\n"
        "print(len(run_laws('gated_delta_rule', qwen35.adapter('gated_delta_rule', 'reference', device='cpu'))))"
    )
    result = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ConfigurationError: laws are assertions, which python -O and PYTHONOPTIMIZE leave out" in result.stderr


def test_a_kernel_packages_own_error_is_a_failed_law_not_a_crash() -> None:
    report = by_law(Crashing)["decode: within the stated bound of the oracle"]
    assert report.status is LawStatus.FAILED
    assert report.reason == "KernelError: too many rows"


def test_what_the_adapter_declines_is_counted_and_not_a_failure() -> None:
    report = by_law(Refusing)["decode: within the stated bound of the oracle"]
    assert report.status is LawStatus.PASSED
    assert report.refused
    order = by_law(Refusing, Clause.ORDER)["decode: outputs and states follow the sequences"]
    assert order.status is LawStatus.SKIPPED
    assert "decode requires one row" in order.reason


class PlansNothing(Plain):
    """Serves every call, and declines every plan, as a kernel does that serves one phase of what a plan covers."""

    def prepare(self, plan: Any) -> None:
        raise UnsupportedError("plan", ["extend requires wide rows"])


class PlansNothingSilently(Plain):
    """Likewise, and does not say why."""

    def prepare(self, plan: Any) -> None:
        raise UnsupportedError("plan", [])


class PlansNothingAndServesNone(PlansNothing):
    """Says beforehand that it will, and leaves what was asked for unwritten."""

    def verify(self, call: VerifyCall) -> Tensor:
        return torch.zeros_like(call.v) if call.out is None else call.out


@pytest.mark.parametrize(
    ("kind", "why"),
    [(PlansNothing, ""), (PlansNothingSilently, "a refusal needs a reason"), (PlansNothingAndServesNone, "out")],
)
def test_a_declined_plan_has_a_reason_and_what_is_supported_is_served_without_one(kind: type[Plain], why: str) -> None:
    report = by_law(kind, Clause.REFUSAL)["verify: an option is honoured or refused with a reason"]
    assert (report.status is LawStatus.PASSED) == (not why)
    assert report.reason.startswith(why)
    assert report.refused == 0


class ServesFew(Plain):
    """As a kernel package without a null slot on a GPU: a few combinations of dtypes, gates and views only."""

    def supports(self, call: Any) -> Support:
        reasons = [] if call.states.dtype == torch.float32 else ["state dtype requires float32"]
        if not isinstance(call, CommitCall):
            reasons += [] if isinstance(call.gates, RawGates) else ["gates require raw"]
            reasons += [] if call.q.is_contiguous() else ["q requires a dense tensor"]
            reasons += ["scale requires another number than 0.0"] if call.scale == 0.0 else []
        if isinstance(call, DecodeCall | ExtendCall):
            reasons += ["write slots require a null slot"] if call.write_slots is not None else []
        if isinstance(call, VerifyCall):
            reasons += ["verify requires two tokens"] if call.v.shape[0] * call.v.shape[1] == 1 else []
        return Support.of(*reasons)


class ServesNothing(Plain):
    def supports(self, call: Any) -> Support:
        return Support.of("not today", "nor tomorrow")


SERVING = {law.name: law for law in laws_of(PORT) if law.must_serve}


def serving(adapter: Plain, law: str, examples: int) -> LawReport:
    bench = Bench(adapter, KITS[PORT], "cpu", limits_for(adapter.capabilities, Profile.CPU))
    return run_law(SERVING[law], bench, examples=examples)


def test_every_phase_has_a_law_that_must_serve() -> None:
    assert sorted(phase for law in SERVING.values() for phase in law.phases) == sorted(Phase)


@pytest.mark.parametrize("law", SERVING)
@pytest.mark.parametrize("examples", [1, 10])
def test_an_adapter_that_serves_few_of_the_drawn_calls_is_judged_by_those(law: str, examples: int) -> None:
    report = serving(ServesFew(), law, examples)
    assert report.status is LawStatus.PASSED, report
    assert report.examples == examples


@pytest.mark.parametrize("law", SERVING)
def test_an_adapter_that_serves_nothing_fails_a_law_of_every_phase_it_offers(law: str) -> None:
    report = serving(ServesNothing(), law, 1)
    assert report.status is LawStatus.FAILED
    assert not report.ok
    assert report.reason == f"offers {law.partition(':')[0]} and served no call: nor tomorrow; not today"
    assert "Case(" in report.example, "which call was refused must be shown"


def test_the_size_laws_ask_once_and_on_a_small_pool_before_they_build_a_far_one() -> None:
    class Declining(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.pools: list[int] = []

        def supports(self, call: Any) -> Support:
            self.pools.append(call.states.untyped_storage().nbytes())
            return Support.of("pools require a better day")

    adapter = Declining()
    reports = run_laws(PORT, adapter, only=Clause.SIZE)
    assert {r.status for r in reports} == {LawStatus.SKIPPED}
    assert [r.refused for r in reports] == [1] * len(reports)
    assert len(adapter.pools) == len(reports), "cases that differ by their seed only are refused alike"
    far = [size for report, size in zip(reports, adapter.pools, strict=True) if "2**31" in report.law]
    assert len(far) == len(Phase) + 4, "slots of each phase, write slots of two, rows of two"
    assert max(far) < 2**20, f"a far pool was made for a refusal: {far}"


def test_a_fallback_that_served_fails_the_law() -> None:
    class Lying(Refusing):
        """Declines at the call only, so that the service's fallback serves."""

        def supports(self, call: Any) -> Support:
            return ReferenceGatedDeltaRule.supports(self, call)

    entry = AdapterEntry(
        port=PORT, name="lying", summary="", probe=lambda _: Support.of(), create=lambda *_: Lying()
    )
    container = qwen35.build(
        adapters=[entry], device="cpu", gdn_decode="lying", gdn_fallback="reference", gdn_extend="reference",
        gdn_verify="reference", conv="reference",
    )  # fmt: skip
    reports = by_law(container.gated_delta_rule(), counters=container.counters())
    served = reports["decode: within the stated bound of the oracle"]
    assert served.fallbacks > 0
    assert served.status is LawStatus.FAILED
    assert "a fallback served" in served.reason
    assert reports["verify: within the stated bound of the oracle"].fallbacks == 0


class SacrificesSlotZero(Plain):
    """Lets padded rows write slot 0."""

    def decode(self, call: DecodeCall) -> Tensor:
        out = super().decode(call)
        if bool((call.slots < 0).any()):
            call.states[0] = float("nan")
        return out


def test_a_null_slot_is_nobodys_and_only_where_it_is_named() -> None:
    law = "decode: padded rows are zero and touch no slot"
    limits = limits_for(Plain().capabilities, Profile.CPU, null_slot=0)
    assert by_law(SacrificesSlotZero, Clause.PADDING)[law].status is LawStatus.FAILED
    assert by_law(SacrificesSlotZero, Clause.PADDING, limits=limits)[law].status is LawStatus.PASSED


def test_reports_come_one_by_one_for_every_law_of_a_port() -> None:
    reports = iter_laws(PORT, Plain(), examples=1)
    assert next(reports).clause is Clause.PADDING
    assert len(laws_of(PORT)) > len(laws_of(PORT, Clause.PADDING)) > 0
    with pytest.raises(UnknownNameError, match="gated_delta_rule"):
        laws_of("gated_delta_rul")


def test_the_suite_needs_no_test_framework() -> None:
    code = "import sys, qwen35.testing; sys.exit('pytest' in sys.modules or 'triton.language' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
