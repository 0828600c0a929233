"""One phase's way to its adapter: the chosen one, and where configured the one that serves what it refuses."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from qwen35.domain.alignment import CapturedBranch, Placement
from qwen35.domain.capabilities import Phase, reason_kind
from qwen35.domain.errors import ContractError, UnsupportedError
from qwen35.services.counters import Counters, mode
from qwen35.services.devices import capturing

logger = logging.getLogger("qwen35")

Call = TypeVar("Call")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves a phase: ``adapter``, and the ``reasons`` why it is not the chosen one (none: it is). ``branch`` is
    the way that the latest call went there, in the adapter's words (None: it has not served yet, or does not say)."""

    port: str
    phase: Phase
    adapter: str
    reasons: tuple[str, ...] = ()
    branch: str | None = None


def placement(tensor: Tensor) -> Placement:
    """Where ``tensor`` lies; its memory is not kept alive."""
    return Placement(
        tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype),
        weakref.ref(tensor.untyped_storage()),
    )  # fmt: skip


class Route(Generic[Call, Result]):
    """Serves calls of one phase by ``primary``; by ``fallback`` what the primary refuses, counted by reason
    (and logged once a reason, whatever the values that came) once it has been served. What both refuse is one refusal.

    An adapter refuses with ``UnsupportedError`` before it writes anything, so the fallback gets the original
    tensors. Calls whose pool (``pool_of``) lies on another GPU than the current one are served with that one current.
    ``last`` is the decision of the latest call, with the branch that ``branch_of`` its adapter's name says when asked;
    ``captured`` holds the branch of every captured call, with the ``tensors(call)`` on which it hangs.
    """

    def __init__(
        self, port: str, phase: Phase, kind: type[Call], primary: tuple[str, Callable[[Call], Result]],
        fallback: tuple[str, Callable[[Call], Result]] | None, counters: Counters, pool_of: Callable[[Call], Tensor],
        tensors: Callable[[Call], tuple[tuple[str, Tensor], ...]] = lambda _: (),
        branch_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._port, self._phase, self._kind, self._counters = port, phase, kind, counters
        self._name, self._serve = primary
        self._pool_of, self._tensors, self._branch_of = pool_of, tensors, branch_of
        self._fallback = fallback if fallback is not None and fallback[0] != self._name else None
        self._told: set[tuple[str, ...]] = set()
        self._count_eager, self._count_captured = (self._counter(self._name, captured) for captured in (False, True))
        self.captured: dict[CapturedBranch, None] = {}
        self._chosen = Decision(port, phase, self._name)
        self._latest = self._chosen

    @property
    def last(self) -> Decision:
        """Who served the latest call, why and by which branch; before the first, who will."""
        return replace(self._latest, branch=self._branch_of(self._latest.adapter))

    def __call__(self, call: Call) -> Result:
        """Serve ``call``; raises ``UnsupportedError`` where nobody can, ``ContractError`` for another kind of call."""
        try:
            pool = self._pool_of(call)
            index = pool.get_device() if pool.is_cuda else -1
        except AttributeError:  # no call, or something in it is no tensor: the check names it
            index = -1
        if index < 0 or index == torch.cuda.current_device():
            return self._serve_here(call)
        with torch.cuda.device(index):
            return self._serve_here(call)

    def _serve_here(self, call: Call) -> Result:
        captured = capturing()
        try:
            result = self._serve(call)
        except UnsupportedError as exc:
            return self._fall_back(call, exc, captured)
        except (AttributeError, LookupError, TypeError) as exc:
            if isinstance(call, self._kind):
                raise
            raise ContractError(f"{self._phase} requires a {self._kind.__name__}, got {type(call).__name__}") from exc
        self._latest = self._chosen
        if captured:
            self._count_captured()
            self._keep(call, self._chosen)
        else:
            self._count_eager()
        return result

    def _counter(self, adapter: str, captured: bool) -> Callable[[], None]:
        return self._counters.counter(
            "calls", port=self._port, phase=self._phase, adapter=adapter, mode=mode(captured)
        )  # fmt: skip

    def _keep(self, call: Call, decision: Decision) -> None:
        placed = tuple((name, placement(tensor)) for name, tensor in self._tensors(call))
        taken = self._branch_of(decision.adapter)
        branch = CapturedBranch(self._phase, decision.adapter, decision.reasons, placed, taken)
        self.captured.pop(branch, None)  # an equal one may have hung on memory that was freed since
        self.captured[branch] = None

    def _fall_back(self, call: Call, refused: UnsupportedError, captured: bool) -> Result:
        if self._fallback is None:
            self._count_refusal(captured)
            raise refused
        name, serve = self._fallback
        try:
            result = serve(call)
        except UnsupportedError as exc:
            self._count_refusal(captured)
            what = f"{self._kind.__name__} for {self._name} and for {name}"
            raise UnsupportedError(what, (*refused.reasons, *exc.reasons)) from exc
        self._tell(name, refused.reasons, captured)
        self._latest = Decision(self._port, self._phase, name, refused.reasons)
        self._counter(name, captured)()
        if captured:
            self._keep(call, self._latest)
        return result

    def _count_refusal(self, captured: bool) -> None:
        self._counters.add(
            "refusals", port=self._port, phase=self._phase, adapter=self._name, mode=mode(captured)
        )  # fmt: skip

    def _tell(self, name: str, reasons: tuple[str, ...], captured: bool) -> None:
        """Count that ``name`` served what was refused for ``reasons``, and log it where it is new."""
        kinds = tuple(map(reason_kind, reasons))
        for kind in kinds:
            self._counters.add(
                "fallbacks", port=self._port, phase=self._phase, adapter=name, instead_of=self._name, reason=kind,
                mode=mode(captured),
            )  # fmt: skip
        if kinds not in self._told:
            self._told.add(kinds)
            logger.warning(
                "%s %s: %s serves instead of %s: %s", self._port, self._phase, name, self._name, "; ".join(reasons)
            )
