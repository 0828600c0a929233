"""Verify: draft tokens, chain or tree; every node is its own program, since its inputs are known beforehand."""

import triton
import triton.language as tl
from torch import Tensor

from qwen35.adapters._kernels.launches import programs_for
from qwen35.adapters.triton.kernels.conv_common import activate, load_bias, load_slot, words
from qwen35.adapters.triton.kernels.gdn_common import rounded
from qwen35.ports.conv_calls import ConvVerifyCall

BLOCK_C = 128
WARPS = 4


@triton.jit(
    do_not_specialize=[
        "x", "weight", "bias", "windows", "slots", "rows", "parents", "intermediates", "out",
        "slot_words", "row_words", "parent_words", "parent_row", "draft", "channels", "x_row", "x_node",
        "weight_row", "window_slot", "intermediate_row", "intermediate_node", "out_row", "out_node",
        "has_bias", "has_rows", "has_parents", "silu",
    ]
)  # fmt: skip
def conv_verify_kernel(
    x, weight, bias, windows, slots, rows, parents, intermediates, out,
    slot_words: tl.int64, row_words: tl.int64, parent_words: tl.int64, parent_row: tl.int64,
    draft: tl.int64, channels: tl.int64, x_row: tl.int64, x_node: tl.int64,
    weight_row: tl.int64, window_slot: tl.int64, intermediate_row: tl.int64, intermediate_node: tl.int64,
    out_row: tl.int64, out_node: tl.int64,
    has_bias: tl.int32, has_rows: tl.int32, has_parents: tl.int32, silu: tl.int32,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (batch row and node, channel block). Writes the node's output and the window after it.

    A position of 0 or more is a node; -1 is the newest input of the slot's window, -2 the one before it.
    """
    row = tl.program_id(0).to(tl.int64) // draft
    node = tl.program_id(0).to(tl.int64) % draft
    channel = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    slot = load_slot(slots, row, slot_words)
    out_at = out + row * out_row + node * out_node + channel
    if slot < 0:
        tl.store(out_at, tl.zeros([BLOCK], out.dtype.element_ty), mask=inside)
    else:
        kept_row = row
        if has_rows != 0:
            kept_row = load_slot(rows, row, row_words)
        kept = intermediates + kept_row * intermediate_row + node * intermediate_node + channel * (WIDTH - 1)
        window = windows + slot * window_slot + channel * (WIDTH - 1)
        position = node
        y = load_bias(bias, has_bias, channel, inside)
        for back in tl.static_range(WIDTH):
            is_node = position >= 0
            token = tl.load(x + row * x_row + position * x_node + channel, mask=inside & is_node, other=0.0)
            old = tl.load(window + (WIDTH - 1 + position), mask=inside & (is_node == 0), other=0.0)
            value = tl.where(is_node, token.to(tl.float32), old.to(tl.float32))
            w = tl.load(weight + channel * weight_row + (WIDTH - 1 - back), mask=inside, other=0.0)
            y += value * w.to(tl.float32)
            if back < WIDTH - 1:
                tl.store(kept + (WIDTH - 2 - back), rounded(value, intermediates.dtype.element_ty), mask=inside)
            named = (has_parents != 0) & is_node
            parent = tl.load(parents + row * parent_row + position * parent_words, mask=named, other=0)
            position = tl.where(named, parent.to(tl.int64), position - 1)
        tl.store(out_at, rounded(activate(y, silu), out.dtype.element_ty), mask=inside)


def launch(call: ConvVerifyCall, out: Tensor) -> None:
    """Launch for a checked ``ConvVerifyCall`` that is not empty; writes ``out`` and the intermediates."""
    batch, draft, channels = call.x.shape
    kept = call.intermediates
    slots, slot_words = words(call.slots)
    rows, row_words = words(call.slots if call.rows is None else call.rows)
    parents, parent_words = words(call.slots if call.parents is None else call.parents)
    parent_row = 0 if call.parents is None else call.parents.stride(0) * parent_words
    conv_verify_kernel[(batch * draft, programs_for(channels, BLOCK_C))](
        call.x, call.weight, call.weight if call.bias is None else call.bias, call.windows, slots, rows, parents,
        kept, out,
        slot_words, row_words, parent_words, parent_row, draft, channels, call.x.stride(0), call.x.stride(1),
        call.weight.stride(0), call.windows.stride(0), kept.stride(0), kept.stride(1), out.stride(0), out.stride(1),
        int(call.bias is not None), int(call.rows is not None), int(call.parents is not None),
        int(call.activation == "silu"),
        WIDTH=call.weight.shape[1], BLOCK=BLOCK_C, num_warps=WARPS,
    )  # fmt: skip
