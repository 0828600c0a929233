"""Tile sizes of the GDN kernels, as pure functions of the call's sizes. The numbers are tuned on an H200."""

from __future__ import annotations

from dataclasses import dataclass

#: Tokens of one chunk of the chunked form, and so the multiple that checkpoints must have.
CHUNK = 64

#: Bytes of a row that eight neighbouring lanes read with one 16-byte load each: one L2 line.
_LINE_BYTES = 128

#: State bytes of one program. Small batches need many programs to fill the device, large ones long loads.
_TILE_BYTES_FEW, _TILE_BYTES_MANY = 4096, 16384
#: Programs of the small tile that fill an H200 (132 multiprocessors) about eight times over.
_MANY_PROGRAMS = 1024
#: Bytes of state that one thread holds: eight 16-byte loads in flight.
_BYTES_PER_THREAD = 128


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile of the token-by-token kernels: ``block_v`` rows of the state, read as pieces of ``inner`` elements.

    ``stream`` marks state traffic as evict-first, so that it does not push anything else out of L2.
    """

    block_v: int
    inner: int
    num_warps: int
    stream: bool = True


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """Tiles of the chunked kernels: warps of the chunk kernel; ``block_v``, warps and stages of the scan."""

    block_v: int
    scan_warps: int
    scan_stages: int
    chunk_warps: int = 4


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def decode_config(batch: int, heads: int, key_width: int, value_width: int, state_bytes: int) -> DecodeConfig:
    """The tile for ``batch`` rows of ``heads`` value heads, with state elements of ``state_bytes`` bytes."""
    row = power_of_two(key_width) * state_bytes
    rows = power_of_two(value_width)
    small = min(max(_TILE_BYTES_FEW // row, 1), rows)
    many = batch * heads * -(-value_width // small) > _MANY_PROGRAMS
    block_v = min(max((_TILE_BYTES_MANY if many else _TILE_BYTES_FEW) // row, 1), rows)
    threads = block_v * row // _BYTES_PER_THREAD
    return DecodeConfig(
        block_v=block_v,
        inner=min(power_of_two(key_width), _LINE_BYTES // state_bytes),
        num_warps=min(max(power_of_two(threads) // 32, 1), 8),
    )


def extend_config(sequences: int, heads: int, key_width: int, value_width: int, dot_bytes: int) -> ExtendConfig:
    """The tiles for ``sequences`` sequences, with matrix operands of ``dot_bytes`` bytes."""
    block_v = min(max(power_of_two(value_width), 16), 32)
    if dot_bytes > 2 or key_width > 128:
        return ExtendConfig(block_v=min(block_v, 16), scan_warps=4, scan_stages=1)
    return ExtendConfig(block_v=block_v, scan_warps=4, scan_stages=2)
