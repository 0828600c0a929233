"""Call objects of the short convolution: a depthwise causal convolution with a window of past inputs.

C channels (laid out q, k, v), W width. ``windows`` is the pool [N, C, W-1], oldest input first, last dimension
contiguous; its slot stride may exceed C*(W-1). Slots, write slots, ``out`` and what commit copies follow the rules
of the GDN calls; ``out`` may not be ``x``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qwen35.ports._device import with_index

Activation = Literal["silu"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvDecodeCall:
    """One token a row: x [B, C], weight [C, W], bias [C], slots [B], out [B, C]."""

    x: Tensor
    weight: Tensor
    windows: Tensor
    slots: Tensor
    bias: Tensor | None = None
    write_slots: Tensor | None = None
    activation: Activation = "silu"
    out: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvExtendCall:
    """Packed sequences: x [T, C], slots [S], cu_seqlens [S+1], fresh [S] bool, out [T, C]."""

    x: Tensor
    weight: Tensor
    windows: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    seq_lens_host: tuple[int, ...] | None = None
    fresh: Tensor | None = None
    bias: Tensor | None = None
    write_slots: Tensor | None = None
    activation: Activation = "silu"
    out: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvVerifyCall:
    """Draft tokens: x [B, T, C], slots [B], intermediates [R, T', C, W-1], T' at least T, out [B, T, C].

    Node t of an intermediate row is the window after that node; ``rows`` and ``parents`` as in ``VerifyCall``.
    """

    x: Tensor
    weight: Tensor
    windows: Tensor
    slots: Tensor
    intermediates: Tensor
    bias: Tensor | None = None
    rows: Tensor | None = None
    parents: Tensor | None = None
    activation: Activation = "silu"
    out: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvCommitCall:
    """Copy the window after node ``last[i]`` of row ``rows[i]`` to slot ``slots[i]``; -1 copies nothing."""

    windows: Tensor
    slots: Tensor
    intermediates: Tensor
    last: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvPlan:
    """The largest calls to come; fields as in ``GdnPlan``."""

    channels: int
    width: int
    window_dtype: torch.dtype
    device: torch.device
    max_batch: int
    max_tokens: int
    max_draft: int = 0
    token_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", with_index(self.device))
