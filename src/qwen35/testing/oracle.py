"""The float64 oracle for one call, and the comparison with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qwen35.container import adapter
from qwen35.domain.capabilities import Phase
from qwen35.ports.support import PHASE_OF
from qwen35.testing.kit import Kit, Parts, serve

ORACLE = "reference64"


@dataclass(frozen=True, slots=True)
class Truth:
    """Float64 results: ``out``, the ``states`` written by slot, ``nodes`` of verify by (row of the
    intermediates, node), ``checkpoints``."""

    out: Tensor | None = None
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
    targets = parts.slots if parts.write_slots is None else parts.write_slots
    used = sorted({s for s in (*parts.slots.tolist(), *targets.tolist()) if s >= 0})
    small = _upcast(parts, used)
    served = serve(_oracle(kit.port, str(parts.pool.device)), kit.call(phase, small))
    return Truth(
        out=served.out,
        states=_written(phase, parts, small, used),
        nodes=_nodes(parts, small) if phase is Phase.VERIFY else {},
        checkpoints=served.checkpoints,
    )


def _upcast(parts: Parts, used: list[int]) -> Parts:
    place = {slot: i for i, slot in enumerate(used)} | {-1: -1}

    def moved(slots: Tensor) -> Tensor:
        return torch.tensor([place[s] for s in slots.tolist()], dtype=torch.int64, device=slots.device)

    def up(value: Any) -> Any:
        return value.to(torch.float64) if isinstance(value, Tensor) and value.is_floating_point() else value

    # A pool of no slots has no strides to speak of, so there is always one.
    index = torch.tensor(used or [0], dtype=torch.int64, device=parts.pool.device)
    return replace(
        parts,
        pool=parts.pool[index].to(torch.float64),
        slots=moved(parts.slots),
        write_slots=None if parts.write_slots is None else moved(parts.write_slots),
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


def relative_error(got: Tensor, want: Tensor) -> float:
    """``||got - want|| / ||want||``, Frobenius, in float64; NaN where ``got`` has NaN; exact where ``want`` is 0."""
    reference = want.to(torch.float64)
    difference = float((got.to(torch.float64) - reference).norm())
    size = float(reference.norm())
    if size == 0.0:
        return difference if difference == 0.0 or difference != difference else float("inf")
    return difference / size


def assert_close(what: str, got: Tensor, want: Tensor, bound: float, context: object) -> None:
    """Raise ``AssertionError`` where shapes differ or the relative error is over ``bound`` (or is NaN)."""
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)} instead of {list(want.shape)}; {context}"
    error = relative_error(got, want)
    assert error <= bound, f"{what}: relative error {error:.3g} exceeds {bound:.3g}; {context}"
