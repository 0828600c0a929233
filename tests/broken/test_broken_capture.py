"""Adapters that break the capture clause, which only a GPU can show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from delegate import Delegate, law_that_catches
from torch import Tensor

import qwen35
from qwen35.domain.capabilities import Clause
from qwen35.testing import LawStatus

pytestmark = pytest.mark.gpu


class OnTriton(Delegate):
    """Our Triton kernels, which keep the clause."""

    port = "gated_delta_rule"
    breaks = Clause.CAPTURE

    def __init__(self) -> None:
        super().__init__(qwen35.adapter(self.port, "triton", device="cuda"))


class WaitsForSlots(OnTriton):
    """Looks at the slots on the host before each decode."""

    caught_by = "decode: nothing waits for the device"

    def decode(self, call: Any) -> Tensor:
        call.slots.tolist()
        return super().decode(call)


class CapturesConstants(OnTriton):
    """Verifies from copies of the slots that it made when it first saw their address."""

    caught_by = "verify: replays see new values"

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[int, int], Tensor] = {}

    def verify(self, call: Any) -> Tensor:
        key = (call.slots.data_ptr(), call.slots.numel())
        return super().verify(replace(call, slots=self._seen.setdefault(key, call.slots.clone())))


@pytest.mark.parametrize("broken", [WaitsForSlots, CapturesConstants], ids=lambda kind: kind.__name__)
def test_an_adapter_that_cannot_be_captured_fails_the_capture_clause(broken: type[OnTriton]) -> None:
    report = law_that_catches(broken.port, broken, "cuda")
    assert report.status is LawStatus.FAILED, f"not noticed: {broken.__doc__}\n{report}"
