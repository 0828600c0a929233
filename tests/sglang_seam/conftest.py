"""Everything here needs SGLang installed; nothing needs a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sglang = pytest.importorskip("sglang", reason="SGLang is not installed")


@pytest.fixture(scope="session", autouse=True)
def _configuration() -> Iterator[None]:
    """SGLang's process-wide configuration, as a launcher would publish it."""
    import sglang.srt.managers.scheduler  # noqa: F401  the plugin is for processes that have it
    from sglang.srt.runtime_context import get_context

    override = get_context().override_server_args()
    override.install()
    yield
    override.restore()


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory, no settings of ours, and no hooks left from one test to the next."""
    import sglang.srt.layers.attention.linear.gdn_backend as gdn
    from seam_machine import plain_convolution, plain_gating, plugin_off_again

    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("QWEN35_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(gdn, "causal_conv1d_fn", plain_convolution)
    monkeypatch.setattr(gdn, "causal_conv1d_update", plain_convolution)
    monkeypatch.setattr(gdn, "fused_gdn_gating", plain_gating)
    with plugin_off_again():
        yield


@pytest.fixture(autouse=True)
def seed() -> int:
    """Fresh inputs at every run; the seed is shown where a test fails."""
    value = torch.seed() & 0xFFFFFFFF
    torch.manual_seed(value)
    sys.stdout.write(f"torch.manual_seed({value})\n")
    return value


@pytest.fixture
def groups() -> Iterator[dict[str, Any]]:
    """Two tensor-parallel ranks, by name the groups that count their sums; SGLang's fused function on the CPU."""
    from fusion_machine import ENGINE, give_the_operator_a_cpu, launch

    give_the_operator_a_cpu()
    ENGINE.calls.clear()
    ENGINE.declines = False
    with launch() as made:
        yield made
