"""Parts of gdn_integration.py that are about memory: what a padded decode adds, and what scratch ends at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from gdn_claims import Claim, Session
from gdn_paths import CRASHES, NULL_SLOT, STATES, layout_of, misaligned, misaligned_parameters
from qwen35.domain.capabilities import Phase
from qwen35.services.alignment_guard import AlignmentGuard
from qwen35.services.gated_delta_rule import PORT
from qwen35.testing.workload import Row, random_call, random_pool, raw_gates

POOL, BATCHES, STREAMS = 4000, 1000, 3
#: The reference takes copies of states on purpose: it is reported without a goal.
ORACLES = ("reference", "reference64")


def memory_part(session: Session) -> Iterator[Claim]:
    """Peak memory that one padded decode adds, by adapter, on a pool of 4,000 slots."""
    for name in session.registry.names(PORT):
        usable = session.registry.usable(PORT, name)
        for dtype, state in STATES.items():
            what = f"padded decode by {name}, {dtype} state, pool of {POOL:,}"
            claim = Claim("memory", what, unit="slots", at_most=None if name in ORACLES else 2.0)
            try:
                if usable:
                    claim.value, claim.detail = padded_decode(session, name, state)
                claim.reasons += usable.reasons
            except CRASHES as exc:
                claim.reasons.append(f"{type(exc).__name__}: {exc}")
            yield claim


def padded_decode(session: Session, name: str, state: torch.dtype) -> tuple[float, dict[str, Any]]:
    """Slots of peak memory that the second of two equal calls adds, and the bytes of both."""
    layout = layout_of(session.geometry, state)
    rule = session.rule(name, state, 4)
    generator = torch.Generator("cuda").manual_seed(session.seed)
    g = session.geometry
    pool = torch.zeros(POOL, g.value_heads, g.value_width, g.key_width, dtype=state, device="cuda")
    slots = torch.tensor([7, -1, POOL - 1, -1], dtype=torch.int32, device="cuda")
    call: Any = random_call(layout, Row(Phase.DECODE, (1,) * 4), pool, slots, generator)
    added = []
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        rule.decode(call)
        torch.cuda.synchronize()
        added.append(torch.cuda.max_memory_allocated() - held)
    slot = g.state_elements * state.itemsize
    return added[1] / slot, {"bytes of the first call": added[0], "bytes of the second": added[1], "slot": slot}


def scratch_part(session: Session) -> Iterator[Claim]:
    """Scratch after 1,000 batch sizes on 3 streams, everything but the pool misaligned."""
    rule = session.rule("flashinfer", torch.float32, BATCHES)
    guard = rule.adapters[Phase.DECODE][1]
    assert isinstance(guard, AlignmentGuard)
    layout, largest = layout_of(session.geometry, torch.float32), Row(Phase.DECODE, (1,) * BATCHES)
    generator = torch.Generator("cuda").manual_seed(session.seed)
    pool = random_pool(layout, BATCHES + 1, generator)
    slots = torch.arange(NULL_SLOT + 1, BATCHES + 1, dtype=torch.int32, device="cuda")
    whole: Any = random_call(layout, largest, pool, slots, generator)
    whole = misaligned(whole)
    gates = misaligned_parameters(raw_gates(whole))
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    torch.cuda.synchronize()
    most = shapes = 0
    for batch in range(1, BATCHES + 1):
        cut = replace(
            whole, q=whole.q[:batch], k=whole.k[:batch], v=whole.v[:batch], slots=whole.slots[:batch],
            out=whole.out[:batch], gates=replace(gates, a=gates.a[:batch], b=gates.b[:batch]),
        )  # fmt: skip
        for stream in streams:
            with torch.cuda.stream(stream):
                rule.decode(cut)
        most = max(most, guard.scratch_bytes)
        shapes += STREAMS * sum(t.numel() * t.element_size() for t in (cut.q, cut.k, cut.v, cut.slots, cut.out))
    torch.cuda.synchronize()
    detail = {
        "scratch_bytes": most, "scratch_bound": guard.scratch_bound, "parameter_bytes": guard.parameter_bytes,
        "bytes of a buffer for each shape and stream": shapes,
    }  # fmt: skip
    yield Claim(
        "scratch", f"scratch of {BATCHES:,} batch sizes on {STREAMS} streams, against the stated bound",
        most / guard.scratch_bound, "of the bound", at_most=1.0, detail=detail,
    )  # fmt: skip
