"""However many calls are refused, and with whatever values, the log and the labels stay few and keep their meaning."""

from __future__ import annotations

import pytest
import torch
from fusion_machine import HIDDEN, FusedMachine, fused, gate, prepared
from seam_machine import Machine
from test_gdn_calls import dispatch_extend, own, start_refusing

from fakes import FakeGatedDeltaRule
from qwen35.adapters.sglang.seam_reasons import FURTHER, MOST_REASONS, BoundedReasons
from qwen35.domain.capabilities import Phase
from qwen35.services.counters import Counters


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "qwen35"]


def test_a_kind_has_one_label_and_one_line_and_past_the_bound_they_share_one() -> None:
    reasons = BoundedReasons(most=2)
    assert [reasons.label(f"m requires 1..8, got {m}") for m in range(9, 59)] == ["m requires 1..8"] * 50
    assert [reasons.line(f"m requires 1..8, got {m}") for m in (9, 10)] == ["m requires 1..8, got 9", None]
    assert reasons.label("b") == "b", "a label may be asked for without a line"
    assert reasons.line("b") == "b"
    assert [reasons.label(f"further {n}") for n in range(3)] == [FURTHER] * 3
    assert (reasons.line("further 3") or "").startswith("further 3 (further reasons are counted together and not log")
    assert [reasons.line(reason) for reason in ("further 3", "further 4", "b")] == [None] * 3
    assert reasons.label("b") == "b"


@pytest.fixture
def machine(groups: object) -> FusedMachine:
    return prepared()


def refuse(m: int) -> None:
    """A fused norm that our service refuses as a reason of its own for each ``m``."""
    fused(torch.randn(m, HIDDEN // 2), torch.randn(m, HIDDEN // 2), torch.ones(HIDDEN // 2))


def test_prompts_of_many_lengths_leave_refusals_of_fusion_their_label_and_one_line(
    machine: FusedMachine, caplog: pytest.LogCaptureFixture
) -> None:
    for m in range(3000, 3000 + MOST_REASONS + 8):
        assert not gate(m)
    caplog.clear()
    x = torch.randn(4, HIDDEN)
    for _ in range(500):
        fused(x, x, torch.ones(HIDDEN), eps=1e-5)
    assert len(logged(caplog)) == 1
    assert machine.reasons("fallbacks") == {"eps requires 1e-06": 500}
    assert machine.reasons("fusions_declined") == {"m requires 1..2048": MOST_REASONS + 8}


def test_refusals_of_many_kinds_leave_declined_boundaries_their_label(
    machine: FusedMachine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    for _ in range(3):
        for m in range(1, MOST_REASONS + 9):
            refuse(m)
    assert len(machine.reasons("fallbacks")) == MOST_REASONS + 1
    assert machine.reasons("fallbacks")[FURTHER] == 3 * 8
    assert len(logged(caplog)) == MOST_REASONS + 1
    assert not gate(3000)
    assert machine.reasons("fusions_declined") == {"m requires 1..2048": 1}


def refusing_gdn() -> tuple[Machine, FakeGatedDeltaRule, Counters]:
    """SGLang's dispatcher with an adapter behind it that refuses for what its ``reasons`` say."""
    one = start_refusing("unfit")
    (name, fake) = one.container.gated_delta_rule().adapters[Phase.EXTEND]
    assert (name, isinstance(fake, FakeGatedDeltaRule)) == ("fake", True)
    machine = Machine()
    own(machine)
    return machine, fake, one.container.counters()  # type: ignore[return-value]


def test_equal_gdn_calls_are_logged_once_however_many_kinds_came_before(caplog: pytest.LogCaptureFixture) -> None:
    machine, fake, counters = refusing_gdn()
    caplog.clear()
    for kind in range(MOST_REASONS + 8):
        fake.reasons = (f"clause {kind}",)
        dispatch_extend(machine, [1], [3])
    for _ in range(200):
        dispatch_extend(machine, [1], [3])
    assert len(logged(caplog)) == MOST_REASONS + 1
    assert counters.total("fallbacks", reason=FURTHER) == 8 + 200
    assert counters.total("fallbacks", reason="clause 0") == 1


def test_gdn_refusals_of_many_values_are_one_kind(caplog: pytest.LogCaptureFixture) -> None:
    machine, fake, counters = refusing_gdn()
    caplog.clear()
    for tokens in range(100):
        fake.reasons = (f"tokens requires at most 8, got {tokens}",)
        dispatch_extend(machine, [1], [3])
    assert len(logged(caplog)) == 1
    assert logged(caplog)[0].endswith("tokens requires at most 8, got 0"), "the line has the value"
    assert counters.total("fallbacks", reason="tokens requires at most 8") == 100
