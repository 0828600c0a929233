"""Scratch by itself: an address for each device, stream and name, that nothing moves while a graph may use it."""

from __future__ import annotations

import threading

import pytest
import torch

from qwen35.domain.errors import CaptureError, UnsupportedError
from qwen35.services.parameter_copies import ParameterCopies
from qwen35.services.scratch import MAX_STREAMS, Scratch

CPU = torch.device("cpu")
F32 = torch.float32
HV = 4


class Work:
    """Stands for the stream that is current and for whether it is being captured."""

    def __init__(self) -> None:
        self.stream, self.captured = 0, False

    def scratch(self, spare: int = 1, alignment: int = 32) -> Scratch:
        return Scratch(alignment, spare, stream_of=lambda _: self.stream, inside=lambda _: self.captured)


def take(scratch: Scratch, name: str = "q", elements: int = 4, most: int | None = None) -> torch.Tensor:
    return scratch.take(name, (elements,), F32, CPU, None if most is None else (most,))


@pytest.mark.row("D02")
@pytest.mark.row("D03")
def test_each_stream_and_name_has_its_own_address_which_stays() -> None:
    work = Work()
    scratch = work.scratch()
    scratch.reserve({"q": 64, "k": 64}, CPU)
    found: dict[tuple[int, str], int] = {}
    for elements in (4, 1, 16, 3):
        for work.stream in range(3):
            for name in ("q", "k"):
                address = take(scratch, name, elements).data_ptr()
                assert found.setdefault((work.stream, name), address) == address
    assert len(set(found.values())) == len(found) == 6


def test_what_one_stream_writes_the_other_does_not_see() -> None:
    work = Work()
    scratch = work.scratch()
    first = take(scratch).fill_(1.0)
    work.stream = 1
    take(scratch).fill_(2.0)
    assert first.tolist() == [1.0] * 4


def test_tensors_are_dense_aligned_and_of_the_wanted_shape_and_dtype() -> None:
    scratch = Work().scratch(alignment=256)
    for dtype in (torch.bfloat16, F32, torch.int64):
        made = scratch.take(str(dtype), (3, 5), dtype, CPU, (7, 5))
        assert (made.shape, made.dtype, made.is_contiguous(), made.data_ptr() % 256) == ((3, 5), dtype, True, 0)
    assert scratch.take("nothing", (0, 5), F32, CPU).shape == (0, 5)


def test_there_are_as_many_streams_as_the_bound_counts_and_no_more() -> None:
    work = Work()
    scratch = work.scratch(spare=2)
    scratch.reserve({"q": 64}, CPU)
    assert scratch.bound == (MAX_STREAMS + 2) * 64
    for work.stream in range(MAX_STREAMS):
        take(scratch)
        assert scratch.bytes == (work.stream + 1 + 2) * 64 <= scratch.bound
    work.stream = MAX_STREAMS
    with pytest.raises(UnsupportedError, match=f"at most {MAX_STREAMS} streams"):
        take(scratch)
    work.stream = 0
    assert take(scratch).numel() == 4


@pytest.mark.row("D09")
def test_as_many_streams_as_are_spare_may_first_be_seen_inside_capture() -> None:
    work = Work()
    scratch = work.scratch(spare=2)
    scratch.reserve({"q": 64}, CPU)
    take(scratch)  # an eager stream takes nothing of what lies ready
    work.captured, held = True, scratch.bytes
    addresses = set()
    for work.stream in (1, 2):
        addresses.add(take(scratch, elements=16).data_ptr())
    assert (len(addresses), scratch.bytes) == (2, held), "nothing was made"
    work.stream = 3
    with pytest.raises(CaptureError, match="scratch for q must exist before capture"):
        take(scratch)
    work.captured = False
    take(scratch)
    work.captured = True
    assert take(scratch).numel() == 4, "after a call on this stream"


@pytest.mark.row("D09")
@pytest.mark.parametrize("seen", [False, True])
def test_more_than_was_planned_is_refused_inside_capture_and_made_outside(seen: bool) -> None:
    work = Work()
    scratch = work.scratch()
    if seen:
        take(scratch)
    work.captured = True
    with pytest.raises(CaptureError, match=f"needs 68 bytes and {16 if seen else 0} are planned"):
        take(scratch, elements=17)
    with pytest.raises(CaptureError, match="before capture"):
        scratch.reserve({"q": 68}, CPU)
    work.captured = False
    assert take(scratch, elements=17).numel() == 17


def test_a_stream_first_captured_after_an_eager_call_on_another_finds_its_own() -> None:
    """As where torch.cuda.graph captures on a stream of its own, with no plan made before."""
    work = Work()
    scratch = work.scratch()
    eager = take(scratch, elements=10, most=100)
    work.stream, work.captured = 1, True
    assert take(scratch, elements=100).data_ptr() != eager.data_ptr()


def test_a_buffer_that_a_capture_took_is_kept_and_one_that_none_did_is_not() -> None:
    work = Work()
    scratch = work.scratch(spare=0)
    for captured in (False, True):
        scratch.close()
        small = take(scratch, elements=8).fill_(3.0)
        work.captured = captured
        assert take(scratch, elements=8).data_ptr() == small.data_ptr()
        work.captured = False
        grown = take(scratch, elements=16)
        assert grown.data_ptr() != small.data_ptr()
        grown.fill_(4.0)
        assert small.tolist() == [3.0] * 8
        assert scratch.bytes == (64 + 32 if captured else 64) <= scratch.bound


def test_a_stream_that_has_scratch_finds_larger_scratch_inside_capture_after_a_larger_plan() -> None:
    work = Work()
    scratch = work.scratch()
    scratch.reserve({"q": 16}, CPU)
    first = take(scratch)
    scratch.reserve({"q": 64}, CPU)
    work.captured = True
    grown = take(scratch, elements=16)
    assert grown.data_ptr() != first.data_ptr()
    assert take(scratch, elements=16).data_ptr() == grown.data_ptr()


def test_after_a_larger_plan_any_eager_call_makes_the_larger_buffer_that_a_capture_then_finds() -> None:
    work = Work()
    scratch = work.scratch(spare=0)
    take(scratch, elements=4)
    scratch.reserve({"q": 64}, CPU)
    small = take(scratch, elements=4)
    work.captured = True
    assert take(scratch, elements=16).data_ptr() == small.data_ptr()


def test_what_lay_ready_and_was_taken_is_made_again_by_the_next_eager_call() -> None:
    work = Work()
    scratch = work.scratch()
    take(scratch)
    addresses = set()
    for work.stream in (1, 2, 3):
        work.captured = True
        addresses.add(take(scratch).data_ptr())
        work.captured = False
        work.stream += 10
        take(scratch)
    assert len(addresses) == 3


def test_many_unplanned_sizes_cost_less_than_four_times_the_largest() -> None:
    work = Work()
    scratch = work.scratch(spare=0)
    for elements in range(1, 1000):
        for work.captured in (False, True):  # each size is captured, so that nothing may be dropped
            take(scratch, elements=elements)
        assert scratch.bytes <= scratch.bound
    assert scratch.bytes < 4 * 1000 * F32.itemsize


def test_the_largest_shape_to_come_is_made_room_for_at_once() -> None:
    scratch = Work().scratch(spare=0)
    first = take(scratch, elements=2, most=50)
    held = scratch.bytes
    assert take(scratch, elements=50, most=50).data_ptr() == first.data_ptr()
    assert scratch.bytes == held


def test_another_stream_makes_room_for_the_largest_shape_that_it_knows_of() -> None:
    work = Work()
    scratch = work.scratch(spare=0)
    take(scratch, elements=2)
    work.stream = 1
    first = take(scratch, elements=2, most=50)
    assert take(scratch, elements=50).data_ptr() == first.data_ptr()


def test_another_device_has_buffers_of_its_own() -> None:
    scratch = Work().scratch(spare=0)
    here = take(scratch)
    there = scratch.take("q", (4,), F32, torch.device("meta"))
    assert (here.device.type, there.device.type) == ("cpu", "meta")
    assert take(scratch).data_ptr() == here.data_ptr()


def test_threads_that_are_streams_never_share_a_buffer() -> None:
    """Sizes grow as they go, so that buffers are replaced under way."""
    mine, wrong = threading.local(), []
    scratch = Scratch(32, stream_of=lambda _: mine.stream, inside=lambda _: False)

    def work(stream: int) -> None:
        mine.stream = stream
        for elements in range(1, 400):
            room = take(scratch, elements=elements).fill_(stream)
            if bool((room != stream).any()):
                wrong.append((stream, elements))

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert scratch.bytes <= scratch.bound


def test_closed_it_holds_nothing() -> None:
    work = Work()
    scratch = work.scratch()
    take(scratch)
    work.captured = True
    take(scratch)
    scratch.close()
    assert scratch.bytes == scratch.bound == 0


@pytest.mark.row("D07")
def test_two_parameters_that_start_at_one_address_have_separate_copies() -> None:
    copies, base = ParameterCopies(32), torch.arange(2.0 * HV + 1)
    dense, spread = base[1 : HV + 1], base[1::2]
    for parameter in (dense, spread):
        assert torch.equal(copies.take(parameter, capturing=False), parameter)
    assert len(copies) == 2


@pytest.mark.row("D08")
def test_what_is_made_in_inference_mode_serves_and_is_refreshed_outside_it() -> None:
    copies, scratch, parameter = ParameterCopies(32), Work().scratch(), torch.randn(HV)
    with torch.inference_mode():
        copies.reserve(HV * 4, CPU)
        copies.take(parameter, capturing=False)
        scratch.reserve({"q": 64}, CPU)
        take(scratch)
    parameter.add_(1)
    assert copies.refresh() == 1
    assert torch.equal(copies.take(parameter, capturing=False), parameter)
    unplaced = ParameterCopies(32)
    with torch.inference_mode():
        unplaced.take(parameter, capturing=False)
    assert unplaced.refresh() == 1
    take(scratch).fill_(1.0)
