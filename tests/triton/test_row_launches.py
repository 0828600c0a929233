"""A launch that mends rows is looked up once a layout: those after it go straight to what Triton found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from without_device import HopperWithoutDevice, in_place_of_the_driver

from qwen35.adapters._kernels import prefill_kernels, row_kernels
from qwen35.adapters._kernels.launches import KeptLaunch, KeptLaunches
from qwen35.adapters._kernels.rows import RowOperations, triton_rows
from qwen35.ports.gdn_calls import LogGates

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter does not compile")

BF16 = torch.bfloat16
STREAM = 7


class Lookups(HopperWithoutDevice):
    """``asked``: how often Triton's own dispatch asked for the current stream, which it does before every launch."""

    asked = 0

    def get_current_stream(self, _device: int) -> int:
        self.asked += 1
        return 0

    @property
    def placed(self) -> list[tuple[int, int, tuple[object, ...]]]:
        """Stream, kernel and arguments of each launch."""
        return [(stream, *launch) for stream, launch in zip(self.streams, self.launched, strict=True)]


KEPT = (
    row_kernels.kept_gather, row_kernels.kept_scatter, row_kernels.kept_zero_ranges, prefill_kernels.kept_inputs,
)  # fmt: skip


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lookups]:
    kernels = row_kernels.index_kernel, row_kernels.zero_rows_kernel, *(kept.kernel for kept in KEPT)
    with in_place_of_the_driver(monkeypatch, Lookups(), *kernels) as one:
        yield one
    for kept in KEPT:
        kept.clear()


@pytest.fixture
def rows() -> RowOperations:
    return triton_rows()


def at(arguments: tuple[object, ...]) -> list[object]:
    """Arguments with tensors as addresses."""
    return [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_second_index_launch_of_a_layout_is_not_looked_up(
    hopper: Lookups, rows: RowOperations, dtype: torch.dtype, clamp: bool, writes: bool
) -> None:
    def made(off: int = 0) -> tuple[torch.Tensor | None, ...]:
        slots = torch.zeros(3 + off, dtype=dtype)[off:]
        a = torch.zeros(3, 40, dtype=BF16)[:, 1 : 1 + 32]
        return (
            slots, torch.zeros(3, dtype=dtype) if writes else None, torch.zeros(3, dtype=torch.int32),
            torch.zeros(3, dtype=torch.int32), a, torch.zeros(32), torch.zeros(3, 1, 32, dtype=BF16) if clamp else None,
        )  # fmt: skip

    launch = rows.kept_index(read_padding=5, write_padding=6, limit=85.0)
    calls = [made(), made(), made(off=1)]
    for call in calls:
        launch(*call, STREAM)  # type: ignore[arg-type]
    assert hopper.asked == 1
    assert hopper.loaded == ["index_kernel"], "addresses of this kernel need not be aligned"
    assert [(stream, function) for stream, function, _ in hopper.placed] == [(0, 1), (STREAM, 1), (STREAM, 1)]
    assert hopper.grids["index_kernel"] == (3, 1, 1)
    names = row_kernels.index_kernel.arg_names
    constants = {
        "read_padding": 5, "write_padding": 6, "stride_row": 40 * clamp, "stride_token": 0, "count": 32 * clamp,
        "limit": 85.0, "HEADS": 32 if clamp else 1, "HAS_WRITE": writes, "CLAMP": clamp,
    }  # fmt: skip
    for (_, _, arguments), (slots, write_slots, read, write, a, dt_bias, clamped) in zip(
        hopper.placed, calls, strict=True
    ):
        named = dict(zip(names, at(arguments), strict=True))
        assert {name: named[name] for name in constants} == constants
        tensors = {"slots": slots, "read": read, "write": write, "write_slots": write_slots if writes else slots}
        tensors |= {"a": a, "dt_bias": dt_bias, "clamped": clamped} if clamp else {}
        assert {name: named[name] for name in tensors} == {n: t.data_ptr() for n, t in tensors.items() if t is not None}


@pytest.mark.parametrize("tokens", [None, 2])
def test_another_alignment_of_the_output_is_looked_up_again(
    hopper: Lookups, rows: RowOperations, tokens: int | None
) -> None:
    shape = (3, 4, 128) if tokens is None else (3, tokens, 4, 128)

    def made(off: int = 0) -> torch.Tensor:
        """Rows apart by more than they hold."""
        base = torch.zeros(*shape[:-1], 144, dtype=BF16)
        flat = torch.zeros(base.numel() + off, dtype=BF16)[off:]
        return flat.view(base.shape)[..., :128]

    slots, long = torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)[1:]
    launch = rows.kept_zero_rows()
    outs = [made(off=1), made(), made(), made(off=1), made()]
    for out, given in zip(outs, (slots, slots, slots, slots, long), strict=True):
        launch(out, given, STREAM)
    assert hopper.loaded == ["zero_rows_kernel"] * 2
    assert [(stream, function) for stream, function, _ in hopper.placed] == [
        (0, 1), (0, 2), (STREAM, 2), (0, 1), (STREAM, 2),
    ]  # fmt: skip
    assert hopper.asked == 3
    for (_, _, arguments), out in zip(hopper.placed, outs, strict=True):
        named = dict(zip(row_kernels.zero_rows_kernel.arg_names, at(arguments), strict=True))
        assert named["out"] == out.data_ptr()
        token = 0 if tokens is None else out.stride(1)
        expected = (out.stride(0), token, out.stride(-2), out[0].numel(), 4, 128)
        given = tuple(named[n] for n in ("stride_row", "stride_token", "stride_head", "count", "HEADS", "WIDTH"))
        assert given == expected


def test_launches_of_two_layouts_do_not_share_what_was_found(hopper: Lookups, rows: RowOperations) -> None:
    slots = torch.zeros(2, dtype=torch.int32)
    for heads in (4, 8):
        launch = rows.kept_zero_rows()
        for _ in range(2):
            launch(torch.zeros(2, heads, 128, dtype=BF16), slots, STREAM)
    assert [function for _, function, _ in hopper.placed] == [1, 1, 2, 2]


TOKENS, SEQUENCES, HEADS, WIDTH = 20, 3, 4, 128


def prefill(
    rows: RowOperations, *, tokens: int = TOKENS, off: int = 0, sequences: int = SEQUENCES,
    index: torch.dtype = torch.int32,
) -> list[dict[str, torch.Tensor]]:  # fmt: skip
    """What a prefill asks of rows; the tensors of each launch by the names that its kernel has for them."""

    def made(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        count = int(torch.Size(shape).numel())
        return torch.zeros(count + off, dtype=dtype)[off:].view(shape)

    slots, ends = (torch.zeros(sequences + more, dtype=index) for more in (0, 1))
    states, gathered = (made(sequences, HEADS, WIDTH, WIDTH, dtype=torch.float32) for _ in range(2))
    q, k, q_out, k_out, v, v_out = (made(tokens, HEADS, WIDTH) for _ in range(6))
    g, beta, decay, beta_out = (made(tokens, HEADS, dtype=torch.float32) for _ in range(4))
    cu_out = torch.zeros(sequences + 1, dtype=torch.int64)
    rows.gather_states(states, slots, None, gathered)
    rows.prefill_inputs(
        q, k, LogGates(g=g, beta=beta), ends, q_out=q_out, k_out=k_out, decay=decay, beta=beta_out, cu_out=cu_out, v=v,
        v_out=v_out, slots=slots,
    )  # fmt: skip
    rows.scatter_states(gathered, states, slots, slots, ends)
    rows.zero_ranges(q, ends, slots)
    return [
        {"states": states, "slots": slots, "out": gathered},
        {"q": q, "k": k, "v": v, "decay_in": g, "beta_in": beta, "cu_seqlens": ends, "slots": slots, "q_out": q_out,
         "k_out": k_out, "v_out": v_out, "decay": decay, "beta": beta_out, "cu_out": cu_out},
        {"source": gathered, "states": states, "slots": slots, "write_slots": slots, "cu_seqlens": ends},
        {"rows": q, "offsets": ends, "slots": slots},
    ]  # fmt: skip


def test_the_prefill_of_the_next_layer_is_not_looked_up(hopper: Lookups, rows: RowOperations) -> None:
    given = [one for _ in range(2) for one in prefill(rows)]
    assert hopper.asked == len(hopper.loaded) == 4
    assert [function for _, function, _ in hopper.placed] == [1, 2, 3, 4] * 2
    kernels = [KEPT[0], KEPT[3], KEPT[1], KEPT[2]] * 2
    named = [
        dict(zip(kept.kernel.arg_names, at(arguments), strict=True))
        for kept, (_, _, arguments) in zip(kernels, hopper.placed, strict=True)
    ]
    for arguments, tensors in zip(named, given, strict=True):
        assert {name: arguments[name] for name in tensors} == {name: t.data_ptr() for name, t in tensors.items()}
    for first, second, tensors in zip(named[:4], named[4:], given, strict=False):
        numbers = first.keys() - tensors.keys() - {"A_log", "dt_bias", "fresh"}
        assert {name: first[name] for name in numbers} == {name: second[name] for name in numbers}
    expected = {
        "tokens": TOKENS, "entries": SEQUENCES + 1, "q_token": HEADS * WIDTH, "v_head": WIDTH, "HEADS": HEADS,
        "VALUE_HEADS": HEADS, "KEY_WIDTH": WIDTH, "HEADS_PADDED": HEADS, "RAW": False, "LINEAR": True, "COPY_V": True,
        "STEPS": 2, "HAS_SLOTS": True,
    }  # fmt: skip
    assert {name: named[5][name] for name in expected} == expected
    assert (named[4]["HAS_FRESH"], named[6]["HAS_WRITE"], named[7]["width"]) == (False, True, HEADS * WIDTH)


def test_a_prefill_of_other_sizes_or_alignment_is_looked_up(hopper: Lookups, rows: RowOperations) -> None:
    for sizes in ({}, {"tokens": 21}, {"off": 1}, {"off": 1}, {}, {"tokens": 21}):
        prefill(rows, **sizes)
    functions = [function for _, function, _ in hopper.placed]
    assert functions[16:] == functions[:8], "what is kept is what Triton found for these sizes"
    assert not set(functions[8:16]) & {1, 2, 3, 4}, "and for these addresses"
    inputs, others = 3 + 1, 3 * 3  # the sizes of the inputs alone hang on the number of tokens
    assert hopper.asked == inputs + others


@pytest.mark.parametrize("change", [{"sequences": SEQUENCES + 1}, {"index": torch.int64}], ids=["grid", "dtype"])
def test_a_prefill_of_other_rows_is_looked_up(hopper: Lookups, rows: RowOperations, change: dict[str, Any]) -> None:
    prefill(rows)
    prefill(rows, **change)
    assert hopper.asked == 8
    prefill(rows)
    prefill(rows, **change)
    assert hopper.asked == 8


class OnSecondGpu(torch.Tensor):
    """Says that it lies there; its memory is the CPU's."""

    device = property(lambda _: torch.device("cuda", 1))  # type: ignore[assignment]


def test_what_triton_loaded_for_another_gpu_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose GPU is not current harms itself alone."""
    kernel = row_kernels.kept_zero_ranges.kernel
    rows, index = torch.zeros(4, 8).as_subclass(OnSecondGpu), torch.zeros(5, dtype=torch.int32)
    launch = KeptLaunch(kernel, (4, 1, 1), (8, 4096))
    with in_place_of_the_driver(monkeypatch, Lookups(), kernel):
        launch.first(True, rows, index, index)
    assert not launch.kept


def test_launches_that_are_remembered_are_bounded(hopper: Lookups) -> None:
    launch = KeptLaunches(row_kernels.kept_zero_ranges.kernel, most=2)
    rows, index = torch.zeros(4, 8), torch.zeros(5, dtype=torch.int32)
    for width in (1, 2, 1, 2, 3, 1):
        launch((4, 1, 1), (width, 4096), rows, index, index)
    assert len(hopper.launched) == 6
    assert hopper.asked == 2 + 2, "the third began anew"
