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
from engine_turns import Measure, Turns, middle

BENCHMARKS = Path(engine_turns.__file__).parent

#: An engine of 10 ms a token and ``slow`` times that, half as fast every other time it is asked the same; the third
#: answer ends it where ``dies``. Its device needs 1,000 us a row, then 1,300, then 1,100, and so on.
ENGINE = """
import sys
sys.path.insert(0, {folder!r})
from engine_turns import serve
answers, traced = [], []
def device(batch, length, new, seed):
    traced.append((batch, length))
    return {{"span_us": {slow} * (1000, 1300, 1100)[traced.count((batch, length)) % 3 - 1] * batch, "new": new}}
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
    assert turns.rounds["plain"] == turns.rounds["slow"] == {decode: 3, prefill: 3}
    assert turns.rounds["dies"] == {decode: 0, prefill: 0}
    for name, times in (("plain", 1), ("slow", 2)):
        step, other = turns.device_steps[name][decode], turns.device_steps[name][prefill]
        one = [1000 * times, 1300 * times, 1100 * times]
        assert step == {"span_us": 2200 * times, "span_us_range": [2000 * times, 2600 * times], "traces": 3,
                        "span_us_each": [2 * us for us in one], "new": engine_turns.DEVICE_STEPS}  # fmt: skip
        assert other == {"span_us": 1100 * times, "span_us_range": [1000 * times, 1300 * times], "traces": 3,
                         "span_us_each": one, "new": 0}  # fmt: skip
    ratio = paired(turns.samples["plain"], turns.samples["slow"])
    assert ratio[decode] == ratio[prefill] == {"median": 0.5, "low": 0.5, "high": 0.5, "of_medians": 0.5}
    assert sorted({failure["name"] for failure in turns.failures}) == ["absent", "dies"]
    said, also = (timed(tmp_path / f"{name}.log") for name in ("plain", "slow"))
    assert said == also, "every engine is given the same prompts"
    prefills = [seed for batch, _, _, seed in said if batch == 1]
    assert len(prefills) == len(set(prefills)) == 4 * 3, "and new ones in every try of every round"


def test_traces_without_the_step_count_only_where_all_are() -> None:
    empty, low = {"forwards": 0}, {"forwards": 8, "span_us": 9.0, "kernels_us": 5.0}
    high = {"forwards": 7, "span_us": 8.0, "kernels_us": 6.0}
    assert middle([empty]) == {"forwards": 0, "traces": 1}
    assert middle([empty, low, high]) == {
        "forwards": 8, "traces": 2, "span_us": 8.5, "span_us_range": [8.0, 9.0], "span_us_each": [9.0, 8.0],
        "kernels_us": 5.5, "kernels_us_range": [5.0, 6.0], "kernels_us_each": [5.0, 6.0],
    }  # fmt: skip


def test_engines_are_traced_in_turn(tmp_path: Path) -> None:
    path, shared = Path(tempfile.mkdtemp()) / "socket", tmp_path / "order"
    code = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from engine_turns import serve
def device(**asked):
    with open({str(shared)!r}, "a") as order:
        print(sys.argv[1], asked["batch"], file=order)
    return {{"span_us": 1.0}}
serve({str(path)!r}, sys.argv[1], {{"seconds": lambda **asked: 1.0, "device": device}})
"""
    steps = [Step(name, (sys.executable, "-c", code, name), tmp_path / name, 30.0) for name in ("one", "two")]
    turns = Turns(steps, path, time.monotonic() + 60)
    turns.run((Measure(1, 100), Measure(2, 100)), 0, time.monotonic() + 60, traces=2)
    turns.end()
    first, then = ["one 1", "one 2"], ["two 1", "two 2"]
    assert shared.read_text().splitlines() == [*first, *then, *then, *first]


def test_a_round_that_is_late_is_left_out(tmp_path: Path) -> None:
    path = Path(tempfile.mkdtemp()) / "socket"
    turns = Turns([engine(tmp_path, path, "plain")], path, time.monotonic() + 60)
    turns.run((Measure(1, 100),), 3, time.monotonic())
    turns.end()
    assert turns.samples == {}
    assert turns.rounds == {"plain": {"prefill tokens/s, 100 tokens": 0}}, "and it is said"
    assert turns.failures == []


def test_no_engine_that_came_up_is_no_round(tmp_path: Path) -> None:
    path = Path(tempfile.mkdtemp()) / "socket"
    gone = Step("absent", (sys.executable, "-c", "raise SystemExit('no such model')"), tmp_path / "absent.log", 30.0)
    turns = Turns([gone], path, time.monotonic() + 60)
    turns.run((Measure(1, 100),), 3, time.monotonic() + 60)
    turns.end()
    assert turns.samples == {}
    assert [failure["name"] for failure in turns.failures] == ["absent"]
