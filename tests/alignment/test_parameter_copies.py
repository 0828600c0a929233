"""How long copies of parameters live, which memory they belong to, and how streams are ordered behind their filling."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from qwen35.domain.errors import CaptureError
from qwen35.services.devices import Mark, Streams
from qwen35.services.parameter_copies import ParameterCopies

CPU = torch.device("cpu")
HV = 4
RELOADS = 200


class RecordedStreams:
    """Streams by number, and what was asked of them, in order."""

    def __init__(self) -> None:
        self.now, self.inside = 7, False
        self.log: list[tuple[object, ...]] = []

    def __call__(self, _: torch.device) -> Streams:
        return self

    def current(self) -> int:
        return self.now

    def capturing(self) -> bool:
        return self.inside

    def mark(self) -> Mark:
        assert not self.inside, "an event of a capture orders nothing outside it"
        mark = ("mark", self.now, len(self.log))
        self.log.append(mark)
        return mark

    def wait(self, mark: Mark) -> None:
        assert not self.inside, "CUDA refuses a graph that waits for what was not captured"
        self.log.append(("wait", self.now, mark))

    def uses(self, tensor: Tensor) -> None:
        self.log.append(("uses", self.now, tensor.data_ptr()))


@pytest.fixture
def streams() -> RecordedStreams:
    return RecordedStreams()


def odd(like: Tensor) -> Tensor:
    """A parameter of ``like``'s values that is 4 bytes off, in memory of its own."""
    return torch.cat([torch.zeros(1), like])[1:]


@pytest.mark.row("D07")
def test_reloading_into_new_tensors_again_and_again_keeps_no_copy_of_those_that_are_gone(seed: int) -> None:
    """Two layers, whose parameters are made anew at each reload; some come to lie where older ones lay."""
    torch.manual_seed(seed)
    copies, layers = ParameterCopies(32), [odd(torch.randn(HV)) for _ in range(2)]
    copies.reserve(HV * 4, CPU)
    most, places = 0, copies.bytes
    for _ in range(RELOADS):
        for layer in range(2):
            layers[layer] = odd(torch.randn(HV))
        for parameter in layers:
            assert torch.equal(copies.take(parameter, capturing=False), parameter), f"seed {seed}"
        most = max(most, len(copies))
    assert most <= 4, "those that live and those of one reload before"
    assert copies.refresh() == len(copies) == 2
    assert copies.bytes == places + 2 * HV * 4


@pytest.mark.row("D07")
def test_a_new_parameter_where_a_freed_one_lay_has_a_copy_of_its_own(seed: int) -> None:
    """Two storages over one memory stand for an allocator that gives an address again."""
    memory = torch.randn(HV + 1)
    copies, first = ParameterCopies(32), torch.from_numpy(memory.numpy())[1:]
    copies.take(first, capturing=False)
    assert copies.held(first[:], torch.float32) is not None, "a view of it is the same parameter"
    address = first.data_ptr()
    del first
    memory.mul_(2)
    second = torch.from_numpy(memory.numpy())[1:]
    assert second.data_ptr() == address
    assert copies.held(second, torch.float32) is None
    taken = copies.take(second, capturing=False)
    assert torch.equal(taken, second), f"seed {seed}"
    assert copies.held(second, torch.float32) is taken
    assert len(copies) == copies.refresh() == 1


@pytest.mark.row("D07")
def test_a_graphs_copy_is_left_alone_by_a_parameter_in_another_storage_of_the_same_memory(seed: int) -> None:
    memory = torch.randn(HV + 1).numpy()
    copies, first, second = ParameterCopies(32), torch.from_numpy(memory)[1:], torch.from_numpy(memory)[1:]
    captured = copies.take(first, capturing=False)
    assert copies.take(first, capturing=True) is captured
    taken = copies.take(second, capturing=False)
    assert taken.data_ptr() != captured.data_ptr()
    memory += 1.0
    assert len(copies) == copies.refresh() == 2
    assert torch.equal(captured, first), f"seed {seed}"
    assert torch.equal(taken, second), f"seed {seed}"


def test_a_parameter_whose_memory_moved_is_no_more_read_where_it_lay() -> None:
    copies, parameter = ParameterCopies(32), torch.randn(HV)
    copies.take(parameter, capturing=False)
    parameter.untyped_storage().resize_(0)
    assert copies.refresh() == 0
    assert parameter.untyped_storage().nbytes() == 0, "and is not given memory again"
    assert len(copies) == 0


@pytest.mark.row("D08")
@pytest.mark.parametrize("how", ["born inside", "taken inside", "held inside"])
def test_what_a_graph_may_read_outlives_its_parameter(how: str, streams: RecordedStreams, seed: int) -> None:
    copies, parameter = ParameterCopies(32, streams), odd(torch.randn(HV))
    copies.reserve(HV * 4, CPU)
    if how != "born inside":
        copies.take(parameter, capturing=False)
    streams.inside = True
    captured = copies.take(parameter, capturing=True) if how != "held inside" else copies.held(parameter, torch.float32)
    streams.inside = False
    assert captured is not None
    address, values = captured.data_ptr(), parameter.clone()
    del parameter, captured
    gc.collect()
    for _ in range(3):
        copies.take(odd(torch.randn(HV)), capturing=False)
    assert copies.refresh() == 1, "the graph's: the others are gone"
    (kept,) = copies.like(torch.zeros(HV), torch.float32).values()
    assert kept.aligned.data_ptr() == address
    assert torch.equal(kept.aligned, values), f"seed {seed}"
    copies.close()
    assert (len(copies), copies.bytes) == (0, 0)


def test_one_stream_neither_waits_nor_marks_after_the_filling(streams: RecordedStreams) -> None:
    copies, parameter = ParameterCopies(32, streams), torch.randn(HV)
    for _ in range(3):
        copies.take(parameter, capturing=False)
        copies.held(parameter, torch.float32)
    assert streams.log == [("mark", 7, 0)]


@pytest.mark.parametrize("refreshed", [False, True])
def test_another_stream_waits_once_for_the_filling_and_once_for_each_refresh(
    refreshed: bool, streams: RecordedStreams
) -> None:
    copies, parameters = ParameterCopies(32, streams), [torch.randn(HV), torch.randn(HV)]
    taken = [copies.take(parameter, capturing=False) for parameter in parameters]
    if refreshed:
        for streams.now in (8, 7):
            copies.take(parameters[0], capturing=False)
        streams.log.clear()
        copies.refresh()
        (mark,) = streams.log
        assert mark[:2] == ("mark", 7), "one event for all"
    else:
        mark = streams.log[0]
    streams.log.clear()
    for streams.now in (8, 9, 8, 7):
        assert copies.take(parameters[0], capturing=False) is taken[0]
    address = taken[0].data_ptr()
    assert streams.log == [("wait", 8, mark), ("uses", 8, address), ("wait", 9, mark), ("uses", 9, address)]


def test_a_graph_takes_a_filled_copy_without_an_event(streams: RecordedStreams) -> None:
    """``RecordedStreams`` fails where one were captured. The wait is made up for by the stream's next eager use."""
    copies, parameter = ParameterCopies(32, streams), torch.randn(HV)
    filled = copies.take(parameter, capturing=False)
    streams.now, streams.inside = 8, True
    assert copies.take(parameter, capturing=True) is filled
    streams.inside = False
    copies.take(parameter, capturing=False)
    assert [entry[0] for entry in streams.log] == ["mark", "wait", "uses"]


def test_a_refresh_inside_capture_is_refused(streams: RecordedStreams) -> None:
    copies, parameter = ParameterCopies(32, streams), torch.randn(HV)
    copy = copies.take(parameter, capturing=False)
    before = copy.clone()
    parameter.zero_()
    streams.inside = True
    with pytest.raises(CaptureError, match="refresh parameters outside it"):
        copies.refresh()
    assert torch.equal(copy, before)


@pytest.mark.gpu
def test_work_on_another_stream_reads_behind_the_filling_and_the_refresh(seed: int) -> None:
    """Without the waits the second stream reads while the first still sleeps. Nothing waits on the host."""
    torch.manual_seed(seed)
    device = torch.device("cuda")
    copies, parameter = ParameterCopies(32), torch.randn(HV + 1, device=device)[1:]
    original, changed = parameter.clone(), torch.randn(HV, device=device)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    seen = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for turn in range(2):
            with torch.cuda.stream(first):
                torch.cuda._sleep(100_000_000)
                if turn:
                    parameter.data.copy_(changed)
                    copies.refresh()
                else:
                    copies.take(parameter, capturing=False)
            with torch.cuda.stream(second):
                seen.append(copies.take(parameter, capturing=False).clone())
            first.wait_stream(second)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(seen[0], original), f"seed {seed}"
    assert torch.equal(seen[1], changed), f"seed {seed}"


@pytest.mark.gpu
@pytest.mark.row("D08")
def test_a_replay_reads_its_copy_after_the_parameter_is_gone(seed: int) -> None:
    torch.manual_seed(seed)
    device = torch.device("cuda")
    copies, parameter, out = ParameterCopies(32), torch.randn(HV + 1, device=device)[1:], torch.zeros(HV, device=device)
    copies.take(parameter, capturing=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy = copies.held(parameter, torch.float32)
        assert copy is not None
        out.copy_(copy)
    want = parameter.clone()
    del parameter, copy
    gc.collect()
    for _ in range(8):  # take what would have been freed
        copies.take(torch.randn(HV + 1, device=device)[1:], capturing=False).fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want), f"seed {seed}"
