"""What the laws need to know of a port: how its calls are made from parts that both ports share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from qwen35.domain.capabilities import Phase
from qwen35.ports.gated_delta_rule import ExtendCall, ExtendResult
from qwen35.ports.support import PHASE_OF
from qwen35.testing.case import Case
from qwen35.testing.limits import Limits

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The tensors of one call under names that both ports share.

    ``tokens`` are the per-token tensors (q, k, v and gates, or x), ``params`` what holds for all tokens
    (A_log, dt_bias and scale, or weight, bias and activation), ``pool`` is ``states`` or ``windows``.
    """

    pool: Tensor
    slots: Tensor
    tokens: Mapping[str, Tensor] = field(default_factory=lambda: _NONE)
    params: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    write_slots: Tensor | None = None
    out: Tensor | None = None
    cu_seqlens: Tensor | None = None
    seq_lens_host: tuple[int, ...] | None = None
    fresh: Tensor | None = None
    every: int | None = None
    intermediates: Tensor | None = None
    rows: Tensor | None = None
    parents: Tensor | None = None
    last: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What a call returned."""

    out: Tensor | None = None
    checkpoints: Tensor | None = None


class Kit(ABC):
    """A port as the laws see it."""

    #: Name of the port.
    port: str
    #: Token tensors that engines cut from one projection, in its column order.
    groups: tuple[tuple[str, ...], ...]
    #: Plan fields of the port are made by ``plan``; the pool's field name in calls.
    pool_name: str

    @abstractmethod
    def sizes(self, limits: Limits) -> SearchStrategy[Any]:
        """Sizes of a case."""

    @abstractmethod
    def tokens(self, sizes: Any, leading: tuple[int, ...], source: torch.Generator) -> dict[str, Tensor]:
        """Dense per-token tensors in their dtypes."""

    @abstractmethod
    def params(self, sizes: Any, source: torch.Generator) -> dict[str, Any]:
        """What holds for all tokens."""

    @abstractmethod
    def out_shape(self, sizes: Any) -> tuple[int, ...]:
        """Trailing sizes of the output."""

    @abstractmethod
    def plan(self, case: Case[Any], device: torch.device, null_slot: int | None) -> Any:
        """A plan that the case fits into."""

    @abstractmethod
    def call(self, phase: Phase, parts: Parts) -> Any:
        """The call object of the port."""

    @abstractmethod
    def parts(self, call: Any) -> Parts:
        """The reverse of ``call``."""

    @abstractmethod
    def out_terms(self, oracle: Any, phase: Phase, parts: Parts) -> Tensor | None:
        """Root of the sum of the squares of the terms that each output sums: float64, of the output's shape, zero for
        padding. ``oracle`` is a float64 adapter, ``parts`` are float64 and their pool is written. None: the outputs
        of one call never cancel all together."""


def serve(adapter: Any, call: Any) -> Served:
    """Hand ``call`` to the adapter's method for it."""
    phase = PHASE_OF[type(call)]
    if phase is Phase.COMMIT:
        adapter.commit(call)
        return Served()
    result = getattr(adapter, phase)(call)
    wanted = ExtendResult if type(call) is ExtendCall else Tensor
    if not isinstance(result, wanted):
        raise AssertionError(f"{phase} must return {wanted.__name__}, got {type(result).__name__}")
    return Served(result.out, result.checkpoints) if isinstance(result, ExtendResult) else Served(result)
