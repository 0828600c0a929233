"""Our counters are among what SGLang's endpoint gathers from its processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_faults import lines, scheduler_starts

SCHEDULER = """
from qwen35.services.counters import Counters
from qwen35.adapters.sglang.seam_metrics import PrometheusMirror, metrics_wanted
assert metrics_wanted()
counters = Counters()
mirror = PrometheusMirror(counters, period=60)
mirror.start()
for _ in range(3):
    counters.add("calls", port="gated_delta_rule", phase="decode", adapter="triton", mode="captured")
mirror.copy()
counters.add("calls", port="gated_delta_rule", phase="decode", adapter="triton", mode="captured")
counters.add("fallbacks", port="gated_delta_rule", phase="extend", adapter="engine:TritonGDNKernel",
             instead_of="flashinfer", mode="eager", reason="extend requires X, got Y")
mirror.stop()
mirror.stop()
"""


#: A process for each of (tensor rank, pipeline rank, replica), which counts replica + 1 calls and is then gone.
LAUNCH = """
import os, sys, time
from pathlib import Path
import pytest
import sglang.srt.managers.scheduler
from sglang.srt.runtime_context import get_context
from seam_machine import installed_seam
from test_faults import scheduler_starts
from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
get_context().override_server_args().install()
seam.differences(installed_seam().targets)  # imports them once for all
os.environ["QWEN35_GDN_DECODE"] = "reference"
def serve(tensor, pipeline, replica):
    with pytest.MonkeyPatch.context() as patch:
        scheduler_starts(patch, tp_rank=tensor, pp_rank=pipeline, dp_rank=replica)
    for _ in range((replica or 0) + 1):
        sglang_plugin.running().container.counters().add("calls", port="gated_delta_rule", adapter="reference")
    file, until = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]) / f"counter_{os.getpid()}.db", time.monotonic() + 20
    counts = tensor == pipeline == 0
    while counts and not (file.exists() and b"qwen35_calls" in file.read_bytes()) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0 if counts else 3)
    os._exit(0)
for place in eval(sys.argv[1]):
    if not os.fork():
        serve(*place)
while True:
    try:
        assert os.wait()[1] == 0
    except ChildProcessError:
        break
"""


def gathered(directory: Path) -> str:
    """What SGLang's own HTTP route answers when it is scraped."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from sglang.srt.utils import add_prometheus_middleware

    app = FastAPI()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(directory))
        add_prometheus_middleware(app)
        answer = TestClient(app).get("/metrics")
    assert answer.status_code == 200
    return str(answer.text)


def launched(directory: Path, *places: tuple[int, int, int | None]) -> dict[str, float]:
    """Calls by replica, as the endpoint has them once schedulers at these ``places`` ran side by side."""
    tests = Path(__file__).parent
    environment = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(directory), "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent),
        *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", LAUNCH, repr(places)], env=environment, check=True, timeout=300)
    found = re.findall(r'^qwen35_calls_total\{.*dp_rank="(.*?)".*\} (.*)$', gathered(directory), re.MULTILINE)
    assert len(found) == len(dict(found)), found
    return {replica: float(value) for replica, value in found}


def test_one_process_of_each_replica_exports_while_it_runs(tmp_path: Path) -> None:
    replicas = [(tensor, pipeline, replica) for replica in (0, 1) for tensor, pipeline in ((0, 0), (1, 0), (0, 1))]
    assert launched(tmp_path, (0, 0, None), *replicas) == {"": 1.0, "0": 1.0, "1": 2.0}


@pytest.mark.parametrize(
    ("ranks", "speaks"),
    [
        ({}, True), ({"dp_rank": 0}, True), ({"dp_rank": 1}, False), ({"tp_rank": 1}, False), ({"pp_rank": 1}, False),
        ({"tp_rank": 1, "dp_rank": 0}, False), ({"tp_rank": 2, "dp_rank": 1, "attn_dp_rank": 1}, False),
        ({"dp_rank": 0, "attn_dp_rank": 0}, True),
    ],
)  # fmt: skip
def test_one_process_of_a_launch_says_what_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ranks: dict[str, int], speaks: bool
) -> None:
    scheduler_starts(monkeypatch, **ranks)  # type: ignore[arg-type]
    assert bool(lines(caplog)) is speaks


def test_counters_reach_the_endpoint_of_another_process(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SCHEDULER], env=environment, check=True)
    text = gathered(tmp_path)
    calls = [line for line in text.splitlines() if line.startswith("qwen35_calls_total{")]
    assert len(calls) == 1
    assert calls[0].endswith(" 4.0")
    assert 'adapter="triton"' in calls[0]
    assert 'mode="captured"' in calls[0]
    assert 'reason="extend requires X, got Y"' in text


def test_the_module_does_not_import_prometheus_by_itself() -> None:
    code = "import sys, qwen35.sglang_plugin; assert 'prometheus_client' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
