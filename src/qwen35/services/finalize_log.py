"""What the fusion policy decided, in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from qwen35.domain.capabilities import reason_kind
from qwen35.domain.finalize_policy import Decision
from qwen35.services.devices import capturing

logger = logging.getLogger("qwen35")


class DecisionLog:
    """Says each distinct decision once, at level info, and nothing inside CUDA graph capture.

    Decisions are one where their reasons differ in what came alone ("m requires 1..8192, got 9000" and "got 9001").
    """

    def __init__(self, is_capturing: Callable[[], bool] = capturing) -> None:
        self._capturing = is_capturing
        self._said: set[tuple[str, tuple[str, ...]]] = set()

    def note(self, what: str, decision: Decision) -> None:
        """Log ``decision`` about ``what`` ("finalize") unless it was said before."""
        kind = (what, tuple(map(reason_kind, decision.reasons)))
        if kind in self._said or self._capturing():
            return
        self._said.add(kind)
        verdict = "eligible" if decision.eligible else f"not eligible: {'; '.join(decision.reasons)}"
        logger.info("fused %s: %s", what, verdict)
