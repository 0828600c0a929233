"""Ranks that were told different things of fusion, or of which one says nothing, as one of them sees it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fusion_machine import HIDDEN, TOP_K, FusedMachine, launch, model_runner

from qwen35.domain.errors import AgreementError, ConfigurationError, UnavailableError

pytestmark = pytest.mark.usefixtures("groups")

SGLANGS = "SGLang's own fusion (QWEN35_FINALIZE is unset, auto or off)"


class Heard:
    """Two ranks, of which the other says ``other`` first and agrees from then on; keeps what this one says."""

    def __init__(self, other: str | None = None) -> None:
        self.other, self.told = other, list[Any]()

    def exchange(self, value: Any) -> list[Any]:
        self.told.append(value)
        other, self.other = self.other, None
        return [value, value if other is None else other]


class Lost:
    """A rank that never comes."""

    def exchange(self, value: Any) -> list[Any]:
        raise AgreementError("the ranks could not be heard", ["1 of 2 joined"])


def ask_for_workspace() -> None:
    """SGLang's CuTe DSL fusion, on either release."""
    from sglang.srt.layers.flashinfer_mnnvl_cutedsl import get_flashinfer_mnnvl_cutedsl_ar_fusion

    get_flashinfer_mnnvl_cutedsl_ar_fusion(hidden_size=HIDDEN, top_k=TOP_K, max_m=8, rms_epsilon=1e-6, weight_bias=0.0)


@pytest.mark.row("B17")
@pytest.mark.parametrize(
    ("own", "said", "other"),
    [
        ("auto", SGLANGS, "finalize = 'fake'"), ("off", SGLANGS, "finalize = 'fake'"),
        ("fake", "finalize = 'fake'", SGLANGS), ("fake", "finalize = 'fake'", "finalize = 'triton'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("through", ["warm-up", "workspace"])
def test_a_rank_that_was_told_otherwise_is_refused(own: str, said: str, other: str, through: str) -> None:
    machine = FusedMachine(finalize=own, agreement=Heard(other))
    with pytest.raises(ConfigurationError, match="must be set alike") as caught:
        machine.warm_up() if through == "warm-up" else ask_for_workspace()
    assert f"rank 0: {said}; rank 1: {other}. Set QWEN35_FINALIZE" in str(caught.value)
    assert machine.fusion.attempts == 0


@pytest.mark.parametrize(("own", "preparing"), [("auto", 0), ("fake", 1)])
def test_ranks_agree_once_before_anything_else(own: str, preparing: int) -> None:
    heard = Heard()
    machine = FusedMachine(finalize=own, agreement=heard, checked=True)
    machine.runner = model_runner(draft=True)
    machine.warm_up()
    assert heard.told == [], "a draft's warm-up is not every rank's first"
    machine.runner = model_runner()
    machine.warm_up()
    machine.warm_up()
    assert heard.told[0] == (SGLANGS if own == "auto" else "finalize = 'fake', checked")
    assert sum(isinstance(told, str) for told in heard.told) == 1
    assert machine.fusion.attempts == preparing


def test_one_rank_asks_nobody() -> None:
    heard = Heard()
    machine = FusedMachine(finalize="auto", agreement=heard)
    with launch(tp_size=1, attn_tp_size=1, moe_tp_size=1):
        machine.warm_up()
    assert heard.told == []


def test_a_rank_that_does_not_answer_is_an_error_for_one_that_would_wait_for_it() -> None:
    machine = FusedMachine(agreement=Lost())
    says = r"finalize = 'fake': a rank on which the plugin is not installed.*QWEN35_SGLANG_PLUGIN.*1 of 2 joined"
    with pytest.raises(UnavailableError, match=says) as caught:
        machine.warm_up()
    assert not isinstance(caught.value, RuntimeError), "SGLang would call that a failed capture"
    assert machine.fusion.attempts == 0


def test_a_rank_that_does_not_answer_is_a_line_in_the_log_for_one_that_fuses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = FusedMachine(finalize="auto", agreement=Lost())
    with caplog.at_level(logging.WARNING, "qwen35"):
        machine.warm_up()
        machine.warm_up()
    lines = [record.message for record in caplog.records if "not every rank says" in record.message]
    assert len(lines) == 1, "asked once"
    assert "the plugin is not installed" in lines[0]
