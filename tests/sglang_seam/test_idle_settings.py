"""Settings that are set and do nothing inside SGLang are each a line of ``explain`` and of the log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from seam_machine import Machine, start

from fakes import FakeGatedDeltaRule, fake_entry
from qwen35 import sglang_plugin
from qwen35.adapters.sglang.seam_choices import IDLE, idle_lines
from qwen35.container import build
from qwen35.domain.capabilities import Phase
from qwen35.settings import ENVIRONMENT_PREFIX, load_settings

NOTHING = "does nothing inside SGLang"
IDLE_WITHOUT_A_PHASE = {
    "gdn_fallback": "QWEN35_GDN_FALLBACK = reference does nothing inside SGLang: it needs a phase that an adapter of "
    "ours serves",
    "checked": "QWEN35_CHECKED = True does nothing inside SGLang: it needs a phase or a fusion that an adapter of ours "
    "serves",
    "prefill_split": "QWEN35_PREFILL_SPLIT = on does nothing inside SGLang: it needs extend to be routed, and served "
    "or repeated by flashinfer",
}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_DEVICE", "cpu")


def idle(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if NOTHING in line]


def set_all_three(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GDN_FALLBACK", "reference"), ("CHECKED", "true"), ("PREFILL_SPLIT", "on")):
        monkeypatch.setenv(ENVIRONMENT_PREFIX + name, value)


@pytest.mark.parametrize(("name", "value"), [("conv", "triton"), ("dtype", "float32"), ("state_dtype", "bfloat16")])
def test_a_setting_that_does_nothing_inside_sglang_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    variable = ENVIRONMENT_PREFIX + name.upper()
    assert variable not in sglang_plugin.explain()
    monkeypatch.setenv(variable, value)
    sglang_plugin.register()
    assert f"{variable} = {value} does nothing inside SGLang: {IDLE[name]}" in sglang_plugin.explain()


def test_the_convolution_stays_sglangs_whatever_is_set() -> None:
    one = start(conv="triton", gdn_decode="reference")
    Machine()
    assert one.container.settings().conv == "reference", "the container's own, which no call of SGLang reaches"


def test_settings_of_routed_phases_say_that_none_is_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert idle(sglang_plugin.explain()) == []
    set_all_three(monkeypatch)
    assert idle(sglang_plugin.explain()) == list(IDLE_WITHOUT_A_PHASE.values())


def test_settings_of_routed_phases_are_silent_where_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all_three(monkeypatch)
    monkeypatch.setenv("QWEN35_GDN_DECODE", "reference64")
    assert idle(sglang_plugin.explain()) == [IDLE_WITHOUT_A_PHASE["prefill_split"]]


@pytest.mark.parametrize(
    ("config", "checks"),
    [({"model_type": "qwen3_5_moe_text"}, True), ({"model_type": "qwen3_next"}, False)],
    ids=["fused", "not fused"],
)
def test_checked_mode_concerns_the_fusion_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, str], checks: bool
) -> None:
    set_all_three(monkeypatch)
    monkeypatch.setenv("QWEN35_FINALIZE", "reference")
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = idle(sglang_plugin.explain(str(tmp_path)))
    assert (IDLE_WITHOUT_A_PHASE["checked"] not in said) is checks
    assert IDLE_WITHOUT_A_PHASE["gdn_fallback"] in said


def test_of_a_model_that_is_not_routed_they_all_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all_three(monkeypatch)
    monkeypatch.setenv("QWEN35_GDN_EXTEND", "reference")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert idle(sglang_plugin.explain(str(tmp_path))) == list(IDLE_WITHOUT_A_PHASE.values())


@pytest.mark.parametrize("finalize", ["auto", "reference"])
def test_an_engine_that_routes_nothing_logs_them(finalize: str) -> None:
    one = start(gdn_extend="reference")
    settings = load_settings(
        None, device="cpu", gdn_extend="reference", gdn_fallback="reference", checked=True, prefill_split="on",
        finalize=finalize,
    )  # fmt: skip
    sglang_plugin.announce(settings, one)
    assert idle(one.announced[0]) == list(IDLE_WITHOUT_A_PHASE.values())


@pytest.mark.parametrize(
    ("extend", "more", "splits"),
    [
        ("flashinfer", {}, True),
        ("triton", {}, False),
        ("triton", {"gdn_fallback": "flashinfer"}, True),
        ("triton", {"gdn_shadow": "flashinfer:0.5"}, True),
        ("triton", {"gdn_shadow": "reference:0.5"}, False),
        (None, {"gdn_fallback": "flashinfer", "gdn_shadow": "flashinfer:0.5"}, False),
    ],
)
def test_the_prefill_split_concerns_extends_of_flashinfers_adapter(
    extend: str | None, more: dict[str, str], splits: bool
) -> None:
    routes = {Phase.DECODE: "flashinfer"} | ({} if extend is None else {Phase.EXTEND: extend})
    said = idle_lines(load_settings(None, prefill_split="off", **more), routes, fuses=False)
    line = IDLE_WITHOUT_A_PHASE["prefill_split"].replace("= on", "= off")
    assert (line in said) is not splits
    assert "PREFILL_SPLIT" not in str(idle_lines(load_settings(None, **more), routes, fuses=False)), "it is not set"


def test_an_engine_that_routes_extend_to_flashinfer_does_not_log_the_split() -> None:
    names = {"gdn_extend": "flashinfer"}
    fake = fake_entry("flashinfer", FakeGatedDeltaRule(1.0))
    parts = {"gdn_decode": "flashinfer", "gdn_verify": "flashinfer", "conv": "reference"}
    one = start(build(device="cpu", adapters=[fake], **names, **parts), **names)
    Machine()
    settings = load_settings(None, device="cpu", prefill_split="on", checked=True, **names)
    sglang_plugin.announce(settings, one)
    assert idle(one.announced[0]) == []


# Settings whose adapter is chosen already, or has nothing to serve

SAME = "QWEN35_GDN_FALLBACK = reference does nothing inside SGLang: it is the adapter of every routed phase itself"
REFUSED = "what a chosen adapter refuses: "


@pytest.mark.parametrize(("extend", "same"), [("reference", True), ("auto", True), ("reference64", False)])
def test_a_fallback_that_is_every_phases_own_adapter_says_so(
    monkeypatch: pytest.MonkeyPatch, extend: str, same: bool
) -> None:
    for name, value in (("DECODE", "reference"), ("EXTEND", extend), ("FALLBACK", "reference")):
        monkeypatch.setenv(f"{ENVIRONMENT_PREFIX}GDN_{name}", value)
    text = sglang_plugin.explain()
    assert idle(text) == ([SAME] if same else [])
    (refused,) = [line.strip() for line in text.splitlines() if REFUSED in line]
    then = "SGLang's own kernel, counted with the reason"
    assert refused == REFUSED + ("" if same else "reference (QWEN35_GDN_FALLBACK), then ") + then


@pytest.mark.parametrize(
    ("phases", "itself"),
    [
        ({"gdn_decode": "reference", "gdn_extend": "reference"}, "decode, extend"),
        ({"gdn_decode": "reference64", "gdn_extend": "reference"}, "extend"),
        ({"gdn_decode": "reference64"}, None),
    ],
)
def test_a_shadow_of_the_adapter_that_serves_is_said_to_be_compared_with_itself(
    phases: dict[str, str], itself: str | None
) -> None:
    one = start(**phases)
    Machine()
    sglang_plugin.announce(load_settings(None, device="cpu", gdn_shadow="reference:0.5", **phases), one)
    (line,) = [line.strip() for line in one.announced[0].splitlines() if "shadow: " in line]
    what = "shadow: reference repeats one eager call in 2 of each phase (QWEN35_GDN_SHADOW)"
    assert line == what + ("" if itself is None else f"; it serves {itself} too, and is compared with itself there")


def announced_verify(algorithm: str | None, **names: str) -> str:
    """What an engine with that speculative algorithm says when it stands."""
    from sglang.srt.runtime_context import get_spec

    one = start(**names)
    with get_spec().override(speculative_algorithm=algorithm):
        Machine(draft=0 if algorithm is None else 2)
        sglang_plugin.announce(load_settings(None, device="cpu", **names), one)
    return one.announced[0]


VERIFY_ALONE = {"gdn_verify": "reference", "gdn_fallback": "reference64"}
UNDRAFTED = "verify: no calls: this launch has no speculative decoding; reference (QWEN35_GDN_VERIFY) serves nothing"
NEEDS_A_PHASE = IDLE_WITHOUT_A_PHASE["gdn_fallback"].replace("= reference", "= reference64")


def test_an_adapter_for_verify_says_that_there_is_nothing_to_verify() -> None:
    text = announced_verify(None, **VERIFY_ALONE)
    assert UNDRAFTED in text
    assert idle(text) == [NEEDS_A_PHASE]
    assert REFUSED not in text
    assert "shadow: none" in announced_verify(None, gdn_verify="reference", gdn_shadow="reference:0.5")
    assert "verify: SGLang's own kernel, counted (QWEN35_GDN_VERIFY is not set)" in announced_verify(None)


def test_an_adapter_for_verify_is_silent_where_there_are_drafts() -> None:
    text = announced_verify("NGRAM", **VERIFY_ALONE)
    assert "verify: reference (QWEN35_GDN_VERIFY)\n" in text
    assert idle(text) == []
    assert f"{REFUSED}reference64 (QWEN35_GDN_FALLBACK), then" in text


def test_before_a_launch_verify_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35_GDN_VERIFY", "reference")
    text = sglang_plugin.explain()
    assert "verify: reference (QWEN35_GDN_VERIFY), where the launch has speculative decoding\n" in text
    assert REFUSED in text, "it may have"


def test_strict_ends_no_launch_for_an_adapter_that_has_nothing_to_verify() -> None:
    assert UNDRAFTED in announced_verify(None, gdn_verify="reference", sglang_strict="true")
