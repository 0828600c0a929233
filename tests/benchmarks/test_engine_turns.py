"""Engines that are timed in turn: all are asked the same in every round, and who fails stops no other."""

from __future__ import annotations

import sys
import tempfile
import time
from ast import literal_eval
from pathlib import Path

import engine_turns
from engine_compare import paired
from engine_steps import Step
from engine_turns import Measure, Turns

BENCHMARKS = Path(engine_turns.__file__).parent

#: An engine of 10 ms a token and ``slow`` times that, half as fast every other time it is asked the same; the third
#: answer ends it where ``dies``.
ENGINE = """
import sys
sys.path.insert(0, {folder!r})
from engine_turns import serve
answers = []
def device(batch, length, new, seed):
    return {{"span_us": {slow} * 1000.0 * batch, "new": new}}
def seconds(batch, length, new, seed):
    answers.append((batch, length, new, seed))
    if {dies} and len(answers) > 2:
        raise SystemExit(3)
    held_up = 1 + [asked[:3] for asked in answers].count((batch, length, new)) % 2
    return held_up * {slow} * 0.01 * (new + length / 100)
serve({path!r}, {tag!r}, {{"seconds": seconds, "device": device}})
print(answers)
"""


def engine(folder: Path, path: Path, tag: str, slow: float = 1.0, *, dies: bool = False) -> Step:
    code = ENGINE.format(folder=str(BENCHMARKS), path=str(path), tag=tag, slow=slow, dies=dies)
    return Step(tag, (sys.executable, "-c", code), folder / f"{tag}.log", 30.0)


def timed(log: Path) -> list[tuple[int, ...]]:
    """What an engine printed that it was asked, without what only wakes it or is traced: the seed of that is 0."""
    return [asked for asked in literal_eval(log.read_text()) if asked[-1]]


def test_engines_are_asked_in_turn_and_compared_round_by_round(tmp_path: Path) -> None:
    path = Path(tempfile.mkdtemp()) / "socket"
    steps = [
        engine(tmp_path, path, "plain"), engine(tmp_path, path, "slow", 2.0), engine(tmp_path, path, "dies", dies=True),
        Step("absent", (sys.executable, "-c", "raise SystemExit('no such model')"), tmp_path / "absent.log", 30.0),
    ]  # fmt: skip
    turns = Turns(steps, path, time.monotonic() + 60)
    turns.run((Measure(2, 100, long=11, short=1, tries=2), Measure(1, 200, tries=3)), 3, time.monotonic() + 60)
    turns.end()
    decode, prefill = "decode tokens/s, batch 2", "prefill tokens/s, 200 tokens"
    assert {name: len(values) for name, values in turns.samples["plain"].items()} == {decode: 3, prefill: 3}
    assert abs(turns.samples["plain"][decode][0] - 2 * 10 / 0.1) < 1e-6
    assert abs(turns.samples["plain"][prefill][0] - 200 / 0.03) < 1e-6
    steps = {"plain": 2000.0, "slow": 4000.0, "dies": 2000.0}
    assert turns.device_steps == {
        name: {decode: {"span_us": us, "new": engine_turns.DEVICE_STEPS}, prefill: {"span_us": us / 2, "new": 0}}
        for name, us in steps.items()
    }
    ratio = paired(turns.samples["plain"], turns.samples["slow"])
    assert ratio[decode] == ratio[prefill] == {"median": 0.5, "low": 0.5, "high": 0.5, "of_medians": 0.5}
    assert sorted({failure["name"] for failure in turns.failures}) == ["absent", "dies"]
    said, also = (timed(tmp_path / f"{name}.log") for name in ("plain", "slow"))
    assert said == also, "every engine is given the same prompts"
    prefills = [seed for batch, _, _, seed in said if batch == 1]
    assert len(prefills) == len(set(prefills)) == 4 * 3, "and new ones in every try of every round"


def test_a_round_that_is_late_is_left_out(tmp_path: Path) -> None:
    path = Path(tempfile.mkdtemp()) / "socket"
    turns = Turns([engine(tmp_path, path, "plain")], path, time.monotonic() + 60)
    turns.run((Measure(1, 100),), 3, time.monotonic())
    turns.end()
    assert turns.samples == {}
    assert turns.failures == []


def test_no_engine_that_came_up_is_no_round(tmp_path: Path) -> None:
    path = Path(tempfile.mkdtemp()) / "socket"
    gone = Step("absent", (sys.executable, "-c", "raise SystemExit('no such model')"), tmp_path / "absent.log", 30.0)
    turns = Turns([gone], path, time.monotonic() + 60)
    turns.run((Measure(1, 100),), 3, time.monotonic() + 60)
    turns.end()
    assert turns.samples == {}
    assert [failure["name"] for failure in turns.failures] == ["absent"]
