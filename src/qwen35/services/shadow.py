"""A second adapter that repeats a sample of the live eager calls on copies, and is compared with what was served."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from qwen35.domain.capabilities import Capabilities, Phase, Support
from qwen35.domain.errors import ContractError, UnsupportedError
from qwen35.domain.precision import ErrorBound
from qwen35.domain.shadow import ShadowSpec
from qwen35.ports.adapter import SaysBranches
from qwen35.ports.gated_delta_rule import (
    CommitCall,
    DecodeCall,
    ExtendCall,
    ExtendResult,
    GatedDeltaRule,
    GdnCall,
    GdnPlan,
    VerifyCall,
)
from qwen35.ports.support import dtype_name
from qwen35.services.counters import Counters
from qwen35.services.devices import capturing
from qwen35.services.shadow_copy import NULL_PLACE, CallCopy, copy_call, largest_error

logger = logging.getLogger("qwen35")

PORT = "gated_delta_rule"
INSIDE_CAPTURE = "inside CUDA graph capture"
OFF_CONTRACT = "the call does not meet the contract"
PREPARE = "prepare"

_Call = TypeVar("_Call", DecodeCall, ExtendCall, VerifyCall, CommitCall)
_Result = TypeVar("_Result")
#: What a call returned: out and checkpoints.
_Returned = tuple[Tensor | None, Tensor | None]


class Shadow:
    """Runs ``adapter`` behind the served one, and keeps whatever it does or raises from the caller.

    ``adapter`` must be an instance of its own: its scratch grows with calls that nobody planned, at addresses
    that no captured graph may know. Counters: ``shadow_calls``, ``shadow_divergences``, ``shadow_refusals``,
    ``shadow_errors``; gauge ``shadow_error_max``, the largest relative error of each phase.
    """

    def __init__(self, spec: ShadowSpec, adapter: GatedDeltaRule, counters: Counters) -> None:
        self._spec, self._adapter, self._counters = spec, adapter, counters
        self._served: Counter[Phase] = Counter()
        self._largest = dict.fromkeys(Phase, 0.0)
        self._told: set[tuple[str, str]] = set()
        self._plan: GdnPlan | None = None
        self._inside = {
            phase: counters.counter(
                "shadow_refusals", port=PORT, phase=phase, adapter=spec.adapter, reason=INSIDE_CAPTURE
            )
            for phase in Phase
        }
        for phase in Phase:
            counters.watch("shadow_error_max", self._reader(phase), port=PORT, phase=phase, adapter=spec.adapter)

    def captured(self, phase: Phase) -> None:
        """Count a call inside capture, which is never repeated."""
        self._inside[phase]()

    def due(self, phase: Phase) -> bool:
        """Whether the next eager call of ``phase`` is one of the sample."""
        return self._spec.samples(self._served[phase] + 1)

    def served(self, phase: Phase) -> None:
        """Count an eager call that was served."""
        self._served[phase] += 1

    def copy(self, phase: Phase, call: GdnCall) -> CallCopy | None:
        """What ``call`` is about to read, before anybody writes; None, counted, where it cannot be copied.

        Reads index tensors, so it waits for the device.
        """
        copy = None
        with self._apart(phase):
            try:
                copy = copy_call(call)
            except ContractError as exc:
                raise UnsupportedError(f"copying {phase}", [OFF_CONTRACT]) from exc
        return copy

    def compare(self, phase: Phase, copy: CallCopy, served_by: tuple[str, Capabilities], returned: _Returned) -> None:
        """Repeat ``copy`` and compare what was left and returned with what was served. Waits for the device."""
        with self._apart(phase), torch.no_grad():
            support = self._adapter.supports(copy.call)
            if not support:
                raise UnsupportedError(f"{phase} for the shadow", support.reasons)
            name, served = served_by
            bound = _bound(copy.call, phase, (name, served), (self._spec.adapter, self._adapter.capabilities))
            mine = self._run(copy.call)
            self._count("shadow_calls", phase)
            for what, got, want, lead in _pairs(copy, mine, returned):
                limit = bound.output if what == "out" else bound.state
                self._judge(phase, what, name, largest_error(got, want, lead), limit)

    def prepare(self, plan: GdnPlan) -> None:
        """Prepare the adapter for calls within ``plan`` on pools of copies; a refusal is counted."""
        if plan == self._plan:
            return
        self._plan = plan
        with self._apart(PREPARE):
            self._adapter.prepare(replace(plan, null_slot=NULL_PLACE))

    def refresh_parameters(self) -> None:
        """Refresh the adapter's copies of parameters, in place."""
        with self._apart("refresh_parameters"):
            self._adapter.refresh_parameters()

    def close(self) -> None:
        """Close the adapter. Idempotent."""
        with self._apart("close"):
            self._adapter.close()

    def _run(self, call: GdnCall) -> _Returned:
        if isinstance(call, ExtendCall):
            result = self._adapter.extend(call)
            return result.out, result.checkpoints
        if isinstance(call, CommitCall):
            self._adapter.commit(call)
            return None, None
        return self._adapter.decode(call) if isinstance(call, DecodeCall) else self._adapter.verify(call), None

    def _judge(self, phase: Phase, what: str, served_by: str, error: float, bound: float) -> None:
        self._largest[phase] = max(self._largest[phase], error)
        if error <= bound:
            return
        self._count("shadow_divergences", phase, what=what)
        self._tell(
            phase, what,
            f"the shadow {self._spec.adapter} differs from {served_by}, which serves, in {what} by a relative "
            f"{error:.3g}, beyond the {bound:.3g} that both state",
        )  # fmt: skip

    @contextmanager
    def _apart(self, phase: str) -> Iterator[None]:
        """Keep every error from the caller: refusals are counted by reason, the rest counted and logged."""
        try:
            yield
        except UnsupportedError as exc:
            for reason in exc.reasons:
                self._count("shadow_refusals", phase, reason=reason)
        except Exception as exc:  # noqa: BLE001 - a kernel package may raise anything, and none of it is the caller's
            kind = type(exc).__name__
            self._count("shadow_errors", phase, reason=kind)
            self._tell(phase, kind, f"the shadow {self._spec.adapter} failed with {kind}: {exc}")

    def _tell(self, phase: str, what: str, text: str) -> None:
        if (phase, what) not in self._told:
            self._told.add((phase, what))
            logger.warning("%s %s: %s. The served result stands; what follows is only counted", PORT, phase, text)

    def _count(self, name: str, phase: str, **labels: str) -> None:
        self._counters.add(name, port=PORT, phase=phase, adapter=self._spec.adapter, **labels)

    def _reader(self, phase: Phase) -> Callable[[], float]:
        return lambda: self._largest[phase]


class ShadowedGatedDeltaRule:
    """``adapter``, whose every answer is served as it is, with ``shadow`` behind it."""

    def __init__(self, name: str, adapter: GatedDeltaRule, shadow: Shadow) -> None:
        self._name, self._adapter, self._shadow = name, adapter, shadow

    @property
    def capabilities(self) -> Capabilities:
        """Those of the adapter."""
        return self._adapter.capabilities

    @property
    def branches(self) -> Mapping[Phase, str]:
        """Those that the adapter says it took."""
        return self._adapter.branches if isinstance(self._adapter, SaysBranches) else {}

    def prepare(self, plan: GdnPlan) -> None:
        """Prepare both; only the adapter's refusal is raised."""
        self._adapter.prepare(plan)
        self._shadow.prepare(plan)

    def supports(self, call: GdnCall) -> Support:
        """What the adapter says."""
        return self._adapter.supports(call)

    def decode(self, call: DecodeCall) -> Tensor:
        """See the port."""
        return self._serve(Phase.DECODE, call, self._adapter.decode, lambda out: (out, None))

    def extend(self, call: ExtendCall) -> ExtendResult:
        """See the port."""
        return self._serve(Phase.EXTEND, call, self._adapter.extend, lambda result: (result.out, result.checkpoints))

    def verify(self, call: VerifyCall) -> Tensor:
        """See the port."""
        return self._serve(Phase.VERIFY, call, self._adapter.verify, lambda out: (out, None))

    def commit(self, call: CommitCall) -> None:
        """See the port."""
        self._serve(Phase.COMMIT, call, self._adapter.commit, lambda _: (None, None))

    def refresh_parameters(self) -> int:
        """Refresh both; returns how many copies the adapter has, the shadow's not counted."""
        copies = self._adapter.refresh_parameters()
        self._shadow.refresh_parameters()
        return copies

    def close(self) -> None:
        """Close both."""
        self._adapter.close()
        self._shadow.close()

    def _serve(
        self, phase: Phase, call: _Call, serve: Callable[[_Call], _Result], returned: Callable[[_Result], _Returned]
    ) -> _Result:
        if capturing():
            result = serve(call)
            self._shadow.captured(phase)
            return result
        copy = self._shadow.copy(phase, call) if self._shadow.due(phase) else None
        result = serve(call)
        # Only here: a call that the adapter refuses is its fallback's to count.
        self._shadow.served(phase)
        if copy is not None:
            self._shadow.compare(phase, copy, (self._name, self._adapter.capabilities), returned(result))
        return result


def _bound(call: GdnCall, phase: Phase, *adapters: tuple[str, Capabilities]) -> ErrorBound:
    """The sum of what the adapters state; nothing for commit, which copies."""
    if isinstance(call, CommitCall):
        return ErrorBound(0.0, 0.0)
    lacking = [name for name, can in adapters if phase not in can.precision]
    if lacking:
        raise UnsupportedError(f"comparing {phase}", [f"{name} states no error bound" for name in lacking])
    dtypes = dtype_name(call.q.dtype), dtype_name(call.states.dtype)
    bounds = [can.precision[phase].bound(*dtypes) for _, can in adapters]
    return ErrorBound(sum(b.output for b in bounds), sum(b.state for b in bounds))


def _pairs(
    copy: CallCopy, mine: _Returned, served: _Returned
) -> Iterator[tuple[str, Tensor | None, Tensor | None, int]]:
    """What is compared: its name, the shadow's, the served, and how many leading dimensions count each for itself."""
    yield "out", mine[0], served[0], 0
    yield "states", copy.states(), copy.served_states(), 1
    yield "intermediates", copy.nodes(), copy.served_nodes(), 2
    yield "checkpoints", mine[1], served[1], 1
