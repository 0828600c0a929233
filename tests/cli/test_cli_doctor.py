"""``qwen35 doctor`` and what every command shares: help, version, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import qwen35
from fakes import FakeGatedDeltaRule, fake_entry
from qwen35.cli.doctor import AdapterFacts, Report
from qwen35.cli.doctor_choices import BuildFacts, ChoiceFacts, choices
from qwen35.domain.errors import Qwen35Error
from qwen35.domain.platform import Platform
from qwen35.services.registry import AdapterRegistry
from qwen35.settings import load_settings


def test_json_has_the_documented_shape(run: Any) -> None:
    result = run("doctor", "--json", "--device", "cpu")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report.keys() == Report.__annotations__.keys()
    assert report["schema"] == 2
    assert report["device"]["device"] == "cpu"
    assert report["settings"]["gdn_decode"] == "auto"
    assert report["versions"]["torch"]
    assert {"gated_delta_rule", "short_convolution"} <= report["ports"].keys()
    for adapters in report["ports"].values():
        for facts in adapters:
            assert facts.keys() == AdapterFacts.__annotations__.keys()
            assert facts["usable"] != bool(facts["reasons"]), f"either usable or a reason: {facts}"
    for choice in report["choices"]:
        assert choice.keys() == ChoiceFacts.__annotations__.keys()
        assert choice["reason"]
    assert [c["setting"] for c in report["choices"]] == [
        "gdn_decode", "gdn_extend", "prefill_split", "gdn_verify", "gdn_fallback", "gdn_shadow", "conv", "finalize",
    ]  # fmt: skip
    assert report["build"].keys() == BuildFacts.__annotations__.keys()
    assert report["build"]["ok"]


def test_each_kind_of_adapter_is_summed_up_in_words_of_its_port(run: Any) -> None:
    ports = json.loads(run("doctor", "--json", "--device", "cpu").stdout)["ports"]
    offers = {(port, facts["name"]): facts["offers"] for port, adapters in ports.items() for facts in adapters}
    assert offers["gated_delta_rule", "reference"] == ["all phases"]
    assert offers["finalize_fusion", "reference"] == ["any number of ranks", "bfloat16", "float32"]


@pytest.mark.parametrize(
    ("setting", "value", "builds", "said"),
    [
        ("gdn_fallback", "reference", True, "serves what the chosen adapter refuses"),
        ("gdn_fallback", "refrence", False, "build() would fail: unknown gated_delta_rule adapter 'refrence'"),
        ("gdn_fallback", "triton", False, "device requires cuda"),
        ("gdn_decode", "Auto", False, "Did you mean 'auto'?"),
        ("gdn_shadow", "refrence64:0.1", False, "build() would fail: "),
        ("finalize", "off", True, "off"),
        ("finalize", "reference", True, "the first usable here"),
        ("finalize", "reference", True, "would not be fused: tensor parallelism requires at least 2 ranks, got 1"),
        ("finalize", "off", True, "would not be fused: fusion requires the finalize setting, which is off"),
        ("finalize", "flashinfer_ipc", True, "prepare() among ranks would fail"),
        ("finalize", "refrence", False, "build() would fail: unknown finalize_fusion adapter"),
        ("conv", "refrence", False, "build() would fail: unknown short_convolution adapter"),
    ],
)
def test_doctor_says_of_every_setting_what_build_does(
    run: Any, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, builds: bool, said: str
) -> None:
    monkeypatch.setenv(f"QWEN35_{setting.upper()}", value)
    result = run("doctor", "--json", "--device", "cpu", env={"TRITON_INTERPRET": "0"})
    assert result.exit_code == (0 if builds else 1), result.output
    report = json.loads(result.stdout)
    (choice,) = [c for c in report["choices"] if c["setting"] == setting]
    assert choice["requested"] == value
    assert said in choice["reason"]
    assert choice["ok"] == (choice["adapter"] is not None or value == "off")
    assert report["build"]["ok"] is builds
    assert bool(report["build"]["reason"]) is not builds
    if builds:
        qwen35.build(device="cpu")
        return
    with pytest.raises(Qwen35Error) as refused:
        qwen35.build(device="cpu")
    assert str(refused.value) == report["build"]["reason"]
    for reason in (choice["reason"], report["build"]["reason"]):
        assert reason.count(f"(environment variable QWEN35_{setting.upper()})") == 1, reason


@pytest.mark.parametrize(
    ("env", "adapter", "said"),
    [
        ({}, None, "concerns the extend of flashinfer alone, which reference serves here"),
        ({"QWEN35_GDN_EXTEND": "refrence"}, None, "which nobody serves here"),
        ({"QWEN35_GDN_FALLBACK": "flashinfer"}, "flashinfer", "split over the sequence where few long sequences"),
        ({"QWEN35_GDN_EXTEND": "flashinfer"}, "flashinfer", "split over the sequence where few long sequences"),
        (
            {"QWEN35_GDN_EXTEND": "flashinfer", "QWEN35_PREFILL_SPLIT": "on"},
            "flashinfer",
            "with checkpoints is refused",
        ),
        (
            {"QWEN35_GDN_EXTEND": "flashinfer", "QWEN35_PREFILL_SPLIT": "off"},
            "flashinfer",
            "every extend takes one pass",
        ),
    ],
)
def test_doctor_says_which_prefill_kernel_runs_where_there_are_two(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], adapter: str | None, said: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    registry = AdapterRegistry(
        Platform(device="cpu", device_name="CPU"), extra=[fake_entry("flashinfer", FakeGatedDeltaRule(1.0))]
    )
    (choice,) = [c for c in choices(registry, load_settings()) if c["setting"] == "prefill_split"]
    assert choice["requested"] == env.get("QWEN35_PREFILL_SPLIT", "auto")
    assert choice["adapter"] == adapter
    assert choice["ok"]
    assert said in choice["reason"]


def test_choice_is_explained_with_why_each_other_was_not_taken(run: Any) -> None:
    report = json.loads(run("doctor", "--json", "--device", "cpu", env={"TRITON_INTERPRET": "0"}).stdout)
    decode = report["choices"][0]
    usable = [f["name"] for f in report["ports"]["gated_delta_rule"] if f["usable"] and not f["deviations"]]
    assert decode["adapter"] == usable[0]
    better = [f["name"] for f in report["ports"]["gated_delta_rule"]]
    better = better[: better.index(decode["adapter"])]
    assert list(decode["rejected"]) == better
    assert all(decode["rejected"][name] for name in better)


def test_table_says_what_json_says(run: Any) -> None:
    result = run("doctor", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for word in ("gated_delta_rule", "short_convolution", "reference64", "what the container would choose", "torch"):
        assert word in result.output


@pytest.mark.usefixtures("third_party")
def test_adapters_of_other_packages_are_listed_the_unloadable_one_with_its_error(run: Any) -> None:
    report = json.loads(run("doctor", "--json", "--device", "cpu").stdout)
    by_name = {facts["name"]: facts for facts in report["ports"]["gated_delta_rule"]}
    assert by_name["plain"]["usable"]
    assert by_name["modest"]["deviations"] == {"finite": "overflows past a = 40"}
    assert not by_name["gone"]["usable"]
    assert "NOWHERE" in by_name["gone"]["reasons"][0]


def test_a_named_adapter_that_cannot_serve_is_a_choice_with_a_reason_not_a_crash(run: Any) -> None:
    result = run("doctor", "--json", "--device", "cpu", env={"QWEN35_GDN_EXTEND": "refrence"})
    assert result.exit_code == 1, result.output
    choices = {c["setting"]: c for c in json.loads(result.stdout)["choices"]}
    assert choices["gdn_extend"]["adapter"] is None
    assert "Did you mean 'reference'?" in choices["gdn_extend"]["reason"]
    assert choices["gdn_decode"]["adapter"] is not None


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (("swap", "--gdn", "refrence", "--device", "cpu"), {}, "Did you mean 'reference'?"),
        (("conform", "refrence", "--device", "cpu"), {}, "Did you mean 'reference'?"),
        (("conform", "reference", "--port", "short_convolutoin"), {}, "Did you mean 'short_convolution'?"),
        (("conform", "reference", "--clause", "paddin"), {}, "Did you mean 'padding'?"),
        (("swap", "--geometry", "35B-A3"), {}, "Did you mean '35B-A3B'?"),
        (("swap", "--tp", "3"), {}, "cannot be divided over 3"),
        (("swap", "--decode-batches", "1,x"), {}, "positive integers, got 'x'"),
        (("swap", "--prefill", "0x5"), {}, "positive integers, got '0'"),
        (("swap", "--verify", "8"), {}, "BATCHxDRAFT"),
        (("swap", "--decode-batches", "", "--prefill", "", "--verify", ""), {}, "nothing to measure"),
        (("swap", "--state-dtype", "float23"), {}, "float32"),
        (("doctor", "--device", "tpu"), {}, "'tpu'"),
        (("doctor",), {"QWEN35_GDN_DECOED": "x"}, "QWEN35_GDN_DECODE"),
        (("generate", "/nowhere", "--token-ids", "1"), {}, "config.json"),
        (("generate", "/nowhere"), {}, "either --prompt TEXT or --token-ids"),
        (("generate", "/nowhere", "--token-ids", "1", "--prompt", "x"), {}, "either --prompt TEXT or --token-ids"),
        (("generate", "/nowhere", "--token-ids", "1,b"), {}, "got 'b'"),
        (("generate", "/nowhere", "--token-ids", "1,²"), {}, "got '²'"),
        (("generate", "/nowhere", "--token-ids", "٣"), {}, "got '٣'"),
        (("generate", "/nowhere", "--token-ids", "9" * 5000), {}, "must be token ids (0 or more) joined by commas"),
        (("generate", "/nowhere", "--token-ids", "1", "--logits", "none/a.safetensors"), {}, "--logits"),
        (("generate", "/nowhere", "--token-ids", "1", "--logits", "."), {}, "--logits must be a file, got the folder"),
        (("swap", "--decode-batches", "²"), {}, "positive integers, got '²'"),
    ],
)
def test_an_error_of_ours_is_one_line_and_exit_code_2(
    run: Any, words: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    result = run(*words, env=env)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_a_refused_experiment_leaves_no_folder_behind(run: Any, tmp_path: Any) -> None:
    assert run("swap", "--gdn", "refrence", "--device", "cpu").exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_help_imports_no_framework() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from qwen35.cli.main import app\n"
        "for name in ('', 'doctor', 'swap', 'generate', 'conform', 'demo', 'sglang', 'sglang explain'):\n"
        "    result = CliRunner().invoke(app, [*name.split(), '--help'])\n"
        "    assert result.exit_code == 0, result.output\n"
        "heavy = {'torch', 'triton', 'transformers', 'matplotlib', 'hypothesis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_module_and_version() -> None:
    done = subprocess.run([sys.executable, "-m", "qwen35", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == "qwen35 0.1.0\n"
