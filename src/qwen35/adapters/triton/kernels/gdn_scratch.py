"""Scratch of the chunked form: how large it is, and how a call cuts it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35.adapters.triton.kernels.gdn_config import CHUNK
from qwen35.domain.alignment import padded

#: Factors a token and value head, see ``ExtendScratch``.
FACTORS = 4
#: Every piece starts at a multiple of this, so that it is read with the widest loads.
_PIECE_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendScratch:
    """What the first kernel of extend leaves for the second, in vectors.

    ``inverse`` and ``attention`` are laid out as [HV, T, 64], in the dtype of products: row t is the row of token t in
    its chunk's (I + A)^-1 diag(beta) and P. ``factors`` float32, laid out as [4, HV, T]: exp(G)/|k|, exp(G) scale/|q|,
    exp(G_last - G)/|k|, exp(G).
    """

    inverse: Tensor
    attention: Tensor
    factors: Tensor


def _piece_bytes(heads: int, tokens: int, dot: torch.dtype) -> tuple[int, int]:
    sizes = heads * tokens * CHUNK * dot.itemsize, heads * tokens * FACTORS * 4
    square, factors = (padded(size, _PIECE_BYTES) for size in sizes)
    return square, factors


def scratch_bytes(heads: int, tokens: int, dot: torch.dtype) -> int:
    """Bytes of scratch for an extend of ``tokens`` tokens."""
    square, factors = _piece_bytes(heads, tokens, dot)
    return 2 * square + factors


def wide(*tensors: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes and Triton, which looks at strides in elements, knows it."""
    return all(t.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in t.stride()[:-1]) for t in tensors)


def cut(room: Tensor, heads: int, tokens: int, dot: torch.dtype) -> ExtendScratch:
    """Scratch for ``tokens`` tokens in ``room``, which has ``scratch_bytes`` bytes."""
    square, _ = _piece_bytes(heads, tokens, dot)
    products, factors, count = room.view(dot), room.view(torch.float32), heads * tokens
    apart, at = square // dot.itemsize, 2 * square // 4
    return ExtendScratch(
        inverse=products[: count * CHUNK], attention=products[apart : apart + count * CHUNK],
        factors=factors[at : at + count * FACTORS],
    )  # fmt: skip
