"""The engine that is timed has cores of its own, and every engine has the same ones when its turn comes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_cores import Cores, by_core, halves, session

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


def test_every_thread_of_the_timed_tree_moves_and_moves_back(trees: list[int]) -> None:
    timed, others = map(frozenset, halves(os.sched_getaffinity(0)))
    if timed == others:
        pytest.skip("one core")
    first, second = trees
    assert all(len(session(leader)) == 2 for leader in trees)
    cores = Cores(trees)
    assert cores_of(first) == cores_of(second) == {others}
    cores.give(first)
    assert (cores_of(first), cores_of(second)) == ({timed}, {others})
    cores.give(second)
    assert (cores_of(first), cores_of(second)) == ({others}, {timed})


def test_a_tree_that_ended_is_passed_over(trees: list[int]) -> None:
    cores = Cores(trees)
    os.killpg(trees[0], 9)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{trees[0]}/status").read_text().find("zombie") < 0:
        threading.Event().wait(0.01)
    cores.give(trees[0])
    cores.give(trees[1])
    timed, _ = map(frozenset, halves(os.sched_getaffinity(0)))
    assert cores_of(trees[1]) == {timed}


def test_threads_of_one_core_stay_together(tmp_path: Path) -> None:
    for core in range(4):  # two sockets' worth of siblings, numbered as Linux does: 0 and 2 share a core
        where = tmp_path / f"cpu{core}" / "topology"
        where.mkdir(parents=True)
        (where / "physical_package_id").write_text("0\n")
        (where / "core_id").write_text(f"{core % 2}\n")
    assert by_core(range(4), tmp_path) == [0, 2, 1, 3]
    assert by_core([3, 1], tmp_path / "nowhere") == [1, 3]
