"""Runs a suite of engines one after another, or one on each GPU, and compares them.

    python benchmarks/engine_suite.py small --out DIR [--gpus 2] [--only off,triton] [--budget 580] [--list]
    python benchmarks/engine_suite.py throughput --out DIR [--rounds 15] [--traces 3] [--measures 8] [--after FILE]

Suites: small, radix, refresh, shadow, defaults, throughput, fusion (two GPUs), spec, parity, parity_drafts;
engine_suites.py has what they run. DIR gets a result and a log of each engine, and the documents ``engine_NAME.json``
that are to be committed. An engine that fails or takes longer than its limit is recorded in them and stops no other.
Results that are there already are not made again, so a suite that was cut off, or that --budget ended, goes on where it
was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_compare import SHOWN, document, say
from engine_model import where_and_when
from engine_steps import Step, run_step
from engine_suites import MODELS, SUITES, Engine, Suite
from engine_turns import MEASURES, ROUNDS, TRACES, Measure, Turns

HERE = Path(os.path.relpath(Path(__file__).parent))
ENGINE_SCRIPT = str(HERE / "sglang_engine.py")
#: Making a model, transformers' answer, and scripts that read recordings.
OTHER_LIMIT_S = 240
PORT_STEP = 1_000


@dataclass(frozen=True, slots=True)
class Places:
    """``out`` for results, logs and documents; ``work`` for models and recordings."""

    suite: str
    out: Path
    work: Path

    def result(self, name: str) -> Path:
        """Where the result of an engine is."""
        return self.out / f"{self.suite}-{name}.json"

    def filled(self, text: str) -> str:
        """``text`` with its places filled in."""
        text = re.sub(r"{model:(\w+)}", lambda match: str(self.work / match[1]), text)
        return text.replace("{work}", str(self.work)).replace("{out}", str(self.out))

    def step(self, name: str, *command: str, limit_s: float = OTHER_LIMIT_S, gpus: str | None = None) -> Step:
        """A process of this suite."""
        log = self.out / f"{self.suite}-{name}.log"
        return Step(name, (sys.executable, *map(self.filled, command)), log, limit_s, gpus)


def engine_step(places: Places, engine: Engine, gpus: str, port: int, *more: str) -> Step:
    """``run`` for one engine, with ``more`` arguments."""
    settings = ("--set", *engine.settings) if engine.settings else ()
    return places.step(
        engine.name, ENGINE_SCRIPT, "run", f"{{model:{engine.model}}}", "--out", str(places.result(engine.name)),
        "--tag", engine.name, "--plugin", engine.plugin, *settings, "--engine", *engine.engine, f"port={port}",
        *engine.flags, *more, limit_s=engine.limit_s, gpus=gpus,
    )  # fmt: skip


def preparations(places: Places, suite: Suite, engines: Sequence[Engine]) -> list[Step]:
    """The models that are not there yet, and transformers' answer."""
    named = {engine.model for engine in engines}
    named |= {name for engine in engines for name in re.findall(r"{model:(\w+)}", " ".join(engine.flags))}
    steps = [
        places.step(f"model-{name}", ENGINE_SCRIPT, "make-model", f"{{model:{name}}}", *MODELS[name])
        for name in sorted(named) if not (places.work / name / "config.json").is_file()
    ]  # fmt: skip
    if suite.truth and not places.result("truth").is_file():
        out = str(places.result("truth"))
        steps.append(places.step("truth", ENGINE_SCRIPT, "truth", "{model:small}", "--out", out))
    return steps


def engine_steps(places: Places, engines: Sequence[Engine], slots: Sequence[str], first_port: int) -> list[Step]:
    """As ``--list`` shows them: GPUs in turn."""
    return [
        engine_step(places, engine, slots[i % len(slots)], first_port + PORT_STEP * (i % len(slots)))
        for i, engine in enumerate(engines)
    ]


def run_engines(
    places: Places, engines: Sequence[Engine], slots: Sequence[str], first_port: int, deadline: float
) -> list[dict[str, Any]]:
    """All of them, one at a time in each slot of GPUs; what failed."""
    free: queue.Queue[int] = queue.Queue()
    for slot in range(len(slots)):
        free.put(slot)

    def one(engine: Engine) -> dict[str, Any] | None:
        slot = free.get()
        try:
            return run_step(engine_step(places, engine, slots[slot], first_port + PORT_STEP * slot), deadline)
        finally:
            free.put(slot)

    with ThreadPoolExecutor(len(slots)) as pool:
        return [failure for failure in pool.map(one, engines) if failure is not None]


def run_in_turn(
    places: Places, engines: Sequence[Engine], gpus: str, args: argparse.Namespace, deadline: float
) -> list[dict[str, Any]]:
    """All of them together on the same GPUs, timed in turn; what failed. Their results get the figures."""
    path = Path(tempfile.mkdtemp(prefix="turns-")) / "socket"
    steps = [
        engine_step(places, engine, gpus, args.port + PORT_STEP * i, "--turns", str(path))
        for i, engine in enumerate(engines)
    ]
    turns = Turns(steps, path, deadline)
    while args.after and not args.after.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    turns.run(args.measures, args.rounds, deadline, args.traces)
    turns.end()
    failures: list[dict[str, Any]] = turns.failures
    for name in turns.rounds:
        if places.result(name).is_file():
            record_turns(places.result(name), turns, name, args.rounds)
    return failures


def record_turns(result: Path, turns: Turns, name: str, asked: int) -> None:
    """Add an engine's figures to its result, and how many rounds they are of, of those ``asked`` for."""
    samples = turns.samples.get(name, {})
    found = {
        "samples": samples, "bench": {measure: statistics.median(values) for measure, values in samples.items()},
        "rounds": {"asked": asked, "made": turns.rounds[name]}, "device_steps": turns.device_steps.get(name, {}),
    }  # fmt: skip
    result.write_text(json.dumps(json.loads(result.read_text()) | found, indent=1))


def measures_of(sizes: str) -> list[Measure]:
    """Those of ``sizes``, "8,128": decode of 8 rows and prefill of 128 tokens. Raises ``ArgumentTypeError``."""
    there = {measure.batch if measure.short else measure.length: measure for measure in MEASURES}
    asked = sizes.split(",")
    if unknown := set(asked) - set(map(str, there)):
        raise argparse.ArgumentTypeError(f"no measure of {', '.join(sorted(unknown))}: of {', '.join(map(str, there))}")
    return [measure for size, measure in there.items() if str(size) in asked]


def gpu_slots(suite: Suite, gpus: Sequence[str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES is for engines that run at the same time. Raises ``SystemExit`` for too few GPUs."""
    each = max(engine.gpus for engine in suite.engines)
    if len(gpus) < each:
        raise SystemExit(f"this suite requires {each} GPUs for one engine, got --gpus {len(gpus)}")
    slots = [",".join(gpus[i : i + each]) for i in range(0, len(gpus) - each + 1, each)]
    return slots[:1] if suite.in_turn else slots


def write_documents(places: Places, suite: Suite, asked: Collection[str], failures: list[dict[str, Any]]) -> None:
    """Compare the results that are there; engines that were ``asked`` for and have none are named.

    A document is left alone where its first engine has no result and was not asked for.
    """
    for name, members in suite.documents.items():
        there = [member for member in members if places.result(member).is_file()]
        missing = [member for member in members if member in asked and member not in there]
        if members[0] not in {*there, *missing}:
            continue
        whole = {**where_and_when(), "suite": places.suite, "missing": missing, "failures": failures}
        if members[0] in there:
            runs = [json.loads(places.result(member).read_text()) for member in there]
            made = document(runs)
            for row in made["rows"]:
                say(json.dumps({key: value for key, value in row.items() if key in SHOWN}))
            whole = (
                made
                | {"suite_command": whole["command"]}
                | {key: whole[key] for key in ("suite", "missing", "failures")}
            )
        (places.out / f"engine_{name}.json").write_text(json.dumps(whole, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one suite; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "qwen35-engines")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--beside", type=int, default=1, help="engines on one GPU at once, where they are not timed")
    parser.add_argument("--port", type=int, default=31_000, help="the first; another for each suite that runs beside")
    parser.add_argument("--only", default="", help="engines by name, separated by commas")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="for everything together")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of engines that are timed in turn")
    parser.add_argument("--traces", type=int, default=TRACES, help="of the device's part, before the rounds")
    parser.add_argument("--measures", type=measures_of, default=MEASURES, metavar="SIZE,SIZE",
                        help="only decodes of so many rows and prefills of so many tokens")  # fmt: skip
    parser.add_argument("--after", type=Path, metavar="FILE", help="time nothing before it is there: other work's end")
    parser.add_argument("--again", action="store_true", help="also engines whose results are there")
    parser.add_argument("--list", action="store_true", help="say the commands and run nothing")
    args = parser.parse_args(arguments)
    suite, places = SUITES[args.suite], Places(args.suite, args.out, args.work)
    slots = gpu_slots(suite, visible(args.gpus))
    names = set(args.only.split(",")) if args.only else {engine.name for engine in suite.engines}
    if unknown := names - {engine.name for engine in suite.engines}:
        raise SystemExit(f"suite {args.suite} has no engine {', '.join(sorted(unknown))}")
    wanted = [engine for engine in suite.engines if engine.name in names]
    engines = [engine for engine in wanted if args.again or not places.result(engine.name).is_file()]
    if suite.in_turn and engines:
        engines = wanted
    before = preparations(places, suite, engines)
    after = [places.step(script[0].removesuffix(".py"), str(HERE / script[0]), *script[1:]) for script in suite.scripts]
    if args.list:
        steps = (*before, *engine_steps(places, engines, slots, args.port), *after)
        say("\n".join(shlex.join(step.command) for step in steps))
        return 0
    deadline = time.monotonic() + args.budget
    for folder in (places.out, places.work):
        folder.mkdir(parents=True, exist_ok=True)
    failures = [failure for step in before if (failure := run_step(step, deadline)) is not None]
    if suite.in_turn:
        failures += run_in_turn(places, engines, slots[0], args, deadline) if engines else []
    else:
        failures += run_engines(places, engines, slots * args.beside, args.port, deadline)
    failures += [failure for step in after if (failure := run_step(step, deadline)) is not None]
    write_documents(places, suite, names | ({"truth"} if suite.truth else set()), failures)
    return 1 if failures else 0


def visible(count: int) -> list[str]:
    """The first ``count`` GPUs of those that this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (allowed.split(",") if allowed else [str(i) for i in range(count)])[:count]


if __name__ == "__main__":
    raise SystemExit(main())
