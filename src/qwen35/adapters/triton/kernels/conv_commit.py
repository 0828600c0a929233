"""Commit: copy the windows that were accepted."""

import triton
import triton.language as tl

from qwen35.adapters._kernels.launches import programs_for
from qwen35.adapters.triton.kernels.conv_common import load_slot, unit, words
from qwen35.ports.conv_calls import ConvCommitCall

BLOCK = 1024
WARPS = 4


@triton.jit(
    do_not_specialize=[
        "windows", "slots", "intermediates", "rows", "last", "slot_words", "row_words", "last_words", "elements",
        "window_slot", "intermediate_row", "intermediate_node", "has_rows",
    ]
)  # fmt: skip
def conv_commit_kernel(
    windows, slots, intermediates, rows, last,
    slot_words: tl.int64, row_words: tl.int64, last_words: tl.int64, elements: tl.int64,
    window_slot: tl.int64, intermediate_row: tl.int64, intermediate_node: tl.int64, has_rows: tl.int32,
    BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Program (row, block of a window's C * (W-1) elements). Sizes and strides count UNITs of elements."""
    row = tl.program_id(0).to(tl.int64)
    slot = load_slot(slots, row, slot_words)
    node = load_slot(last, row, last_words)
    if (slot >= 0) & (node >= 0):
        kept_row = row
        if has_rows != 0:
            kept_row = load_slot(rows, row, row_words)
        element = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = element < elements * UNIT
        kept = intermediates + (kept_row * intermediate_row + node * intermediate_node) * UNIT
        window = windows + slot * window_slot * UNIT
        value = tl.load(tl.multiple_of(kept, UNIT) + element, mask=inside)
        tl.store(tl.multiple_of(window, UNIT) + element, value, mask=inside)


def _sizes(call: ConvCommitCall) -> tuple[int, int, int, int]:
    """Elements of a window, and the strides of a slot, a row and a node."""
    windows, kept = call.windows, call.intermediates
    return windows.shape[1] * windows.shape[2], windows.stride(0), kept.stride(0), kept.stride(1)


def step(call: ConvCommitCall) -> int:
    """The UNIT that the addresses, strides and sizes of a ``ConvCommitCall`` allow."""
    return unit(call.windows.data_ptr(), call.intermediates.data_ptr(), *_sizes(call))


def launch(call: ConvCommitCall) -> None:
    """Launch for a checked ``ConvCommitCall`` that is not empty; writes the named windows."""
    sizes, each = _sizes(call), step(call)
    slots, slot_words = words(call.slots)
    rows, row_words = words(call.slots if call.rows is None else call.rows)
    last, last_words = words(call.last)
    conv_commit_kernel[(call.slots.shape[0], programs_for(sizes[0], BLOCK))](
        call.windows, slots, call.intermediates, rows, last, slot_words, row_words, last_words,
        *(size // each for size in sizes), int(call.rows is not None), BLOCK=BLOCK, UNIT=each, num_warps=WARPS,
    )  # fmt: skip
