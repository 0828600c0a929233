"""Models and launches that a chosen adapter refuses or that are not routed: each is one documented line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from seam_machine import CHANNELS, Machine, start
from test_faults import lines, scheduler_starts
from test_gdn_calls import ALL, own
from typer.testing import CliRunner

from fakes import FakeGatedDeltaRule, fake_entry
from qwen35 import sglang_plugin
from qwen35.cli.main import app
from qwen35.container import build

NAMES = dict.fromkeys(ALL, "fake")
REASON = "head ratio requires 1, got 2"


def start_refused(*, strict: bool = False) -> sglang_plugin.Running:
    """The plugin with an adapter that refuses every model."""
    fake = FakeGatedDeltaRule(0.0, (REASON,))
    container = build(device="cpu", conv="reference", adapters=[fake_entry("fake", fake)], **NAMES)
    return start(container, sglang_strict=strict, **NAMES)


def test_a_model_that_the_chosen_adapter_refuses_is_served_by_sglang(caplog: pytest.LogCaptureFixture) -> None:
    one = start_refused()
    machine = Machine()
    (line,) = lines(caplog)
    assert REASON in line
    assert line.endswith("; the calls in question go to SGLang's own kernels")
    counters = one.container.counters()
    assert counters.total("plans_refused", port="gated_delta_rule", adapter="fake,fake,fake", reason=REASON) == 1
    kernel = own(machine)
    packed, a, b = machine.tokens(2)
    machine.metadata([3, 6], [0, 1, 2])
    out = machine.backend.forward_decode(machine.layer, machine.batch("DECODE", [1, 1]), packed, a, b)
    assert out == f"packed (2, {CHANNELS})"
    assert kernel.calls == ["packed_decode"]
    assert counters.total("calls", adapter="engine:ChunkKernel", phase="decode") == 1
    assert counters.total("calls", adapter="fake") == 0


def test_strict_ends_the_launch_of_such_a_model_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[sglang_plugin.Running] = []

    def engine() -> None:
        started.append(start_refused(strict=True))
        Machine()

    with pytest.raises(SystemExit) as caught:
        scheduler_starts(monkeypatch, engine)
    assert REASON in str(caught.value)
    assert lines(caplog) == [str(caught.value)]
    assert "\n" not in str(caught.value)
    assert started[0].container.counters().total("plans_refused") == 0


def builds(family: str) -> None:
    """What an engine of ``family`` with GDN layers makes."""
    Machine(family=family)


@pytest.mark.parametrize(
    ("family", "phase", "reason"),
    [("qwen3_next", "extend", "qwen3_next is not Qwen3.5"),
     (None, "decode", "this model has no Gated DeltaNet layers of Qwen3.5")],
    ids=["another family's GDN layers", "no GDN layers"],
)  # fmt: skip
def test_strict_and_a_choice_end_the_launch_of_a_model_that_is_not_qwen35(
    family: str | None, phase: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QWEN35_SGLANG_STRICT", "1")
    monkeypatch.setenv(f"QWEN35_GDN_{phase.upper()}", "reference")
    with pytest.raises(SystemExit) as caught:
        scheduler_starts(monkeypatch, *([] if family is None else [lambda: builds(family)]))
    assert str(caught.value) == f"qwen35: {phase} by reference: {reason} (QWEN35_SGLANG_STRICT)"
    assert lines(caplog) == [str(caught.value)]


@pytest.mark.parametrize("family", ["qwen3_next", None])
@pytest.mark.parametrize(
    "names", [{"QWEN35_SGLANG_STRICT": "1"}, {"QWEN35_GDN_DECODE": "reference"}], ids=["no choice", "not strict"]
)
def test_otherwise_such_a_model_is_served_by_sglang(
    names: dict[str, str], family: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    scheduler_starts(monkeypatch, *([] if family is None else [lambda: builds(family)]))
    assert sglang_plugin.running() is not None
    assert "decode: SGLang's own kernel, uncounted: " in caplog.text
    assert "the launch ends" not in caplog.text


def test_strict_does_not_end_the_launch_of_a_model_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_SGLANG_STRICT", "1")
    monkeypatch.setenv("QWEN35_GDN_DECODE", "reference")
    scheduler_starts(monkeypatch, lambda: builds("qwen3_5_moe_text"))
    one = sglang_plugin.running()
    assert one is not None
    assert one.gdn.backends == 1


@pytest.mark.parametrize("family", ["qwen3_next", "llama"])
@pytest.mark.parametrize(
    ("variable", "line"),
    [
        ("QWEN35_GDN_VERIFY", "verify: reference (QWEN35_GDN_VERIFY), which cannot serve here: {} is not Qwen3.5; {}"),
        ("QWEN35_FINALIZE", "fusion: reference (QWEN35_FINALIZE), which cannot serve here: "
                            "model type requires qwen3_5_moe_text, got {}; {}"),
    ],
)  # fmt: skip
def test_explain_says_of_such_a_model_whether_the_launch_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, variable: str, line: str
) -> None:
    ends = "the launch ends (QWEN35_SGLANG_STRICT)"
    monkeypatch.setenv("QWEN35_DEVICE", "cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    arguments = ["sglang", "explain", "--model", str(tmp_path)]
    for setting, value, code in ((variable, "reference", 0), ("QWEN35_SGLANG_STRICT", "1", 1), (variable, "auto", 0)):
        monkeypatch.setenv(setting, value)
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code, result.output
        assert (f"  {line.format(family, ends)}\n" in result.output) is (code == 1), result.output
        assert (ends in result.output) is (code == 1)


def test_explain_names_no_fallback_for_a_model_that_nothing_of_ours_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DEVICE=cpu", "GDN_DECODE=reference", "GDN_FALLBACK=reference64", "SGLANG_STRICT=1"):
        monkeypatch.setenv(*f"QWEN35_{name}".split("="))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next"}')
    assert "QWEN35_GDN_FALLBACK) serves" not in sglang_plugin.explain(str(tmp_path))


def test_another_family_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    one = start(**ALL)
    for _ in range(2):
        Machine(family="qwen3_next")
    said = "qwen3_next is not Qwen3.5: its GDN layers keep SGLang's own kernels, uncounted"
    assert one.gdn.notes == [said]
    assert lines(caplog) == [f"qwen35: {said}"]


@pytest.mark.parametrize("kept", ["replayssm_d", "replayssm_rawv", None])
@pytest.mark.parametrize("verify", [True, False], ids=["routed", "not routed"])
def test_a_verify_that_passes_beside_the_dispatcher_is_said(
    kept: str | None, verify: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.mem_cache.memory_pool import MambaPool

    names = ALL if verify else {name: chosen for name, chosen in ALL.items() if name != "gdn_verify"}
    one = start(**names)
    if kept is not None:
        plain = MambaPool.SpeculativeState.__init__

        def with_kept_inputs(self: object, **fields: object) -> None:
            plain(self, **fields, **{kept: torch.zeros(1)})

        monkeypatch.setattr(MambaPool.SpeculativeState, "__init__", with_kept_inputs)
    machine = Machine(draft=2)
    said = "verify is not routed: ReplaySSM verifies beside the dispatcher"
    assert one.gdn.notes == ([said] if kept is not None and verify else [])
    assert lines(caplog) == [f"qwen35: {note}" for note in one.gdn.notes]
    assert type(machine.dispatcher.decode_kernel).__module__.startswith("qwen35."), "decode is routed all the same"
