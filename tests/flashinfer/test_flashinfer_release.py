"""The report on the installed FlashInfer, and its functions' arguments: a renamed one fails here, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from qwen35.adapters._kernels.sources import missing_names
from qwen35.adapters.flashinfer import entries as flashinfer_entries
from qwen35.adapters.flashinfer import release
from qwen35.adapters.flashinfer.entries import GATED_DELTA_RULE, probe
from qwen35.adapters.sglang import entries as sglang_entries
from qwen35.adapters.triton import entries as triton_entries
from qwen35.domain.platform import Platform

HOPPER = Platform(device="cuda:0", device_name="H200", compute_capability=(9, 0), multiprocessors=132)
installed = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")


def in_a_fresh_process(code: str) -> dict[str, object]:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    answer: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return answer


@installed
@pytest.mark.row("I02")
def test_the_installed_sources_have_every_function_and_argument_that_we_pass() -> None:
    assert release.report().missing == ()


@installed
@pytest.mark.row("I02")
def test_the_installed_sources_have_the_shorter_decode_of_a_bfloat16_pool() -> None:
    (folder,) = importlib.util.find_spec("flashinfer").submodule_search_locations
    assert missing_names("flashinfer", Path(folder), [release.SHORTER]) == []


def test_a_function_is_taken_for_a_shorter_one_by_its_arguments() -> None:
    def one(A, b, scale=None):
        raise AssertionError

    assert release.takes(one, ("A", "b"))
    assert release.takes(one, ("A", "b", "scale"))
    assert not release.takes(one, ("A", "scale")), "b is needed"
    assert not release.takes(one, ("A", "b", "output")), "it writes no output of ours"


@installed
@pytest.mark.row("D26")
def test_the_report_names_versions() -> None:
    found = release.report().found
    assert set(found) >= {"flashinfer-python", "nvidia-cutlass-dsl", "triton"}
    assert all(found.values())


@installed
@pytest.mark.row("D00")
@pytest.mark.row("D26")
@pytest.mark.row("I03")
def test_the_probe_imports_no_kernel_package_and_leaves_the_environment_alone() -> None:
    answer = in_a_fresh_process("""
import json, os, sys
before = dict(os.environ)
from qwen35.adapters.flashinfer.entries import GATED_DELTA_RULE
from qwen35.domain.platform import Platform
cpu = GATED_DELTA_RULE.probe(Platform(device="cpu", device_name="CPU"))
old = GATED_DELTA_RULE.probe(Platform(device="cuda:0", device_name="A100", compute_capability=(8, 0)))
heavy = sorted({"torch", "triton", "flashinfer", "cutlass", "sglang"} & set(sys.modules))
print(json.dumps({"same": before == dict(os.environ), "heavy": heavy, "cpu": cpu.reasons, "old": old.reasons}))
""")
    assert answer["same"]
    assert answer["heavy"] == []
    assert answer["cpu"] == ["device requires cuda, got cpu"]
    assert answer["old"] == ["compute capability requires at least 9.0, got 8.0"]


@installed
@pytest.mark.row("D00")
def test_loading_adds_nothing_to_the_environment_but_what_is_declared() -> None:
    answer = in_a_fresh_process("""
import json, os
before = dict(os.environ)
from qwen35.adapters.flashinfer.release import DECLARED_ENVIRONMENT, load
kernels = load()
after = {k: v for k, v in os.environ.items() if k not in DECLARED_ENVIRONMENT}
taken = {name: getattr(kernels, name) is not None for name in ("decode", "mtp", "prefill")}
from flashinfer.utils import _get_cache_buf
buffer = _get_cache_buf("qwen35 asks for one", 8, __import__("torch").device("cpu"))
print(json.dumps({
    "same": {k: v for k, v in before.items() if k not in DECLARED_ENVIRONMENT} == after, "taken": taken,
    "workspaces": any(kept is buffer for kept in kernels.workspaces.values()),
}))
""")
    assert answer["same"]
    assert answer["taken"] == {"decode": True, "mtp": True, "prefill": True}
    assert answer["workspaces"], "a second stream's prefills need what FlashInfer keeps"


@pytest.mark.row("D26")
def test_a_lacking_package_is_a_reason_and_never_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not hasattr(f, "MAPPING")])
    for name in ("flashinfer", "cutlass", "tvm_ffi"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    support = probe(HOPPER)
    assert not support
    assert any(reason.startswith("unavailable: missing flashinfer") for reason in support.reasons), support.reasons


@pytest.mark.row("D26")
@pytest.mark.parametrize("name", ["cutlass", "flashinfer"])
def test_a_package_that_does_not_say_where_it_is_is_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As a module has it that a test or a vendor put into ``sys.modules``."""
    empty = ModuleType(name)
    assert empty.__spec__ is None
    monkeypatch.setitem(sys.modules, name, empty)
    assert name in release.report().missing
    assert any(f"missing {name}" in reason for reason in probe(HOPPER).reasons)


def test_the_triton_adapters_are_not_offered_where_triton_does_not_say_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert triton_entries.probe(HOPPER).reasons == ("triton is not installed",)


@pytest.mark.parametrize("kind", [flashinfer_entries, sglang_entries, triton_entries])
def test_an_older_gpu_than_stated_is_refused_by_the_number_stated(kind: ModuleType) -> None:
    major, minor = kind.MIN_COMPUTE_CAPABILITY
    old = replace(HOPPER, compute_capability=(major - 1, 9))
    reasons = "; ".join(kind.probe(old).reasons)
    assert f"compute capability requires at least {major}.{minor}, got {major - 1}.9" in reasons
    at_least = kind.probe(replace(HOPPER, compute_capability=(major, minor))).reasons
    assert not [reason for reason in at_least if "compute capability" in reason]


def write(folder: Path, **changes: tuple[str, ...]) -> Path:
    """Sources that define what we call, with some functions' arguments changed."""
    (folder / "gdn_kernels").mkdir()
    files: dict[str, list[str]] = {}
    for name, (module, function, arguments) in release.REQUIRED.items():
        taken = ", ".join(changes.get(name, arguments))
        files.setdefault(module, []).append(f"def {function}({taken}):\n    pass\n")
    for module, functions in files.items():
        folder.joinpath(*module.split(".")).with_suffix(".py").write_text("\n".join(functions))
    return folder


def test_sources_with_everything_miss_nothing(tmp_path: Path) -> None:
    assert missing_names("flashinfer", write(tmp_path), release.REQUIRED.values()) == []


@pytest.mark.row("I02")
def test_a_renamed_argument_a_lost_function_and_a_broken_file_are_named(tmp_path: Path) -> None:
    arguments = tuple(a for a in release.REQUIRED["prefill"][2] if a != "use_cp")
    folder = write(tmp_path, prefill=(*arguments, "context_parallel"))
    (folder / "gdn_kernels" / "gdn_decode_bf16_state.py").write_text("x = 1\n")
    (folder / "gdn_decode.py").write_text("def (\n")
    missing = missing_names("flashinfer", folder, release.REQUIRED.values())
    assert "argument 'use_cp' of flashinfer.gdn_prefill.chunk_gated_delta_rule" in missing
    assert "flashinfer.gdn_kernels.gdn_decode_bf16_state.gated_delta_rule_mtp" in missing
    assert "flashinfer.gdn_decode (SyntaxError)" in missing


def test_the_entry_says_what_it_is() -> None:
    assert (GATED_DELTA_RULE.port, GATED_DELTA_RULE.name) == ("gated_delta_rule", "flashinfer")
