"""What the library costs and saves around FlashInfer's GDN kernels, in one run on one GPU. About a minute on an H200.

    python benchmarks/gdn_integration.py --out results/gdn_integration.json [--parts decode,host] [--profile]

Compared are FlashInfer behind the container, FlashInfer's own functions called with tensors that are ready, and the
reference integration's way on Hopper: gather the states, run the kernel, scatter them back. Every row of the JSON is
one claim with its goal; a row that could not be measured says why. A goal that is missed does not fail the run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gdn_claims import Claim, Session, faster, more
from gdn_host import extend_host_part, host_part
from gdn_memory import memory_part, scratch_part
from gdn_paths import (
    CRASHES,
    STATES,
    FlashInferDirect,
    Thunk,
    decode_calls,
    layout_of,
    misaligned,
    misaligned_parameters,
    queue_full_medians,
    replayed_kernels,
)
from qwen35.domain.capabilities import Phase
from qwen35.domain.geometry import public_geometry
from qwen35.ports.gated_delta_rule import DecodeCall, GatedDeltaRule
from qwen35.services.gated_delta_rule import PORT
from qwen35.services.platform import detect_platform
from qwen35.services.registry import AdapterRegistry
from qwen35.testing.machine import device_facts, versions
from qwen35.testing.measure import relative_error, time_graph
from qwen35.testing.workload import Row, random_call, random_pool, raw_gates

PREFILL_TOKENS = 16_384
OVERHEAD_BATCH = 64


def decode_part(session: Session) -> Iterator[Claim]:
    """Decode by index through the container against gather, kernel and scatter: graph replay, cold L2."""
    for name, state in STATES.items():
        for batch in (64, 256):
            calls = decode_calls(session.geometry, state, batch, session.seed)
            rule = session.rule("flashinfer", state, batch)
            direct = [FlashInferDirect.of(call) for call in calls]
            apart = _difference(rule, calls[0], direct[0])
            ways: dict[str, list[Thunk]] = {
                "container": [partial(rule.decode, call) for call in calls],
                "gathered": [path.gathered for path in direct], "direct": [path.by_index() for path in direct],
            }  # fmt: skip
            times = {}
            for way, thunks in ways.items():
                for thunk in thunks:
                    thunk()
                times[way] = asdict(time_graph(thunks, torch.device("cuda")))
            medians = {way: timing["median_us"] for way, timing in times.items()}
            yield faster(
                "decode", f"decode, {name} state, B = {batch}, against gather + kernel + scatter", medians,
                ("container", "gathered"), 3.5, {**times, "relative difference of outputs": apart},
            )  # fmt: skip


def _difference(rule: GatedDeltaRule, call: DecodeCall, direct: FlashInferDirect) -> float:
    """Both ways from the same states."""
    before = call.states.clone()
    ours = rule.decode(call).clone()
    call.states.copy_(before)
    theirs = direct.gathered()
    call.states.copy_(before)
    return relative_error(ours, theirs)


def overhead_part(session: Session) -> Iterator[Claim]:
    """Device time that guard and container add at B = 64, queue full and in a replay."""
    for name, state in STATES.items():
        calls = decode_calls(session.geometry, state, OVERHEAD_BATCH, session.seed)
        rule = session.rule("flashinfer", state, OVERHEAD_BATCH)
        bare = session.bare("flashinfer", state, OVERHEAD_BATCH)
        off = [misaligned(call) for call in calls]
        gates = misaligned_parameters(raw_gates(off[0]))
        off = [replace(c, gates=replace(raw_gates(c), A_log=gates.A_log, dt_bias=gates.dt_bias)) for c in off]
        ways: dict[str, list[Thunk]] = {
            "direct": [FlashInferDirect.of(call).by_index() for call in calls],
            "adapter": [partial(bare.decode, call) for call in calls],
            "container": [partial(rule.decode, call) for call in calls],
            "misaligned": [partial(rule.decode, call) for call in off],
        }  # fmt: skip
        found = queue_full_medians(ways)
        replayed = {way: time_graph(thunks, torch.device("cuda")).median_us for way, thunks in ways.items()}
        kernels = {way: replayed_kernels(thunks[0]) for way, thunks in ways.items()}
        detail = {"queue full us": found, "replay us": replayed, "kernels of a replay": kernels}
        where = f"{name} state, B = {OVERHEAD_BATCH}"
        for what, pair, goal in (
            ("guard + container over the adapter", ("container", "adapter"), 5.0),
            ("container over FlashInfer's function", ("container", "direct"), None),
            ("misaligned over aligned inputs", ("misaligned", "container"), None),
        ):
            yield more("overhead", f"{what}, queue full, {where}", found, pair, goal, detail)
        ours, theirs = Counter(kernels["container"]), Counter(kernels["adapter"])
        replay = Claim(
            "overhead", f"guard + container over the adapter, graph replay, {where}", unit="other kernels", at_most=0.0
        )
        if theirs:
            replay.value = float((ours - theirs).total() + (theirs - ours).total())
        else:
            replay.reasons.append("the profiler saw no kernel in a replay")
        yield replay
        bare.close()


def prefill_part(session: Session) -> Iterator[Claim]:
    """One long sequence: the sequence-split kernel against the one-pass kernel, each through the container."""
    layout, row = layout_of(session.geometry, torch.float32), Row(Phase.EXTEND, (PREFILL_TOKENS,))
    generator = torch.Generator("cuda").manual_seed(session.seed)
    pool = random_pool(layout, 3, generator)
    call: Any = random_call(layout, row, pool, torch.tensor([2], dtype=torch.int32, device="cuda"), generator)
    ways: dict[str, list[Thunk]] = {}
    outs, kinds = {}, (("split", "flashinfer", "on"), ("one pass", "flashinfer", "off"), ("triton", "triton", "auto"))
    for way, name, split in kinds:
        rule = session.rule(name, torch.float32, 1, PREFILL_TOKENS, prefill_split=split)
        before = pool.clone()
        outs[way] = rule.extend(call).out.clone()
        pool.copy_(before)
        ways[way] = [partial(rule.extend, call)]
    found = queue_full_medians(ways, rounds=5, launches=10)
    apart = {way: relative_error(outs[way], outs["one pass"]) for way in ("split", "triton")}
    detail = {"queue full us": found, "relative difference from one pass": apart}
    for way, goal in (("split", 1.6), ("triton", None)):
        what = f"prefill of 1 x {PREFILL_TOKENS:,}, {way}, against FlashInfer's one pass"
        yield faster("prefill", what, found, (way, "one pass"), goal, detail)


PARTS: dict[str, Callable[[Session], Iterator[Claim]]] = {
    "decode": decode_part, "overhead": overhead_part, "host": host_part, "extend_host": extend_host_part,
    "prefill": prefill_part, "memory": memory_part, "scratch": scratch_part,
}  # fmt: skip
#: Parts that are about FlashInfer alone.
NEEDS_FLASHINFER = ("decode", "overhead", "prefill", "scratch")


def measured(name: str, session: Session) -> Iterator[Claim]:
    """The claims of one part; in place of what cannot be measured, one that says why."""
    usable = session.registry.usable(PORT, "flashinfer")
    if name in NEEDS_FLASHINFER and not usable:
        yield Claim(name, f"every claim of {name}", reasons=[f"flashinfer: {reason}" for reason in usable.reasons])
        return
    try:
        yield from PARTS[name](session)
    except CRASHES as exc:
        yield Claim(name, f"the rest of {name}", reasons=[f"{type(exc).__name__}: {exc}"])
    finally:
        session.close()


def line(claim: Claim) -> str:
    shown = "-" if claim.value is None else f"{claim.value:.2f} {claim.unit}"
    verdict = {None: "", True: "met", False: "NOT MET"}[claim.met]
    return "  ".join(filter(None, [f"{claim.part}: {claim.what}:", shown, verdict, "; ".join(claim.reasons)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--geometry", default="35B-A3B", help="a public geometry")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; one rank's part is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes at B = 1")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    where = detect_platform("cuda")
    geometry = public_geometry(options.geometry).gdn.shard(options.tp)
    session = Session(options.seed, geometry, AdapterRegistry(where), options.profile)
    document: dict[str, Any] = {
        "kind": "gdn integration", "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]), "seed": options.seed, "device": device_facts(where),
        "versions": versions(), "geometry": asdict(session.geometry), "seconds": {}, "rows": [],
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in parts:
        begun = time.perf_counter()
        for claim in measured(name, session):
            document["rows"].append(claim.as_row())
            sys.stdout.write(line(claim) + "\n")
            sys.stdout.flush()
        document["seconds"][name] = round(time.perf_counter() - begun, 1)
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{options.out}: {document['seconds']}\n")


if __name__ == "__main__":
    main()
