"""Tile sizes of the GDN kernels, as pure functions of the call's sizes. The numbers are tuned on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from qwen35.domain.alignment import power_of_two

#: Tokens of one chunk of the chunked form, and so the multiple that checkpoints must have.
CHUNK = 64

#: State elements of one program of decode, which is one warp: 64 a thread. On an H200 best, or within 2 percent of it,
#: from 8 rows of 32 heads on (benchmarks/results/decode_tiles.json).
_DECODE_ELEMENTS = 2048
#: Columns of a piece in float32: lanes share a row in groups of sixteen. It is the same for few states and for many, so
#: that a row's result does not depend on the size of its batch.
_DECODE_COLUMNS = 64
#: The most states (rows times value heads) of float32 of which that tile makes too few programs to hide a load's
#: latency: at 128 it is 7 percent slower than this one (14 without hints).
_FEW_STATES, _FEW_STATES_ELEMENTS = 128, 512
#: The most states of float32 that are streamed (see ``DecodeConfig``). At 256 on an H200 that takes 4 percent less time
#: in a row and an eighth less between other kernels; at 2,048 an engine's step was 0.1 percent longer with it and
#: ``dependent_launch`` (benchmarks/results/decode_dependent.json, engine_dependent.json). Nothing was measured between.
_STREAMED_STATES = 256
#: State elements of one program of verify, which keeps them from token to token, and bytes of them that one thread
#: holds.
_VERIFY_ELEMENTS, _VERIFY_THREAD_BYTES = 1024, 64

#: Programs of 64 state rows that keep an H200 busy twice over; with fewer, 32 rows make twice as many programs.
_WIDE_SCAN_PROGRAMS = 256
#: What the widest tile at K = 128 takes with two chunks on their way while a third is worked on.
_THREE_STAGES_BYTES = 190 * 1024
#: What the tile at K = 256 takes with one chunk on its way: 176,900 bytes as compiled.
_TWO_STAGES_BYTES = 174 * 1024


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile of the token-by-token kernels: ``block_v`` rows of the state, read as pieces of ``inner`` elements.

    ``stream`` marks the state's loads as evict-first and its stores as streaming: what is written then leaves L2 during
    the call, and not at the cost of the next one.
    """

    block_v: int
    inner: int
    num_warps: int
    stream: bool = True


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """Tiles of the chunked kernels: ``block_v``, warps and stages of the scan; warps and registers of the chunks.

    ``chunk_registers`` caps registers a thread (None: no cap), so that more programs share a multiprocessor.
    """

    block_v: int
    scan_warps: int
    scan_stages: int
    chunk_warps: int = 4
    chunk_registers: int | None = None


def decode_config(key_width: int, value_width: int, state_bytes: int, states: int) -> DecodeConfig:
    """The tile of decode: whole rows of a state whose elements have ``state_bytes`` bytes.

    ``states``: rows of the batch times value heads.
    """
    float32 = state_bytes == 4
    streamed = not float32 or states <= _STREAMED_STATES
    return _decode_config(key_width, value_width, float32, states <= _FEW_STATES, streamed)


@cache
def _decode_config(key_width: int, value_width: int, float32: bool, few: bool, streamed: bool) -> DecodeConfig:
    row = power_of_two(key_width)
    elements = _FEW_STATES_ELEMENTS if float32 and few else _DECODE_ELEMENTS
    block_v = min(max(elements // row, 1), power_of_two(value_width))
    inner = min(row, _DECODE_COLUMNS) if float32 else row
    return DecodeConfig(block_v=block_v, inner=inner, num_warps=1, stream=streamed)


@cache
def verify_config(key_width: int, value_width: int, state_bytes: int) -> DecodeConfig:
    """The tile of verify, likewise."""
    row = power_of_two(key_width)
    block_v = min(max(_VERIFY_ELEMENTS // row, 1), power_of_two(value_width))
    warps = block_v * row * state_bytes // _VERIFY_THREAD_BYTES // 32
    return DecodeConfig(block_v=block_v, inner=row, num_warps=min(max(warps, 1), 8))


def extend_config(
    sequences: int, heads: int, key_width: int, value_width: int, dot_bytes: int, shared_bytes: int
) -> ExtendConfig:
    """The tiles for ``sequences`` sequences, with matrix operands of ``dot_bytes`` bytes.

    ``shared_bytes``: shared memory that one program may have on the device. Where it is Hopper's, operands of two
    bytes get two stages or more: the assembler that Triton ships spoils a loop without (docs/upstream.md).
    """
    rows = max(power_of_two(value_width), 16)
    if dot_bytes > 2 or key_width > 128:
        stages = 2 if dot_bytes == 2 and shared_bytes >= _TWO_STAGES_BYTES else 1
        return ExtendConfig(block_v=16, scan_warps=4, scan_stages=stages, chunk_warps=8)
    stages = 3 if shared_bytes >= _THREE_STAGES_BYTES else 1
    if sequences * heads * -(-value_width // 64) >= _WIDE_SCAN_PROGRAMS:
        return ExtendConfig(block_v=min(rows, 64), scan_warps=4, scan_stages=stages, chunk_registers=168)
    return ExtendConfig(block_v=min(rows, 32), scan_warps=4, scan_stages=stages, chunk_registers=168)
