"""An adapter that hands every call to the plain-torch one: broken adapters override what they break."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.adapters.reference.short_convolution import ReferenceShortConvolution
from qwen35.domain.capabilities import Capabilities, Clause, Support
from qwen35.testing import KITS, LAWS, Bench, LawReport, LawStatus, Profile, limits_for, run_law


class Delegate:
    """Keeps every clause, because the plain-torch adapter inside does. A broken one says which clause it ``breaks``
    and which law it must be ``caught_by``. ``raises``: the error that is its mistake; any other shows a mistake in
    the fake itself, which proves nothing of the law. ``said``: what the law says where it has no case to show."""

    breaks: Clause
    caught_by: str
    raises: str = ""
    said: str = "Case("

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.capabilities: Capabilities = inner.capabilities

    def prepare(self, plan: Any) -> None:
        self.inner.prepare(plan)

    def supports(self, call: Any) -> Support:
        return self.inner.supports(call)

    def decode(self, call: Any) -> Tensor:
        return self.inner.decode(call)

    def extend(self, call: Any) -> Any:
        return self.inner.extend(call)

    def verify(self, call: Any) -> Tensor:
        return self.inner.verify(call)

    def commit(self, call: Any) -> None:
        self.inner.commit(call)

    def refresh_parameters(self) -> int:
        return self.inner.refresh_parameters()

    def close(self) -> None:
        self.inner.close()


def clear_empty_fresh(call: Any, pool: Tensor) -> None:
    """Zero what each fresh sequence of ``call`` without tokens would write, as if it had begun; nothing where the call
    has no tokens at all."""
    if call.fresh is None or not int(call.cu_seqlens[-1]):
        return
    targets = call.slots if call.write_slots is None else call.write_slots
    empty = (call.cu_seqlens.diff() == 0) & call.fresh & (call.slots >= 0) & (targets >= 0)
    pool[targets[empty].long()] = 0


class Gdn(Delegate):
    """The float32 reference of the gated delta rule."""

    def __init__(self) -> None:
        super().__init__(ReferenceGatedDeltaRule(torch.float32, "cpu"))


class Conv(Delegate):
    """The float32 reference of the short convolution."""

    def __init__(self) -> None:
        super().__init__(ReferenceShortConvolution(torch.float32, "cpu"))


def law_that_catches(port: str, broken: type[Delegate], device: str = "cpu") -> LawReport:
    """The report of the law that ``broken`` names, in the clause that it names."""
    (law,) = (law for law in LAWS[port][broken.breaks] if law.name == broken.caught_by)
    adapter = broken()
    profile = Profile.CPU if device == "cpu" else Profile.GPU
    bench = Bench(adapter, KITS[port], device, limits_for(adapter.capabilities, profile), broken)
    return run_law(law, bench, examples=100, shrink=False)


def assert_caught(broken: type[Delegate], report: LawReport) -> None:
    """The law failed by its own assertion, or by the very error that is the fake's mistake."""
    assert report.status is LawStatus.FAILED, f"not noticed: {broken.__doc__}\n{report}"
    assert "Case(" in report.example
    raised = re.match(r"([A-Z]\w*): ", report.reason)
    assert (raised[1] if raised else "") == broken.raises, f"{broken.__name__} does not break what it says:\n{report}"
    if not broken.raises:
        assert broken.said in report.reason, f"no assertion of the law:\n{report}"
