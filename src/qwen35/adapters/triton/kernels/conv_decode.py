"""Decode: one token a row; reads, convolves and shifts the window in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from qwen35.adapters._kernels.launches import programs_for
from qwen35.adapters.triton.kernels.conv_common import activate, load_bias, load_series, load_slot, words
from qwen35.adapters.triton.kernels.gdn_common import rounded
from qwen35.ports.conv_calls import ConvDecodeCall

# One channel a thread: no thread repeats another's, which would read a window while it is being shifted.
BLOCK_C = 128
WARPS = 4


@triton.jit(
    do_not_specialize=[
        "x", "weight", "bias", "windows", "slots", "write_slots", "out", "slot_words", "write_words", "channels",
        "x_row", "weight_row", "window_slot", "out_row", "has_bias", "silu",
    ]
)  # fmt: skip
def conv_decode_kernel(
    x, weight, bias, windows, slots, write_slots, out,
    slot_words: tl.int64, write_words: tl.int64, channels: tl.int64,
    x_row: tl.int64, weight_row: tl.int64, window_slot: tl.int64, out_row: tl.int64,
    has_bias: tl.int32, silu: tl.int32,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, channel block). Terms are summed newest first, as in the other kernels: equal bits."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    slot = load_slot(slots, row, slot_words)
    out_at = out + row * out_row + channel
    if slot < 0:
        tl.store(out_at, tl.zeros([BLOCK], out.dtype.element_ty), mask=inside)
    else:
        write_slot = load_slot(write_slots, row, write_words)
        window = windows + slot * window_slot + channel * (WIDTH - 1)
        token = tl.load(x + row * x_row + channel, mask=inside, other=0.0).to(tl.float32)
        inputs = load_series(window, 1, WIDTH - 1, WIDTH - 1, inside)
        inputs += (token,)
        y = load_bias(bias, has_bias, channel, inside)
        for back in tl.static_range(WIDTH):
            w = tl.load(weight + channel * weight_row + (WIDTH - 1 - back), mask=inside, other=0.0)
            y += inputs[WIDTH - 1 - back] * w.to(tl.float32)
        tl.store(out_at, rounded(activate(y, silu), out.dtype.element_ty), mask=inside)
        # The window is shifted in place: every thread has read before any writes.
        tl.debug_barrier()
        written = windows + write_slot * window_slot + channel * (WIDTH - 1)
        for j in tl.static_range(WIDTH - 1):
            value = rounded(inputs[j + 1], windows.dtype.element_ty)
            tl.store(written + j, value, mask=inside & (write_slot >= 0))


def launch(call: ConvDecodeCall, out: Tensor) -> None:
    """Launch for a checked ``ConvDecodeCall`` that is not empty; writes ``out`` and the written windows."""
    batch, channels = call.x.shape
    slots, slot_words = words(call.slots)
    write_slots, write_words = words(call.slots if call.write_slots is None else call.write_slots)
    conv_decode_kernel[(batch, programs_for(channels, BLOCK_C))](
        call.x, call.weight, call.weight if call.bias is None else call.bias, call.windows, slots, write_slots, out,
        slot_words, write_words, channels,
        call.x.stride(0), call.weight.stride(0), call.windows.stride(0), out.stride(0),
        int(call.bias is not None), int(call.activation == "silu"),
        WIDTH=call.weight.shape[1], BLOCK=BLOCK_C, num_warps=WARPS,
    )  # fmt: skip
