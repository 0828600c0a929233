"""Scratch of the chunked form: one buffer a device, sized by plans, cut anew for each call."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35.adapters.triton.kernels.gdn_config import CHUNK
from qwen35.domain.errors import CaptureError

#: Factors a token and value head, see ``ExtendScratch``.
FACTORS = 4
#: Every piece starts at a multiple of this, so that it is read with the widest loads.
_PIECE_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendScratch:
    """What the first kernel of extend leaves for the second.

    ``inverse`` and ``attention`` [HV, T, 64] in the dtype of products: row t is the row of token t in its
    chunk's (I + A)^-1 diag(beta) and P. ``factors`` [4, HV, T] float32: exp(G)/|k|, exp(G) scale/|q|,
    exp(G_last - G)/|k|, exp(G).
    """

    inverse: Tensor
    attention: Tensor
    factors: Tensor


def _piece_bytes(heads: int, tokens: int, dot: torch.dtype) -> tuple[int, int]:
    sizes = heads * tokens * CHUNK * dot.itemsize, heads * tokens * FACTORS * 4
    square, factors = (-(-size // _PIECE_BYTES) * _PIECE_BYTES for size in sizes)
    return square, factors


def scratch_bytes(heads: int, tokens: int, dot: torch.dtype) -> int:
    """Bytes of scratch for an extend of ``tokens`` tokens."""
    square, factors = _piece_bytes(heads, tokens, dot)
    return 2 * square + factors


def wide(*tensors: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes and Triton, which looks at strides in elements, knows it."""
    return all(t.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in t.stride()[:-1]) for t in tensors)


def _bytes(size: int, device: torch.device) -> Tensor:
    """Memory that may be written in and outside inference mode, wherever it is made."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device=device)


class ScratchBuffer:
    """Grows outside capture only. A buffer that a capture has seen is kept until ``free``: the graph's replays
    still write it."""

    def __init__(self) -> None:
        self._current: dict[torch.device, Tensor] = {}
        self._tokens: dict[torch.device, Tensor] = {}
        self._captured: list[Tensor] = []

    def reserve(self, size: int, device: torch.device) -> None:
        """Have at least ``size`` bytes on ``device``; what was there is lost where it grows."""
        have = self._current.get(device)
        if have is None or have.numel() < size:
            self._current[device] = _bytes(size, device)

    def cut(self, heads: int, tokens: int, dot: torch.dtype, device: torch.device, capturing: bool) -> ExtendScratch:
        """Scratch for ``tokens`` tokens, from the start of the reserved buffer."""
        buffer = self._current[device]
        if capturing and all(kept is not buffer for kept in self._captured):
            self._captured.append(buffer)
        square, _ = _piece_bytes(heads, tokens, dot)
        count = heads * tokens * CHUNK * dot.itemsize
        inverse, attention = (buffer[at : at + count].view(dot).view(heads, tokens, CHUNK) for at in (0, square))
        rest = buffer[2 * square : 2 * square + heads * tokens * FACTORS * 4].view(torch.float32)
        return ExtendScratch(inverse=inverse, attention=attention, factors=rest.view(FACTORS, heads, tokens))

    def dense(self, tokens: tuple[Tensor, ...], most: int, capturing: bool) -> tuple[Tensor, ...]:
        """Dense copies of token tensors [T, heads, width], in a buffer of their own for ``most`` tokens.

        Raises ``CaptureError`` where the buffer would have to be made inside capture.
        """
        device, counts = tokens[0].device, [math.prod(t.shape[1:]) for t in tokens]
        pieces = [-(-count * most * tokens[0].element_size() // _PIECE_BYTES) * _PIECE_BYTES for count in counts]
        buffer = self._tokens.get(device)
        if buffer is None or buffer.numel() < sum(pieces):
            if capturing:
                raise CaptureError("unaligned tokens need a copy that is not there: make such a call before capture")
            buffer = self._tokens[device] = _bytes(sum(pieces), device)
        if capturing and all(kept is not buffer for kept in self._captured):
            self._captured.append(buffer)
        copies, start = [], 0
        for tensor, count, piece in zip(tokens, counts, pieces, strict=True):
            room = buffer[start : start + count * tensor.shape[0] * tensor.element_size()]
            copies.append(room.view(tensor.dtype).view(tensor.shape).copy_(tensor))
            start += piece
        return tuple(copies)

    def free(self) -> None:
        """Let go of every buffer."""
        self._current.clear()
        self._tokens.clear()
        self._captured.clear()
