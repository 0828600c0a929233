"""The host to itself for the engine that is timed, on the same cores for every engine, so that the pace is the same.

Idle engines poll: beside others, on whatever cores the system finds, an engine differs from itself by half at one row.
So all but one are stopped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
TOPOLOGY = Path("/sys/devices/system/cpu")


def one_thread_each(cores: Iterable[int], topology: Path = TOPOLOGY) -> set[int]:
    """The first of ``cores`` on each physical core: two threads of one slow each other down by half. All of them where
    the system does not say."""

    def place(core: int) -> object:
        where = topology / f"cpu{core}" / "topology"
        try:
            return (where / "physical_package_id").read_text(), (where / "core_id").read_text()
        except OSError:
            return core

    return set({place(core): core for core in sorted(cores, reverse=True)}.values())


def session(leader: int) -> list[int]:
    """The processes of the session that ``leader`` began."""
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def move(processes: Iterable[int], cores: set[int]) -> None:
    """Every thread of ``processes`` runs on ``cores`` from now on."""
    for process in processes:
        try:
            threads = [int(entry.name) for entry in (PROC / str(process) / "task").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for thread in threads:
            try:
                os.sched_setaffinity(thread, cores)
            except ProcessLookupError:
                continue


def tell(processes: Iterable[int], what: signal.Signals) -> None:
    """Send ``what`` to those that are still there."""
    for process in processes:
        try:
            os.kill(process, what)
        except ProcessLookupError:
            continue


class Cores:
    """Lets one of several sessions, by the process that leads it, run at a time, all on the same cores; at the end of
    its context all of them run again."""

    def __init__(self, leaders: Iterable[int]) -> None:
        self._sessions = {leader: session(leader) for leader in leaders}
        self._latest: int | None = None

    def __enter__(self) -> Cores:
        timed = one_thread_each(os.sched_getaffinity(0))
        for processes in self._sessions.values():
            move(processes, timed)
            tell(processes, signal.SIGSTOP)
        return self

    def give(self, leader: int) -> bool:
        """To ``leader``'s session; the one that had them stops. False where it has them already."""
        if leader == self._latest:
            return False
        if self._latest is not None:
            tell(self._sessions[self._latest], signal.SIGSTOP)
        tell(self._sessions[leader], signal.SIGCONT)
        self._latest = leader
        return True

    def __exit__(self, *_: object) -> None:
        for processes in self._sessions.values():
            tell(processes, signal.SIGCONT)
