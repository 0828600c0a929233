"""The port of the gated delta rule. docs/contract.md has the clauses that every implementation keeps."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from qwen35.domain.capabilities import Capabilities, Support
from qwen35.ports.gdn_calls import (
    CheckpointPlan,
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    Gates,
    GdnPlan,
    LogGates,
    RawGates,
    ReplayPlan,
    VerifyCall,
)

GdnCall = DecodeCall | ExtendCall | VerifyCall | CommitCall

__all__ = [
    "CheckpointPlan", "CommitCall", "DecodeCall", "ExtendCall", "ExtendResult", "GatedDeltaRule", "Gates",
    "GdnCall", "GdnPlan", "LogGates", "RawGates", "ReplayPlan", "VerifyCall",
]  # fmt: skip


@runtime_checkable
class GatedDeltaRule(Protocol):
    """Recurrence of one token of one value head, in float32::

        S <- exp(g) * S;  S <- S + beta * (v - S k) k^T;  o = S q

    with q and k L2-normalised (eps 1e-6 inside the square root) and q times ``scale`` first. A call that does
    not meet the contract raises ``ContractError``, one that cannot be honoured ``UnsupportedError``, both
    before anything is written. decode, verify and commit are legal inside CUDA graph capture.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def prepare(self, plan: GdnPlan) -> None:
        """Fix scratch and branches for calls within ``plan``. Raises ``UnsupportedError`` where the plan
        cannot be served and ``CaptureError`` inside capture. Never called: the first call prepares itself,
        outside capture."""

    def supports(self, call: GdnCall) -> Support:
        """Whether ``call`` would be honoured, with every reason against it. Launches nothing."""

    def decode(self, call: DecodeCall) -> Tensor:
        """One token a row; returns out [B, HV, V]. Mutates the written slots and ``call.out``."""

    def extend(self, call: ExtendCall) -> ExtendResult:
        """Packed sequences; mutates the written slots and ``call.out``."""

    def verify(self, call: VerifyCall) -> Tensor:
        """Draft tokens; returns out [B, T, HV, V]. Mutates ``intermediates`` and ``call.out``, never states."""

    def commit(self, call: CommitCall) -> None:
        """Copy accepted intermediates into the pool; mutates the named slots."""

    def refresh_parameters(self) -> int:
        """Bring copies of A_log and dt_bias up to date, in place; returns how many there are."""

    def close(self) -> None:
        """Free scratch. Idempotent; a later call raises ``ClosedError``."""
