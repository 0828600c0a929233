"""Engines that are up together and timed in turn, so that what changes about the machine changes for all of them.

The driver listens on a Unix socket. ``sglang_engine.py run --turns SOCKET`` connects when its engine is up, says its
tag, and does what it is asked for, a JSON object a line, until the driver hangs up: time a generation, or say how long
the device takes for a step or a prefill of one.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from engine_compare import say
from engine_cores import Cores
from engine_steps import Running, Step

#: Timed after one round that is thrown away.
ROUNDS = 15
#: How often each engine is asked for the device's part.
TRACES = 3
#: The longest that one generation may take, and that an engine may take to end.
ANSWER_S, END_S = 60.0, 60.0
#: New tokens of the generation in which the device's part of a decode is looked at; of a prefill none is asked for.
DEVICE_STEPS = 24


@dataclass(frozen=True, slots=True)
class Measure:
    """Tokens a second of decode by the difference of two lengths, or of prefill by prompts of one new token.

    ``tries``: how often a turn makes each generation, of which the fastest counts. What else the host does can only
    add to it, up to half of a generation that its Python paces.
    """

    batch: int
    length: int
    long: int = 1
    short: int = 0
    tries: int = 1

    @property
    def name(self) -> str:
        """As documents have it."""
        if self.short:
            return f"decode tokens/s, batch {self.batch}"
        return f"prefill tokens/s, {self.length} tokens"

    def of(self, seconds: Callable[[int], float]) -> float:
        """``seconds`` of a number of new tokens."""
        if not self.short:
            return self.batch * self.length / seconds(self.long)
        return self.batch * (self.long - self.short) / (seconds(self.long) - seconds(self.short))


MEASURES = (
    *(Measure(batch, 128, long=136, short=8, tries=tries) for batch, tries in ((1, 3), (8, 3), (64, 2))),
    Measure(1, 128, tries=12), Measure(1, 8192, tries=6),
)  # fmt: skip


def serve(path: str, tag: str, answers: Mapping[str, Callable[..., Any]]) -> None:
    """The engine's side: of each line, answer with what ``answers`` has under its "what", given the rest."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        with line.makefile("rw") as talk:
            tell(talk, tag)
            for asked in talk:
                given = json.loads(asked)
                tell(talk, answers[given.pop("what")](**given))


def tell(talk: TextIO, what: Any) -> None:
    """One line."""
    talk.write(json.dumps(what) + "\n")
    talk.flush()


def middle(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of several traces of a step the median of each time, the lowest and the highest as ``..._range``, each of them
    in the order they were made as ``..._each``, and how many there were. Anything else is of the first; a trace without
    the step counts only where all are."""
    there = [trace for trace in traces if "span_us" in trace] or traces[:1]
    found = {**there[0], "traces": len(there)}
    for what in ("span_us", "kernels_us"):
        values = [trace[what] for trace in there if what in trace]
        if values:
            found |= {what: median(values), f"{what}_range": [min(values), max(values)], f"{what}_each": values}
    return found


class Turns:
    """The driver's side. ``samples``: by engine and measure, one of each round; ``rounds``: how many there are, for
    every engine that came up; ``device_steps``: by engine and measure, see ``middle``."""

    def __init__(self, steps: Sequence[Step], path: Path, deadline: float) -> None:
        self.failures: list[dict[str, Any]] = []
        self.samples: dict[str, dict[str, list[float]]] = {}
        self.rounds: dict[str, dict[str, int]] = {}
        self.device_steps: dict[str, dict[str, Any]] = {}
        self._traces: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._talks: dict[str, TextIO] = {}
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
            server.settimeout(0.5)
            self._running = {step.name: Running(step) for step in steps}
            self._meet(server, deadline)
        path.unlink(missing_ok=True)

    def _meet(self, server: socket.socket, deadline: float) -> None:
        """Until every engine that lives is up, or late."""

        def awaited(one: Running) -> bool:
            until = min(deadline, one.began + one.step.limit_s)
            return one.step.name not in self._talks and one.alive and time.monotonic() < until

        while any(awaited(one) for one in self._running.values()):
            try:
                line, _ = server.accept()
            except TimeoutError:
                continue
            line.settimeout(ANSWER_S)
            talk = line.makefile("rw")
            tag = json.loads(talk.readline())
            self._talks[tag] = talk
            say(f"{tag}: up after {time.monotonic() - self._running[tag].began:.0f} s")

    def run(self, measures: Sequence[Measure], rounds: int, deadline: float, traces: int = TRACES) -> None:
        """The device's part of every measure of every engine, ``traces`` times, then every measure of every engine,
        round after round.

        One engine runs at a time; whoever was first is last in the next round.
        """
        self.rounds = {name: {measure.name: 0 for measure in measures} for name in self._talks}
        with Cores(self._running[name].process.pid for name in self._talks) as cores:
            for number in range(traces):
                for name in self._order(number):
                    for measure in measures:
                        self._one(cores, name, measure, None, deadline)
            for number in range(rounds + 1 if rounds else 0):
                for measure in measures:
                    for name in self._order(number):
                        self._one(cores, name, measure, number, deadline)

    def _order(self, number: int) -> list[str]:
        """Of the engines that answer, in a round."""
        names = [name for name in self._running if name in self._talks]
        first = number % len(names) if names else 0
        return names[first:] + names[:first]

    def _one(self, cores: Cores, name: str, measure: Measure, number: int | None, deadline: float) -> None:
        """One measure of one engine; ``number``: of the round, None for the device's part."""
        if name not in self._talks or time.monotonic() > deadline:
            return
        try:
            if cores.give(self._running[name].process.pid):
                self._ask(name, "seconds", measure, measure.short or 1, 0)  # it slept: its caches are cold
            if number is None:
                found = self._ask(name, "device", measure, DEVICE_STEPS if measure.short else 0, 0)
                traces = self._traces.setdefault((name, measure.name), [])
                traces.append(found)
                self.device_steps.setdefault(name, {})[measure.name] = middle(traces)
                return
            taken = measure.of(lambda new: self._fastest(name, measure, new, number))
        except (OSError, ValueError) as error:
            self.failures.append(self._running[name].step.failed(f"{measure.name}: {error!r}"))
            del self._talks[name]
            return
        if number:
            self.samples.setdefault(name, {}).setdefault(measure.name, []).append(taken)
            self.rounds[name][measure.name] += 1

    def _fastest(self, name: str, measure: Measure, new: int, number: int) -> float:
        """Seconds of the fastest try of a turn; no two generations of one length have the same prompts."""
        seeds = range(number * measure.tries + 1, (number + 1) * measure.tries + 1)
        return min(float(self._ask(name, "seconds", measure, new, seed)) for seed in seeds)

    def _ask(self, name: str, what: str, measure: Measure, new: int, seed: int) -> Any:
        talk = self._talks[name]
        tell(talk, {"what": what, "batch": measure.batch, "length": measure.length, "new": new, "seed": seed})
        return json.loads(talk.readline())

    def end(self) -> None:
        """Hang up, and wait for what the engines still do."""
        for talk in self._talks.values():
            talk.close()
        late = time.monotonic() + END_S
        for name, one in self._running.items():
            failure = one.end(late - time.monotonic() if name in self._talks else 0.0)
            self.failures += [failure] if failure else []
