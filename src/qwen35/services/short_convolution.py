"""The short convolution as the container offers it: one adapter for all phases, checked where asked, counted."""

from __future__ import annotations

from operator import attrgetter

from torch import Tensor

from qwen35.domain.capabilities import Capabilities, Phase, Support
from qwen35.ports.admission import check_call
from qwen35.ports.short_convolution import (
    ConvCall,
    ConvCommitCall,
    ConvDecodeCall,
    ConvExtendCall,
    ConvPlan,
    ConvVerifyCall,
    ShortConvolution,
)
from qwen35.services.counters import Counters
from qwen35.services.devices import capturing, on
from qwen35.services.routing import Decision, Route

PORT = "short_convolution"
_WINDOWS = attrgetter("windows")


class ShortConvolutionService:
    """Hands every call to the adapter called ``name``; ``checked`` mode as in ``GatedDeltaRuleService``."""

    def __init__(self, name: str, adapter: ShortConvolution, counters: Counters, checked: bool = False) -> None:
        self._adapter, self._checked = adapter, checked
        self._decode = Route(PORT, Phase.DECODE, ConvDecodeCall, (name, adapter.decode), None, counters, _WINDOWS)
        self._extend = Route(PORT, Phase.EXTEND, ConvExtendCall, (name, adapter.extend), None, counters, _WINDOWS)
        self._verify = Route(PORT, Phase.VERIFY, ConvVerifyCall, (name, adapter.verify), None, counters, _WINDOWS)
        self._commit = Route(PORT, Phase.COMMIT, ConvCommitCall, (name, adapter.commit), None, counters, _WINDOWS)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the adapter."""
        return self._adapter.capabilities

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Who served the latest call of each phase."""
        return tuple(route.last for route in (self._decode, self._extend, self._verify, self._commit))

    def prepare(self, plan: ConvPlan) -> None:
        """See the port; with the plan's GPU current."""
        with on(plan.device if isinstance(plan, ConvPlan) else None):
            self._adapter.prepare(plan)

    def supports(self, call: ConvCall) -> Support:
        """See the port."""
        return self._adapter.supports(call)

    def decode(self, call: ConvDecodeCall) -> Tensor:
        """See the port."""
        self._check(call)
        return self._decode(call)

    def extend(self, call: ConvExtendCall) -> Tensor:
        """See the port."""
        self._check(call)
        return self._extend(call)

    def verify(self, call: ConvVerifyCall) -> Tensor:
        """See the port."""
        self._check(call)
        return self._verify(call)

    def commit(self, call: ConvCommitCall) -> None:
        """See the port."""
        self._check(call)
        self._commit(call)

    def refresh_parameters(self) -> int:
        """See the port."""
        return self._adapter.refresh_parameters()

    def close(self) -> None:
        """See the port."""
        self._adapter.close()

    def _check(self, call: ConvCall) -> None:
        if self._checked and not capturing():
            check_call(call, values=True)
