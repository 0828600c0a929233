"""What a benchmark brings into an engine is found there as a third party's would be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_extras import bring_extras
from engine_wrong import ForgetfulGatedDeltaRule, RightGatedDeltaRule
from qwen35.adapters.reference.gated_delta_rule import ReferenceGatedDeltaRule
from qwen35.container import build
from qwen35.domain.capabilities import Phase
from qwen35.ports.gated_delta_rule import DecodeCall, LogGates

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENGINE = """
import json
import sglang.srt.managers.scheduler
from sglang.srt.layers.attention.linear.gdn_backend import GDNKernelDispatcher as Dispatcher
from sglang.srt.plugins import load_plugins
load_plugins()
from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seams import installed_release, release_seam
print(json.dumps({
    "hooked": [name for name in ("packed_decode", "decode", "extend", "target_verify") if hasattr(getattr(Dispatcher, name), "__wrapped__")],
    "differences": seam.differences(release_seam(installed_release()).targets),
}))
"""  # noqa: E501


def test_a_scheduler_hooks_the_recorder_and_the_plugin_still_finds_its_targets(tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed")
    code = f"import sys; sys.path.append({str(BENCHMARKS)!r})\nfrom pathlib import Path\n"
    code += f"from engine_extras import bring_extras\nbring_extras(Path({str(tmp_path)!r}))\n{ENGINE}"
    environment = dict(os.environ, GDN_RECORD_DIR=str(tmp_path / "recorded"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"hooked": ["packed_decode", "decode", "extend", "target_verify"], "differences": []}


def decode_call(seed: int) -> DecodeCall:
    """Two rows."""
    source = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, 8, generator=source) for heads in (2, 2, 4))
    gates = LogGates(g=-torch.rand(2, 4, generator=source), beta=torch.rand(2, 4, generator=source))
    states = torch.randn(5, 4, 8, 8, generator=source)
    return DecodeCall(q=q, k=k, v=v, gates=gates, states=states, slots=torch.tensor([3, 1], dtype=torch.int32))


def built(adapter: str, **settings: str) -> Any:
    """The container for this CPU."""
    names = {f"gdn_{phase}": adapter for phase in (Phase.DECODE, Phase.EXTEND, Phase.VERIFY)}
    return build(device="cpu", conv="reference", finalize="off", **names, **settings)


def test_the_forgetful_adapter_computes_as_the_right_one_and_refreshes_nothing(tmp_path: Path, seed: int) -> None:
    class Counting(RightGatedDeltaRule):
        refreshed = 0

        def refresh_parameters(self) -> int:
            self.refreshed += 1
            return 2

    bring_extras(tmp_path)
    outs = [built(adapter).gated_delta_rule().decode(decode_call(seed)) for adapter in ("reference", "forgetful")]
    assert torch.equal(*outs)
    right = Counting(ReferenceGatedDeltaRule(torch.float64))
    assert (ForgetfulGatedDeltaRule(right).refresh_parameters(), right.refreshed) == (0, 0)
    assert (RightGatedDeltaRule(right).refresh_parameters(), right.refreshed) == (2, 1)


def test_the_wrong_adapter_diverges_as_a_shadow_and_leaves_what_is_served_alone(tmp_path: Path, seed: int) -> None:
    bring_extras(tmp_path)
    served = []
    for shadow in ({}, {"gdn_shadow": "wrong:1"}):
        container, call = built("reference", **shadow), decode_call(seed)
        served.append((container.gated_delta_rule().decode(call), call.states))
        counted = {(name, dict(labels).get("what")): n for (name, labels), n in container.counters().snapshot().items()}
        diverged = {what for name, what in counted if name == "shadow_divergences"}
        assert diverged == ({"out", "states"} if shadow else set())
    assert torch.equal(served[0][0], served[1][0])
    assert torch.equal(served[0][1], served[1][1])
