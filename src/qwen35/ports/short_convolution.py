"""The port of the short convolution that stands before the gated delta rule."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from qwen35.domain.capabilities import Capabilities, Support
from qwen35.ports.conv_calls import (
    Activation,
    ConvCommitCall,
    ConvDecodeCall,
    ConvExtendCall,
    ConvPlan,
    ConvVerifyCall,
)

ConvCall = ConvDecodeCall | ConvExtendCall | ConvVerifyCall | ConvCommitCall

__all__ = [
    "Activation", "ConvCall", "ConvCommitCall", "ConvDecodeCall", "ConvExtendCall", "ConvPlan",
    "ConvVerifyCall", "ShortConvolution",
]  # fmt: skip


@runtime_checkable
class ShortConvolution(Protocol):
    """``y[t] = activation(bias + sum_j weight[:, j] * x[t - W + 1 + j])``, in float32, rounded to x's dtype.

    Inputs before the first token come from the slot's window; afterwards the window holds the last W - 1
    inputs. Errors, capture and mutation follow ``GatedDeltaRule``.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def prepare(self, plan: ConvPlan) -> None:
        """Fix branches for calls within ``plan``, outside capture."""

    def supports(self, call: ConvCall) -> Support:
        """Whether ``call`` would be honoured, with every reason against it. Launches nothing."""

    def decode(self, call: ConvDecodeCall) -> Tensor:
        """One token a row; returns out [B, C]. Mutates the written windows and ``call.out``."""

    def extend(self, call: ConvExtendCall) -> Tensor:
        """Packed sequences; returns out [T, C]. Mutates the written windows and ``call.out``."""

    def verify(self, call: ConvVerifyCall) -> Tensor:
        """Draft tokens; returns out [B, T, C]. Mutates ``intermediates`` and ``call.out``, never windows."""

    def commit(self, call: ConvCommitCall) -> None:
        """Copy accepted windows into the pool; mutates the named slots."""

    def refresh_parameters(self) -> int:
        """Bring copies of weight and bias up to date, in place; returns how many there are."""

    def close(self) -> None:
        """Free scratch. Idempotent; a later call raises ``ClosedError``."""
