"""Rotary position embedding of the first ``rotary_width`` elements of a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Angles ``position * theta**(-2 i / width)`` for pair i of ``width / 2``, in float32.

    Element i is paired with element i + width / 2. The mrope sections of the multimodal models give text the
    same position in each section, which is this.
    """

    inverse_frequency: Tensor

    def __init__(self, width: int, theta: float) -> None:
        super().__init__()
        # Named device: the model around it is made on the meta device, and this is no weight to be loaded.
        exponent = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
        self.register_buffer("inverse_frequency", 1.0 / theta**exponent, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, width / 2] float32 of ``positions`` [T]."""
        angles = positions.to(torch.float32)[:, None, None] * self.inverse_frequency
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """``x`` [T, heads, head width] with its first elements rotated; computed in float32, returned in x's dtype."""
    half = cosine.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)
