"""The container of one rank: its own GPU, one adapter for phases that nothing serves, and an end without a mirror."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from seam_machine import PLACE, Machine, start
from test_faults import lines

from qwen35 import sglang_plugin
from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seam_metrics import PrometheusMirror
from qwen35.adapters.sglang.seams.release import Place
from qwen35.services.counters import Counters
from qwen35.settings import load_settings

PHASES = ("gdn_decode", "gdn_extend", "gdn_verify")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of a host of four, of which the first is current."""
    said = {
        "is_available": lambda: True, "device_count": lambda: 4, "current_device": lambda: 0,
        "get_device_properties": lambda device: SimpleNamespace(
            name=f"GPU {device}", multi_processor_count=132, major=9, minor=0
        ),
    }  # fmt: skip
    for name, function in said.items():
        monkeypatch.setattr(torch.cuda, name, function)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("device", "gpu", "made_for"),
    [("auto", 0, "cuda:0"), ("auto", 3, "cuda:3"), ("cuda:1", 3, "cuda:1"), ("cpu", 3, "cpu"), ("auto", 4, "cuda:0")],
    ids=["first rank", "fourth rank", "named", "no GPU asked for", "a GPU that torch does not see"],
)
def test_adapters_of_a_rank_are_made_for_the_gpu_that_sglang_gave_it(device: str, gpu: int, made_for: str) -> None:
    settings = load_settings(None, device=device, gdn_decode="reference")
    container = sglang_plugin.make_container(settings, Place(gpu=gpu, tensor_rank=gpu))
    assert container.registry().platform.device == made_for


def test_without_a_gpu_every_rank_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    container = sglang_plugin.make_container(load_settings(None), Place(gpu=1, tensor_rank=1))
    assert container.registry().platform.device == "cpu"


@pytest.mark.parametrize("routed", PHASES)
def test_phases_that_are_not_routed_share_the_adapter_of_one_that_is(routed: str) -> None:
    settings = load_settings(None, device="cpu", **{routed: "reference64"})
    container = sglang_plugin.make_container(settings, PLACE)
    assert {getattr(container.settings(), name) for name in PHASES} == {"reference64"}


def test_without_a_route_the_container_has_the_adapter_that_costs_nothing() -> None:
    container = sglang_plugin.make_container(load_settings(None, device="cpu"), PLACE)
    assert {getattr(container.settings(), name) for name in PHASES} == {sglang_plugin.UNUSED}


class Full(Counters):
    """Counters whose copy the endpoint's files do not take."""

    def snapshot(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], int]:
        raise OSError("No space left on device")


def test_a_mirror_that_cannot_stop_leaves_nothing_running(caplog: pytest.LogCaptureFixture) -> None:
    first, second = start(gdn_decode="reference"), start(gdn_decode="reference")
    machine = Machine()
    first.mirror = PrometheusMirror(Full(), period=60)
    sglang_plugin.uninstall()
    assert sglang_plugin.running() is None
    assert seam.installed() == ()
    assert second.gdn.backends == 0
    assert type(machine.dispatcher.decode_kernel).__module__.startswith("sglang."), "the seam after it is restored too"
    assert lines(caplog) == [
        "qwen35: is off, but its last counts did not reach the metrics (OSError: No space left on device)"
    ]
    sglang_plugin.uninstall()
    assert len(lines(caplog)) == 1, "what is off is not stopped again"
