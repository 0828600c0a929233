"""A machine without FlashInfer: defaults go on, and a setting that needs it ends in one line that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: A process of SGLang that cannot import FlashInfer, up to where SGLang loads its plugins.
HIDDEN = """
import sys
sys.modules["flashinfer"] = None  # as Python marks a module that must not be imported
import sglang.srt.managers.scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context
get_context().override_server_args().install()
load_plugins()
print("plugins loaded", flush=True)
"""
#: A scheduler of it that serves a decode step.
SERVES = """
import pytest
import sglang.srt.layers.attention.linear.gdn_backend as gdn
from seam_machine import Machine, plain_convolution
from test_faults import scheduler_starts
from test_gdn_calls import own
from qwen35 import sglang_plugin
with pytest.MonkeyPatch.context() as patch:
    scheduler_starts(patch)
gdn.causal_conv1d_update = plain_convolution
machine = Machine()
own(machine)
packed, a, b = machine.tokens(2)
machine.metadata([3, 6], [0, 1, 2])
machine.backend.forward_decode(machine.layer, machine.batch("DECODE", [1, 1]), packed, a, b)
counters = sglang_plugin.running().container.counters()
print("served", counters.total("calls", phase="decode", adapter="engine:ChunkKernel"), flush=True)
"""
REMEDY = "pip install 'qwen35[flashinfer]'"


def without_flashinfer(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).parent
    paths = [str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"QWEN35_DEVICE": "cpu", "PYTHONPATH": os.pathsep.join(paths)} | variables
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HIDDEN + code], env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def test_defaults_go_on_without_flashinfer() -> None:
    done = without_flashinfer(SERVES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "served 1", done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [("QWEN35_GDN_DECODE", "flashinfer"), ("QWEN35_FINALIZE", "flashinfer_ipc")],
)
def test_a_setting_that_needs_flashinfer_ends_in_one_line_that_says_what_to_do(variable: str, value: str) -> None:
    done = without_flashinfer("", **{variable: value})
    assert done.returncode == 1, done.stderr
    assert "plugins loaded" not in done.stdout
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if "qwen35" in line]
    assert len(said) == 1, done.stderr
    assert f"adapter '{value}' (environment variable {variable}): " in said[0]
    assert "missing flashinfer" in said[0]
    assert said[0].count(REMEDY) == 1
