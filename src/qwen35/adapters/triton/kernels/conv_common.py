"""What the convolution kernels share.

So that one binary serves every call of the same dtypes (a compilation inside CUDA graph capture is not legal),
optional tensors come as any valid pointer with a flag, 64-bit indices as pairs of 32-bit words of which the low
one is read, and no argument is specialised by its value.
"""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def load_bias(bias, has_bias, channel, inside):
    """Float32 bias of the channels, zero where there is none."""
    return tl.load(bias + channel, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)


@triton.jit
def activate(y, silu):
    """silu(y) where ``silu`` is not 0, else y; float32."""
    if silu != 0:
        y = y / (1.0 + tl.exp(-y))
    return y


@triton.jit
def load_slot(slots, row, stride):
    """An index as int64: the low word of a 64-bit one (stride 2) is the value itself below 2**31, and -1."""
    return tl.load(slots + row * stride).to(tl.int64)


@triton.jit
def load_series(at, step, count, limit, inside):
    """``count`` (constexpr) loads ``step`` apart, as a tuple of float32; zero from ``limit`` on."""
    values = ()
    for j in tl.static_range(count):
        value = tl.load(at + j * step, mask=inside & (j < limit), other=0.0)
        values += (value.to(tl.float32),)  # type: ignore[assignment]
    return values


def words(index: torch.Tensor) -> tuple[Any, int]:
    """``index`` seen as 32-bit words, little end first: (pointer argument, words to one entry)."""
    if index.dtype == torch.int32:
        return index, 1
    return triton.reinterpret(index, tl.int32), 2


def flags(mask: torch.Tensor) -> Any:
    """A bool tensor (or any stand-in that is not read) seen as bytes."""
    return triton.reinterpret(mask, tl.uint8)


def unit(*sizes: int) -> int:
    """16 where these addresses, strides and sizes allow moving 16 bytes at a time, else 1."""
    return 1 if any(size % 16 for size in sizes) else 16
