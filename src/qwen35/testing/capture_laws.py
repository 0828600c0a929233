"""Laws of both ports about CUDA graphs, which need a GPU, and about the scratch that has to be there before them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from qwen35.domain.capabilities import Clause, Phase
from qwen35.ports.adapter import HoldsScratch
from qwen35.testing.bench import Bench, Refused, Trial
from qwen35.testing.case import Case
from qwen35.testing.kit import Kit, serve
from qwen35.testing.law import Law
from qwen35.testing.slot_laws import law
from qwen35.testing.strategies import Wish

REPLAYS = 3
#: The one law of this module that needs no GPU.
BOUNDED = "scratch stays within its bound"


def replays(bench: Bench, case: Case[Any]) -> None:
    """A captured call, replayed with new values, slots and padding at the captured addresses, is right each time.

    Parameters count from ``refresh_parameters`` on, as after an engine's weight update.
    """
    trial = bench.trial(case)
    _prepare(bench, trial)
    side = warm_up(bench, trial)
    graph = torch.cuda.CUDAGraph()
    call = trial.call
    with torch.cuda.graph(graph, stream=side):
        captured = serve(bench.adapter, call)
    for turn in range(1, REPLAYS + 1):
        now = changed(bench, case, turn)
        trial.load(bench.trial(now))
        bench.adapter.refresh_parameters()
        # An eager call in between must not take anything from the graph, nor leave anything to it.
        bench.run(bench.trial(replace(now, seed=now.seed ^ 7)).call)
        torch.cuda.empty_cache()
        want = trial.truth()
        graph.replay()
        torch.cuda.synchronize()
        trial.only_written_slots_changed()
        trial.other_nodes_unchanged()
        if case.phase is not Phase.COMMIT:
            trial.padded_rows_are_zero(captured)
        trial.matches(captured, want)


def no_waiting(bench: Bench, case: Case[Any]) -> None:
    """A prepared call never makes the host wait for the device."""
    trial = bench.trial(case)
    _prepare(bench, trial)
    warm_up(bench, trial)
    call = trial.call
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        serve(bench.adapter, call)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def scratch_stays(bench: Bench, case: Case[Any]) -> None:
    """Capture of a call that was prepared and warmed up makes no scratch, by what the adapter says it holds.

    What is made inside capture comes from the graph's pool, whose memory other graphs may share.
    """
    adapter, trial = bench.adapter, bench.trial(case)
    assert isinstance(adapter, HoldsScratch)
    _prepare(bench, trial)
    side = warm_up(bench, trial)
    call, held = trial.call, adapter.scratch_bytes
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
        captured = serve(adapter, call)
    now = adapter.scratch_bytes
    del captured
    assert now <= held, f"capture made {now - held} bytes of scratch beside {held}, from the graph's pool; {case}"


def scratch_bounded(bench: Bench, case: Case[Any]) -> None:
    """What the adapter says it holds is never more than what it says it never exceeds, from the plan on."""
    adapter, trial = bench.adapter, bench.trial(case)
    assert isinstance(adapter, HoldsScratch)
    _prepare(bench, trial)
    _within_bound(adapter, "prepare", case)
    bench.run(trial.call)
    _within_bound(adapter, case.phase, case)


def _within_bound(adapter: HoldsScratch, after: str, case: Case[Any]) -> None:
    held, bound = adapter.scratch_bytes, adapter.scratch_bound
    assert 0 <= held <= bound, f"after {after} {held} bytes of scratch are held, and the bound is {bound}; {case}"


def changed(bench: Bench, case: Case[Any], turn: int) -> Case[Any]:
    """The same shapes with other values, slots, padding, rows and accepted nodes."""
    choice = replace(case, seed=case.seed + turn).choices()
    rows = len(case.slots)
    first = bench.limits.first_slot
    slots = [s if choice.random() < 0.7 else -1 for s in choice.sample(range(first, case.pool), rows)]
    more: dict[str, Any] = {}
    if case.write_slots is not None:
        more["write_slots"] = tuple(s if choice.random() < 0.7 else -1 for s in slots)
    if case.rows is not None:
        more["rows"] = tuple(choice.sample(range(case.capacity), rows))
    if case.last:
        more["last"] = tuple(choice.randint(-1, case.draft - 1) for _ in range(rows))
    if case.parents is not None:
        more["parents"] = tuple(tuple(choice.randint(-1, t - 1) for t in range(case.draft)) for _ in range(rows))
    if case.fresh is not None:
        more["fresh"] = tuple(choice.random() < 0.5 for _ in range(rows))
    return replace(case, seed=case.seed + turn, slots=tuple(slots), **more)


def _prepare(bench: Bench, trial: Trial) -> None:
    support = bench.adapter.supports(trial.call)
    if not support:
        raise Refused(support.reasons)
    bench.prepare(trial.case)


def warm_up(bench: Bench, trial: Trial) -> torch.cuda.Stream:
    """Run once on a side stream, as engines do before they capture on it, and put every buffer back."""
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        serve(bench.adapter, trial.call)
    torch.cuda.current_stream().wait_stream(side)
    trial.restore()
    torch.cuda.synchronize()
    return side


def _gpu(bench: Bench) -> tuple[str, ...]:
    return () if bench.place.type == "cuda" else ("CUDA graphs need a GPU",)


def _gpu_extend(bench: Bench) -> tuple[str, ...]:
    offered = bench.adapter.capabilities.captures_extend
    return _gpu(bench) + (() if offered else ("capture of extend is not offered",))


def _holds_scratch(bench: Bench) -> tuple[str, ...]:
    return () if isinstance(bench.adapter, HoldsScratch) else ("the adapter does not say how much scratch it holds",)


def _gpu_scratch(bench: Bench) -> tuple[str, ...]:
    return _gpu(bench) + _holds_scratch(bench)


def _gpu_extend_scratch(bench: Bench) -> tuple[str, ...]:
    return _gpu_extend(bench) + _holds_scratch(bench)


def capture_laws(kit: Kit) -> list[Law]:
    """The laws of this module for one port."""
    laws = []
    for phase in Phase:
        needs = _gpu_extend if phase is Phase.EXTEND else _gpu
        laws.append(law(kit, Clause.CAPTURE, phase, "replays see new values", replays, Wish(tree=None), needs=needs))
        laws.append(
            law(kit, Clause.CAPTURE, phase, "nothing waits for the device", no_waiting, Wish(tree=None), needs=needs)
        )
        needs = _gpu_extend_scratch if phase is Phase.EXTEND else _gpu_scratch
        laws.append(
            law(kit, Clause.CAPTURE, phase, "scratch is made before capture", scratch_stays, Wish(tree=None),
                needs=needs)
        )  # fmt: skip
        laws.append(
            law(kit, Clause.CAPTURE, phase, BOUNDED, scratch_bounded, Wish(tree=None), needs=_holds_scratch,
                most_examples=5)
        )  # fmt: skip
    return laws
