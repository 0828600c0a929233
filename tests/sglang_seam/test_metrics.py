"""Our counters are among what SGLang's endpoint gathers from its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_counters_reach_the_endpoint_of_another_process(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SCHEDULER], env=environment, check=True)
    # What SGLang's HTTP process does when it is scraped.
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    text = generate_latest(registry).decode()
    calls = [line for line in text.splitlines() if line.startswith("qwen35_calls_total{")]
    assert len(calls) == 1
    assert calls[0].endswith(" 4.0")
    assert 'adapter="triton"' in calls[0]
    assert 'mode="captured"' in calls[0]
    assert 'reason="extend requires X, got Y"' in text


def test_the_module_does_not_import_prometheus_by_itself() -> None:
    code = "import sys, qwen35.sglang_plugin; assert 'prometheus_client' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
