"""A child process under Ctrl-C: what it measured is written, and none is left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen35.cli import child

READY = "import os, pathlib, sys, time; pathlib.Path('pid').write_text(str(os.getpid()))\n"
#: Needs longer to write than ``subprocess`` itself waits for a child after Ctrl-C.
WRITES_LATE = (
    READY
    + """
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    pathlib.Path("measured").write_text("all")
    sys.exit("kept")
"""
)
IGNORES = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + READY + "time.sleep(60)"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def interrupting(*after: float) -> None:
    """Ctrl-C for this process, as by a terminal, at these seconds after the child is ready."""

    def wait() -> None:
        while not Path("pid").exists() or not Path("pid").read_text():
            time.sleep(0.01)
        for seconds in after:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def run(code: str, grace: float = 30.0) -> tuple[int, str]:
    return child.run([sys.executable, "-c", code], shown=False, grace=grace)


def gone() -> bool:
    try:
        os.kill(int(Path("pid").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def seconds(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def test_status_and_what_was_said_are_handed_back() -> None:
    assert run("import sys; print('unseen'); sys.stderr.write('why'); sys.exit(3)") == (3, "why")


def test_ctrl_c_waits_for_the_child_to_write() -> None:
    interrupting(0.2)
    with pytest.raises(KeyboardInterrupt, match="kept"):
        run(WRITES_LATE)
    assert Path("measured").read_text() == "all"
    assert gone()


def test_a_second_ctrl_c_ends_the_child() -> None:
    interrupting(0.2, 0.6)

    def twice() -> None:
        with pytest.raises(KeyboardInterrupt):
            run(IGNORES)

    assert seconds(twice) < 20
    assert gone()


def test_a_child_that_does_not_end_is_ended() -> None:
    interrupting(0.2)

    def once() -> None:
        with pytest.raises(KeyboardInterrupt):
            run(IGNORES, grace=0.5)

    assert seconds(once) < 20
    assert gone()
