"""The engine that is timed has the host to itself, and every engine has the same cores when its turn comes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_cores import Cores, one_thread_each, session

#: A process with a child and a second thread, which says when both are there.
TREE = """
import subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def trees() -> Iterator[list[int]]:
    started = [
        subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(2)
    ]  # fmt: skip
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
    yield [process.pid for process in started]
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def cores_of(leader: int) -> set[frozenset[int]]:
    threads = (int(t.name) for p in session(leader) for t in Path(f"/proc/{p}/task").iterdir())
    return {frozenset(os.sched_getaffinity(thread)) for thread in threads}


def stopped(leader: int) -> set[bool]:
    def state(process: int) -> str:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]

    return {state(process) == "T" for process in session(leader)}


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not condition():
        threading.Event().wait(0.01)
    return condition()


def test_one_tree_runs_at_a_time_every_thread_on_the_same_cores(trees: list[int]) -> None:
    timed = frozenset(one_thread_each(os.sched_getaffinity(0)))
    first, second = trees
    assert all(len(session(leader)) == 2 for leader in trees)
    with Cores(trees) as cores:
        assert eventually(lambda: stopped(first) == stopped(second) == {True})
        assert cores.give(first)
        assert eventually(lambda: (stopped(first), stopped(second)) == ({False}, {True}))
        assert not cores.give(first)
        assert cores.give(second)
        assert eventually(lambda: (stopped(first), stopped(second)) == ({True}, {False}))
        assert cores_of(first) == cores_of(second) == {timed}
    assert eventually(lambda: stopped(first) == stopped(second) == {False})


def test_a_tree_that_ended_is_passed_over(trees: list[int]) -> None:
    with Cores(trees) as cores:
        os.killpg(trees[0], 9)
        assert eventually(lambda: "zombie" in Path(f"/proc/{trees[0]}/status").read_text())
        cores.give(trees[0])
        cores.give(trees[1])
        assert eventually(lambda: stopped(trees[1]) == {False})


def test_one_thread_of_each_core_is_used(tmp_path: Path) -> None:
    for core in range(6):  # two packages; 0 and 2 share a core, so do 4 and 5, as Linux numbers them or not
        where = tmp_path / f"cpu{core}" / "topology"
        where.mkdir(parents=True)
        (where / "physical_package_id").write_text(f"{core // 4}\n")
        (where / "core_id").write_text(f"{core % 2 if core < 4 else 0}\n")
    assert one_thread_each(range(6), tmp_path) == {0, 1, 4}
    assert one_thread_each([5, 2, 3], tmp_path) == {2, 3, 5}
    assert one_thread_each([3, 1], tmp_path / "nowhere") == {1, 3}
