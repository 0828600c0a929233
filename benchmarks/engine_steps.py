"""One process of a suite: its command, its log, its time limit, and what is recorded where it fails."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_compare import say

LOG_TAIL = 12
#: No process is begun with less time left.
LEAST_S = 30


@dataclass(frozen=True, slots=True)
class Step:
    """``gpus``: the GPUs that it sees (None: as inherited); ``limit_s``: how long it may take."""

    name: str
    command: tuple[str, ...]
    log: Path
    limit_s: float
    gpus: str | None = None

    def failed(self, why: str) -> dict[str, Any]:
        """What is to be recorded of it."""
        tail = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL:] if self.log.is_file() else []
        say("\n".join((f"{self.name}: {why}", *(f"    {line[:200]}" for line in tail))))
        command = shlex.join(["python", *self.command[1:]])
        return {"name": self.name, "command": command, "why": why, "log": tail}


class Running:
    """A step that was begun; what it prints goes to its log."""

    def __init__(self, step: Step) -> None:
        self.step, self.began = step, time.monotonic()
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        if step.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = step.gpus
        with step.log.open("w") as log:
            self.process = subprocess.Popen(
                step.command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def end(self, limit_s: float) -> dict[str, Any] | None:
        """Wait for at most ``limit_s``, then end it with its children; None where it went well."""
        try:
            self.process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return self.step.failed(f"longer than {time.monotonic() - self.began:.0f} s")
        if self.process.returncode:
            return self.step.failed(f"exit status {self.process.returncode}")
        say(f"{self.step.name}: ended well after {time.monotonic() - self.began:.0f} s")
        return None


def run_step(step: Step, deadline: float = math.inf) -> dict[str, Any] | None:
    """Run it; None where it went well, else what is to be recorded.

    A step that is late, or still there at ``deadline`` (of time.monotonic), is ended with its children.
    """
    left = deadline - time.monotonic()
    if left < LEAST_S:
        return step.failed("the budget was spent")
    return Running(step).end(min(step.limit_s, left))
