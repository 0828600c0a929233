"""Streams and captures are asked about in one place, and what it says is what torch says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qwen35.services.devices import CudaStreams, capturing, current_stream, streams_of

SOURCE = Path(__file__).parent.parent / "src/qwen35"


@pytest.mark.parametrize("asked", ["is_current_stream_capturing", "_cuda_getCurrentRawStream"])
def test_one_module_asks_torch(asked: str) -> None:
    askers = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if asked in path.read_text()]
    assert askers == ["services/devices.py"]


def test_a_cpu_has_one_stream_and_no_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cpu = torch.device("cpu")
    assert not capturing(cpu)
    assert capturing(torch.device("cuda", 0))
    assert current_stream(cpu) == 0
    assert streams_of(cpu) is None


@pytest.mark.parametrize("used", [False, True])
def test_nothing_is_captured_where_cuda_has_not_been_used(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert capturing() is used


@pytest.mark.gpu
def test_a_gpus_streams_are_told_apart_and_captures_seen() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    streams = streams_of(device)
    assert isinstance(streams, CudaStreams)
    assert streams.current() == current_stream(device) == torch.cuda.current_stream().cuda_stream == 0
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        here = torch.cuda.current_stream().cuda_stream
        assert here != 0
        assert streams.current() == current_stream(device) == here
        assert not streams.capturing()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        said = (streams.capturing(), capturing(device), capturing())
        torch.zeros(1, device=device)
    assert said == (True, True, True)
    assert not capturing(device)
