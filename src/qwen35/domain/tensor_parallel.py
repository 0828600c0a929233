"""Which channels of the packed q, k, v projection a tensor-parallel rank holds.

The convolution's channels are laid out q, k, v. Each block is cut separately: a flat cut of the whole would
hand rank 0 nothing but queries.
"""

from __future__ import annotations

from qwen35.domain.errors import ConfigurationError
from qwen35.domain.geometry import GdnGeometry


def block_slices(blocks: tuple[int, ...], tp: int, rank: int) -> tuple[slice, ...]:
    """The slice of each block, in the coordinates of the whole, that ``rank`` of ``tp`` holds.

    ``blocks`` are the widths of the blocks in order. Concatenating every rank's piece of a block, in rank
    order, rebuilds that block. Raises ``ConfigurationError`` where a width is not divisible by ``tp``.
    """
    if not 0 <= rank < tp:
        raise ConfigurationError(f"rank must be in 0..{tp - 1}, got {rank}")
    out, start = [], 0
    for width in blocks:
        if width % tp:
            raise ConfigurationError(f"a block of {width} channels cannot be divided over {tp} ranks")
        share = width // tp
        out.append(slice(start + rank * share, start + (rank + 1) * share))
        start += width
    return tuple(out)


def qkv_slices(geometry: GdnGeometry, tp: int, rank: int) -> tuple[slice, ...]:
    """The q, k and v slices of the convolution's channels that ``rank`` of ``tp`` holds."""
    geometry.shard(tp)  # whole heads only
    key = geometry.key_heads * geometry.key_width
    return block_slices((key, key, geometry.value_heads * geometry.value_width), tp, rank)
