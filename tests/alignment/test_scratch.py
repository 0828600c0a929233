"""Scratch and parameter copies by themselves: an address for each stream and parameter, that nothing moves."""

from __future__ import annotations

import pytest
import torch

from qwen35.domain.errors import CaptureError, UnsupportedError
from qwen35.services.parameter_copies import ParameterCopies
from qwen35.services.scratch import MAX_STREAMS, AlignedScratch

CPU = torch.device("cpu")
HV = 4
FOUR = torch.zeros(4)


class Streams:
    """Stands for the stream that is current."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self, _: torch.device) -> int:
        return self.now


@pytest.mark.row("D02")
@pytest.mark.row("D03")
def test_each_stream_and_argument_has_its_own_address_which_stays() -> None:
    streams = Streams()
    scratch = AlignedScratch(32, stream_of=streams)
    scratch.plan({"q": 64, "k": 64}, {"q": 64}, CPU)
    found: dict[tuple[int, str, bool], int] = {}
    for _ in range(2):
        for streams.now in range(3):
            for name, large in (("q", False), ("k", False), ("q", True)):
                address = scratch.take(name, FOUR, large=large, capturing=False).data_ptr()
                assert found.setdefault((streams.now, name, large), address) == address
    assert len(set(found.values())) == len(found) == 9


def test_there_are_as_many_streams_as_the_bound_counts_and_no_more() -> None:
    streams = Streams()
    scratch = AlignedScratch(32, spare=2, stream_of=streams)
    scratch.plan({"q": 64}, {"q": 128}, CPU)
    for streams.now in range(MAX_STREAMS):
        for large in (False, True):
            scratch.take("q", FOUR, large=large, capturing=False)
        assert scratch.bytes <= scratch.bound
    streams.now = MAX_STREAMS
    with pytest.raises(UnsupportedError, match=f"at most {MAX_STREAMS} streams"):
        scratch.take("q", FOUR, large=False, capturing=False)
    streams.now = 0
    assert scratch.take("q", FOUR, large=False, capturing=False).numel() == 4


@pytest.mark.row("D09")
def test_as_many_streams_as_are_spare_may_first_be_seen_inside_capture() -> None:
    streams = Streams()
    scratch = AlignedScratch(32, spare=2, stream_of=streams)
    scratch.plan({"q": 64}, {}, CPU)
    for streams.now in range(2):
        assert scratch.take("q", FOUR, large=False, capturing=True).numel() == 4
    streams.now = 2
    with pytest.raises(CaptureError, match="must exist before capture"):
        scratch.take("q", FOUR, large=False, capturing=True)


def test_a_stream_that_has_scratch_finds_larger_scratch_inside_capture_after_a_larger_plan() -> None:
    scratch, small, large = AlignedScratch(32, spare=0), torch.zeros(4), torch.zeros(16)
    scratch.plan({"q": 16}, {}, CPU)
    first = scratch.take("q", small, large=False, capturing=False)
    scratch.plan({"q": 64}, {}, CPU)
    grown = scratch.take("q", large, large=False, capturing=True)
    assert grown.numel() == 16
    assert grown.data_ptr() != first.data_ptr(), "a graph may hold the old one"
    assert scratch.bytes == 32 + 64 <= scratch.bound, "so it is kept"


@pytest.mark.row("D07")
def test_two_parameters_that_start_at_one_address_have_separate_copies() -> None:
    copies, base = ParameterCopies(32), torch.arange(2.0 * HV + 1)
    dense, spread = base[1 : HV + 1], base[1::2]
    for parameter in (dense, spread):
        assert torch.equal(copies.take(parameter, capturing=False), parameter)
    assert len(copies) == 2


@pytest.mark.row("D08")
def test_what_is_made_in_inference_mode_serves_and_is_refreshed_outside_it() -> None:
    copies, scratch, parameter = ParameterCopies(32), AlignedScratch(32), torch.randn(HV)
    with torch.inference_mode():
        copies.reserve(HV * 4, CPU)
        copies.take(parameter, capturing=False)
        scratch.plan({"q": 64}, {}, CPU)
        scratch.take("q", torch.zeros(4), large=False, capturing=False)
    parameter.add_(1)
    assert copies.refresh() == 1
    assert torch.equal(copies.take(parameter, capturing=False), parameter)
    unplaced = ParameterCopies(32)
    with torch.inference_mode():
        unplaced.take(parameter, capturing=False)
    assert unplaced.refresh() == 1
    scratch.take("q", torch.zeros(4), large=False, capturing=False).fill_(1.0)
