"""Serves a dispatcher's call by our service, or by SGLang's own kernel, and counts which and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from qwen35.adapters.sglang.seam_reasons import BoundedReasons
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import CaptureError, ContractError, UnsupportedError
from qwen35.services.counters import Counters
from qwen35.services.devices import capturing
from qwen35.services.gated_delta_rule import GatedDeltaRuleService

logger = logging.getLogger("qwen35")

PORT = "gated_delta_rule"
Result = TypeVar("Result")


def engine_name(kernel: object) -> str:
    """How counters name one of SGLang's own kernel objects."""
    return f"engine:{type(kernel).__name__}"


class KernelRouter:
    """``routes``: the phases that our ``service`` serves, and the adapter chosen for each; all others are SGLang's.

    ``checked`` asks for slot values to be normalised for checked mode, which reads them.
    """

    def __init__(
        self, routes: Mapping[Phase, str], service: GatedDeltaRuleService | None, counters: Counters,
        checked: bool = False,
    ) -> None:  # fmt: skip
        self.routes = dict(routes) if service is not None else {}
        self.checked = checked
        self._service, self._counters = service, counters
        self._reasons: dict[Phase, BoundedReasons] = {}

    @property
    def service(self) -> GatedDeltaRuleService | None:
        """The service, None where no phase is routed."""
        return self._service if self.routes else None

    def serve(
        self, phase: Phase, kernel: object, ours: Callable[[GatedDeltaRuleService], Result], own: Callable[[], Result]
    ) -> Result:
        """``ours`` where ``phase`` is routed; else, or where it refuses before anything is written, ``own``: the call
        of SGLang's ``kernel``, counted by kind of reason; one of each kind is logged."""
        if phase in self.routes and self._service is not None:
            try:
                return ours(self._service)
            except UnsupportedError as exc:
                reasons = exc.reasons
            except (ContractError, CaptureError) as exc:
                reasons = (str(exc),)
            for reason in reasons:
                self._count_refusal(phase, kernel, reason)
        result = own()
        self._counters.add("calls", port=PORT, phase=phase, adapter=engine_name(kernel), mode=_mode())
        return result

    def _count_refusal(self, phase: Phase, kernel: object, reason: str) -> None:
        reasons = self._reasons.setdefault(phase, BoundedReasons())
        line = reasons.line(reason)
        if line is not None:
            logger.warning("SGLang's own %s serves %s instead of %s: %s", type(kernel).__name__, phase,
                           self.routes[phase], line)  # fmt: skip
        self._counters.add(
            "fallbacks", port=PORT, phase=phase, mode=_mode(), adapter=engine_name(kernel),
            instead_of=self.routes[phase], reason=reasons.label(reason),
        )  # fmt: skip


def _mode() -> str:
    return "captured" if capturing() else "eager"
