"""The float64 oracle for one call, and the comparison with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qwen35.container import adapter
from qwen35.domain.capabilities import Phase
from qwen35.ports.support import PHASE_OF
from qwen35.testing.kit import Kit, Parts, serve
from qwen35.testing.measure import relative_error

ORACLE = "reference64"

#: Computes ``Kit.out_terms`` of one call when asked: few outputs need it, and it costs as much as the call.
Terms: TypeAlias = Callable[[], Tensor | None]


@dataclass(frozen=True, slots=True)
class Truth:
    """Float64 results: ``out``, the ``states`` written by slot, ``nodes`` of verify by (row of the
    intermediates, node), ``checkpoints``; ``terms`` of ``out``, for ``assert_close``."""

    out: Tensor | None = None
    terms: Terms | None = None
    states: Mapping[int, Tensor] = field(default_factory=dict)
    nodes: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)
    checkpoints: Tensor | None = None


@lru_cache
def _oracle(port: str, device: str) -> Any:
    return adapter(port, ORACLE, device=device)


def truth(kit: Kit, call: Any) -> Truth:
    """What ``call`` must give, computed on float64 copies on its own device; ``call`` is not touched.

    Only the slots that the call names are copied, so that pools of any size will do. Reads index tensors.
    """
    phase, parts = PHASE_OF[type(call)], kit.parts(call)
    few, used = _few_slots(parts)
    small = _upcast(few)
    served = serve(_oracle(kit.port, str(parts.pool.device)), kit.call(phase, small))
    return Truth(
        out=served.out,
        terms=None if phase is Phase.COMMIT else _terms(kit, phase, few),
        states=_written(phase, parts, small, used),
        nodes=_nodes(parts, small) if phase is Phase.VERIFY else {},
        checkpoints=served.checkpoints,
    )


def terms_of(kit: Kit, call: Any) -> Terms:
    """The terms of the outputs of ``call``, as it is now: the states that it reads are copied before it runs."""
    return _terms(kit, PHASE_OF[type(call)], _few_slots(kit.parts(call))[0])


def row_of(terms: Terms | None, row: int | list[int]) -> Terms:
    """The terms of one row of the outputs, or of several."""

    def of_row() -> Tensor | None:
        every = None if terms is None else terms()
        return None if every is None else every[row]

    return of_row


def _terms(kit: Kit, phase: Phase, few: Parts) -> Terms:
    return lambda: kit.out_terms(_oracle(kit.port, str(few.pool.device)), phase, _upcast(few))


def _few_slots(parts: Parts) -> tuple[Parts, list[int]]:
    """The same parts over a copy of the slots that they name, and those slots in the copy's order."""
    targets = parts.slots if parts.write_slots is None else parts.write_slots
    used = sorted({s for s in (*parts.slots.tolist(), *targets.tolist()) if s >= 0})
    place = {slot: i for i, slot in enumerate(used)} | {-1: -1}

    def moved(slots: Tensor) -> Tensor:
        return torch.tensor([place[s] for s in slots.tolist()], dtype=torch.int64, device=slots.device)

    # A pool of no slots has no strides to speak of, so there is always one.
    index = torch.tensor(used or [0], dtype=torch.int64, device=parts.pool.device)
    writes = None if parts.write_slots is None else moved(parts.write_slots)
    return replace(parts, pool=parts.pool[index], slots=moved(parts.slots), write_slots=writes), used


def _upcast(parts: Parts) -> Parts:
    def up(value: Any) -> Any:
        return value.to(torch.float64) if isinstance(value, Tensor) and value.is_floating_point() else value

    return replace(
        parts,
        pool=parts.pool.to(torch.float64, copy=True),
        tokens={name: up(t) for name, t in parts.tokens.items()},
        params={name: up(t) for name, t in parts.params.items()},
        intermediates=up(parts.intermediates),
        out=None,
    )


def _written(phase: Phase, parts: Parts, small: Parts, used: list[int]) -> dict[int, Tensor]:
    if phase is Phase.VERIFY:
        return {}
    targets = parts.slots if parts.write_slots is None else parts.write_slots
    live = [s for r, s in zip(parts.slots.tolist(), targets.tolist(), strict=True) if r >= 0 and s >= 0]
    return {slot: small.pool[used.index(slot)] for slot in live}


def _nodes(parts: Parts, small: Parts) -> dict[tuple[int, int], Tensor]:
    assert small.intermediates is not None
    slots = parts.slots.tolist()
    rows = range(len(slots)) if parts.rows is None else parts.rows.tolist()
    draft = next(iter(parts.tokens.values())).shape[1]
    live = [row for slot, row in zip(slots, rows, strict=True) if slot >= 0]
    return {(row, node): small.intermediates[row, node] for row in live for node in range(draft)}


def assert_close(
    what: str, got: Tensor, want: Tensor, bound: float, context: object, terms: Terms | None = None
) -> None:
    """Raise ``AssertionError`` where shapes differ or the relative error is over ``bound``.

    ``terms`` (None: nothing cancels) are asked for where the error is over ``bound`` against ``want`` alone.
    """
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)} instead of {list(want.shape)}; {context}"
    error = relative_error(got, want)
    if terms is not None and not error <= bound:
        error = relative_error(got, want, terms())
    assert error <= bound, f"{what}: relative error {error:.3g} exceeds {bound:.3g}; {context}"
