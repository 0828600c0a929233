"""The policy's decision in the log: each distinct one once, outside decode steps and capture."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from finalize_fakes import TraceOfReads
from test_boundary import BOUNDS, CONFIG, MOST, RANKS, handoff_of, norm_of, service_of, step_of

from qwen35.domain.capabilities import Phase
from qwen35.domain.finalize_policy import Decision
from qwen35.model.boundary import Boundaries
from qwen35.model.parallel import TensorParallel
from qwen35.services.finalize_log import DecisionLog

ELIGIBLE = ["fused finalize: eligible", "fused all-reduce: eligible"]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="qwen35")
    return caplog


def ready() -> tuple[Boundaries, Any]:
    service, norm = service_of(), norm_of()
    boundaries = Boundaries(CONFIG, RANKS, service)
    boundaries.prepare([norm], torch.float32, torch.device("cpu"), BOUNDS)
    return boundaries, norm


def test_a_decision_is_said_once_and_one_with_another_reason_too(log: pytest.LogCaptureFixture) -> None:
    decisions = DecisionLog()
    nine, ten = "m requires 1..8, got 9", "m requires 1..8, got 10"
    for reasons in ((), (nine,), (ten,), (), ("no", nine)):
        for _ in range(2):
            decisions.note("finalize", Decision(not reasons, reasons))
    assert log.messages == [
        "fused finalize: eligible",
        f"fused finalize: not eligible: {nine}",
        f"fused finalize: not eligible: no; {nine}",
    ]
    assert {record.levelno for record in log.records} == {logging.INFO}


def test_nothing_is_said_inside_capture_and_it_is_not_lost(log: pytest.LogCaptureFixture) -> None:
    inside = True
    decisions = DecisionLog(is_capturing=lambda: inside)
    decisions.note("finalize", Decision(True))
    assert log.messages == []
    inside = False
    decisions.note("finalize", Decision(True))
    assert log.messages == ["fused finalize: eligible"]


def test_prepare_says_what_is_decided_and_an_extend_what_is_new(log: pytest.LogCaptureFixture) -> None:
    boundaries, _ = ready()
    assert log.messages == ELIGIBLE
    for tokens in (3, MOST + 1, MOST + 2, 5):
        step_of(boundaries, tokens)
    too_many = f"not eligible: m requires 1..{MOST}, got {MOST + 1}"
    assert log.messages == [*ELIGIBLE, f"fused finalize: {too_many}", f"fused all-reduce: {too_many}"]


def test_a_model_that_cannot_fuse_says_why(log: pytest.LogCaptureFixture) -> None:
    Boundaries(CONFIG, TensorParallel(), service_of()).prepare([norm_of()], torch.float32, torch.device("cpu"), BOUNDS)
    assert [m.partition(": ")[0] for m in log.messages] == ["fused finalize", "fused all-reduce"]
    assert all("tensor parallelism requires at least 2 ranks, got 1" in m for m in log.messages)


def test_a_decode_step_never_logs_even_what_is_new(log: pytest.LogCaptureFixture) -> None:
    unprepared = Boundaries(CONFIG, RANKS, service_of())
    step = step_of(unprepared, tokens=1, phase=Phase.DECODE)
    assert "fusion requires a prepared workspace" in step.finalize.reasons
    assert log.messages == []


@pytest.mark.row("C11")
def test_the_final_norm_neither_prints_nor_reads_the_device(
    log: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """The engine's trace and its native final norm are switches of its own; here nothing traces, and ``off`` is the
    plain norm. So the boundary that is also the final one may not print, log or bring a value to the host."""
    boundaries, norm = ready()
    log.clear()
    capsys.readouterr()
    handoff, residual = handoff_of(seed, m=1), torch.randn(1, 16)
    with TraceOfReads() as reads:
        boundaries.add_and_norm(handoff, residual, norm, step_of(boundaries, tokens=1, phase=Phase.DECODE))
    assert (log.messages, capsys.readouterr().out, reads.found) == ([], "", [])
    with TraceOfReads() as reads:
        float(residual[0, 0])
    assert reads.found, "the trace would not notice"
