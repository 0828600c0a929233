"""The dense gated MLP: the block of a dense layer, and the shared expert of a mixture."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu


def projection(into: int, out: int, bias: bool = False) -> nn.Linear:
    """A linear layer whose weights are loaded, never trained."""
    return nn.Linear(into, out, bias=bias).requires_grad_(False)


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))`` for x [T, hidden]."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = projection(hidden, width)
        self.up_proj = projection(hidden, width)
        self.down_proj = projection(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.forward(silu(self.gate_proj.forward(x)) * self.up_proj.forward(x))
