"""Ctrl-C before a command has begun, while torch is imported: torch itself would lose it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qwen35.cli.interrupts import deferred

COMMANDS = {
    "doctor": ("doctor",),
    "generate": ("generate", "nowhere", "--token-ids", "1", "--logits", "logits.safetensors"),
}


def interrupted_at(imported: str, folder: Path, *words: str) -> tuple[int, str]:
    """Exit status and stderr of a command that gets SIGINT when ``imported``, or a module below it, was imported."""
    command = [sys.executable, "-X", "importtime", "-m", "qwen35", *words]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"QWEN35_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        name = line.rpartition("|")[2].strip()
        if name == imported or name.startswith(f"{imported}."):
            process.send_signal(signal.SIGINT)
            break
    said = [line for line in process.stderr.read().splitlines() if not line.startswith("import time:")]
    return process.wait(timeout=120), "\n".join(said)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("imported", ["typer", "numpy", "torch"])
def test_ctrl_c_while_a_framework_is_imported_is_not_lost(
    imported: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """NumPy is imported by torch's extension module, which clears whatever is raised there."""
    status, said = interrupted_at(imported, tmp_path, *words)
    assert (status, said) == (130, "interrupted")
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted_block(times: int, reached: list[str], then: Exception | None = None) -> None:
    """A deferred block that gets SIGINT so many times."""
    with deferred():
        for _ in range(times):
            interrupt()
        reached.append("end")
        if then is not None:
            raise then


def test_it_is_raised_at_the_end_whatever_else_comes_of_the_block() -> None:
    for then in (None, AttributeError("module 'numpy' has no attribute 'ndarray'")):
        reached: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            interrupted_block(1, reached, then)
        assert reached == ["end"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_does_not_wait() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_block(2, reached)
    assert reached == []


def test_who_handles_or_ignores_the_signal_goes_on_doing_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_nothing() -> None:
    seen = []

    def enter() -> None:
        with deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
