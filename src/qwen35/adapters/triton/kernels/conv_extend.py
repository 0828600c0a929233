"""Extend: packed sequences in one launch; the program of a sequence's first block also moves its window."""

import triton
import triton.language as tl
from torch import Tensor

from qwen35.adapters._kernels.launches import programs_for
from qwen35.adapters.triton.kernels.conv_common import activate, flags, load_bias, load_series, load_slot, unit, words
from qwen35.adapters.triton.kernels.gdn_common import rounded
from qwen35.ports.conv_calls import ConvExtendCall

# BLOCK_T is at least the longest window (7), so that a sequence's first block alone reads its window.
BLOCK_T = 16
# 32 lanes of eight bfloat16 (16 bytes) in the tile, and one channel a thread where the window is moved.
BLOCK_C = 256
WARPS = 8


@triton.jit
def find_sequence(cu_seqlens, cu_words, sequences, block, BLOCK: tl.constexpr):
    """The last sequence s whose first block, cu_seqlens[s] // BLOCK + s, is not past ``block``.

    That numbering leaves a sequence of L tokens at least ceil(L / BLOCK) blocks, and needs
    T // BLOCK + S blocks in all, which the host knows without the lengths.
    """
    low = tl.zeros([], tl.int64)
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if load_slot(cu_seqlens, middle, cu_words) // BLOCK + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def begin_sequence(
    x, weight, bias, read, fresh, out, length, channel, inside, x_row, weight_row, out_row, has_bias, silu,
    WIDTH,
):  # fmt: skip
    """The first W-1 outputs of a sequence, which need the window at ``read``, and the window after it.

    ``x`` and ``out`` point at the sequence's first token, ``read`` at its window [C, W-1].
    """
    place = channel * (WIDTH - 1)
    line = load_series(read + place, 1, WIDTH - 1, WIDTH - 1, inside & (fresh == 0))
    line += load_series(x + channel, x_row, WIDTH - 1, length, inside)
    taps = load_series(weight + channel * weight_row, 1, WIDTH, WIDTH, inside)
    for j in tl.static_range(WIDTH - 1):
        y = load_bias(bias, has_bias, channel, inside)
        for back in tl.static_range(WIDTH):
            y += line[WIDTH - 1 + j - back] * taps[WIDTH - 1 - back]
        tl.store(
            out + j * out_row + channel, rounded(activate(y, silu), out.dtype.element_ty), mask=inside & (j < length)
        )
    moved = ()
    for j in tl.static_range(WIDTH - 1):
        source = length - (WIDTH - 1) + j
        new = tl.load(x + source * x_row + channel, mask=inside & (source >= 0), other=0.0)
        kept = inside & (source < 0) & (fresh == 0)
        old = tl.load(read + place + source + (WIDTH - 1), mask=kept, other=0.0)
        value = tl.where(source >= 0, new.to(tl.float32), old.to(tl.float32))
        moved += (rounded(value, read.dtype.element_ty),)  # type: ignore[assignment]
    return moved


@triton.jit(
    do_not_specialize=[
        "x", "weight", "bias", "windows", "slots", "write_slots", "fresh", "cu_seqlens", "out",
        "slot_words", "write_words", "cu_words", "sequences", "channels",
        "x_row", "weight_row", "window_slot", "out_row", "has_bias", "has_fresh", "silu",
    ]
)  # fmt: skip
def conv_extend_kernel(
    x, weight, bias, windows, slots, write_slots, fresh, cu_seqlens, out,
    slot_words: tl.int64, write_words: tl.int64, cu_words: tl.int64, sequences: tl.int64, channels: tl.int64,
    x_row: tl.int64, weight_row: tl.int64, window_slot: tl.int64, out_row: tl.int64,
    has_bias: tl.int32, has_fresh: tl.int32, silu: tl.int32,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens of one sequence, channel block). Terms are summed newest first, as in decode.

    ``channels`` and the strides of ``x`` and ``out`` count UNITs of elements, and both pointers are a multiple of
    UNIT bytes: 16 lets the compiler move 16 bytes at a time.
    """
    channels, x_row, out_row = channels * UNIT, x_row * UNIT, out_row * UNIT
    block = tl.program_id(0).to(tl.int64)
    sequence = find_sequence(cu_seqlens, cu_words, sequences, block, BLOCK)
    start = load_slot(cu_seqlens, sequence, cu_words)
    length = load_slot(cu_seqlens, sequence + 1, cu_words) - start
    first = (block - (start // BLOCK + sequence)) * BLOCK
    if first >= length:
        return
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    token = first + tl.arange(0, BLOCK)
    here = (token < length)[:, None] & inside[None, :]
    x_start = tl.multiple_of(x + start * x_row, UNIT)
    out_start = tl.multiple_of(out + start * out_row, UNIT)
    out_at = out_start + token[:, None] * out_row + channel[None, :]
    slot = load_slot(slots, sequence, slot_words)
    if slot < 0:
        tl.store(out_at, tl.zeros([BLOCK, CHANNELS], out.dtype.element_ty), mask=here)
        return
    if first == 0:
        is_fresh = tl.load(fresh + sequence, mask=has_fresh != 0, other=0)
        write_slot = load_slot(write_slots, sequence, write_words)
        written = windows + write_slot * window_slot
        moved = begin_sequence(
            x_start, weight, bias, windows + slot * window_slot, is_fresh, out_start, length, channel, inside,
            x_row, weight_row, out_row, has_bias, silu, WIDTH,
        )  # fmt: skip
        # The window is moved in place: every thread has read before any writes.
        tl.debug_barrier()
        for j in tl.static_range(WIDTH - 1):
            tl.store(written + channel * (WIDTH - 1) + j, moved[j], mask=inside & (write_slot >= 0))
    here = here & (token >= WIDTH - 1)[:, None]
    y = tl.zeros([BLOCK, CHANNELS], tl.float32) + load_bias(bias, has_bias, channel, inside)[None, :]
    for back in tl.static_range(WIDTH):
        w = tl.load(weight + channel * weight_row + (WIDTH - 1 - back), mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x_start + (token - back)[:, None] * x_row + channel[None, :], mask=here, other=0.0)
        y += value.to(tl.float32) * w[None, :]
    tl.store(out_at, rounded(activate(y, silu), out.dtype.element_ty), mask=here)


def step(call: ConvExtendCall, out: Tensor) -> int:
    """The UNIT that the addresses, strides and channels of a ``ConvExtendCall`` allow."""
    return unit(call.x.data_ptr(), out.data_ptr(), call.x.stride(0), out.stride(0), call.x.shape[1])


def launch(call: ConvExtendCall, out: Tensor) -> None:
    """Launch for a checked ``ConvExtendCall`` that is not empty; writes ``out`` and the written windows."""
    tokens, channels = call.x.shape
    sequences = call.slots.shape[0]
    each = step(call, out)
    slots, slot_words = words(call.slots)
    write_slots, write_words = words(call.slots if call.write_slots is None else call.write_slots)
    cu_seqlens, cu_words = words(call.cu_seqlens)
    conv_extend_kernel[(tokens // BLOCK_T + sequences, programs_for(channels, BLOCK_C))](
        call.x, call.weight, call.weight if call.bias is None else call.bias, call.windows, slots, write_slots,
        flags(call.slots if call.fresh is None else call.fresh), cu_seqlens, out,
        slot_words, write_words, cu_words, sequences, channels // each,
        call.x.stride(0) // each, call.weight.stride(0), call.windows.stride(0), out.stride(0) // each,
        int(call.bias is not None), int(call.fresh is not None), int(call.activation == "silu"),
        WIDTH=call.weight.shape[1], BLOCK=BLOCK_T, CHANNELS=BLOCK_C, UNIT=each, num_warps=WARPS,
    )  # fmt: skip
