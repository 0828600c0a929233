"""A child process that may finish writing when Ctrl-C ends its parent."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

#: Seconds that a child has to write what it measured, table and plot included.
GRACE_S = 15.0


def run(command: Sequence[str], *, shown: bool, grace: float = GRACE_S) -> tuple[int, str]:
    """The exit status of ``command`` and what it wrote on stderr; its stdout goes to ours where it is ``shown``.

    Ctrl-C is handed to the child once, and it has ``grace`` seconds to end; a second one ends it at once.
    ``KeyboardInterrupt`` is raised after that, with what the child wrote on stderr. No child is left behind.
    """
    # In a group of its own it does not get the terminal's Ctrl-C as well, which would be its second.
    child = subprocess.Popen(
        command, stdout=None if shown else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        said = child.communicate()[1]
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interrupt(child, grace)) from None
    finally:
        child.kill()
        child.wait()
    return child.returncode, said


def _interrupt(child: subprocess.Popen[str], grace: float) -> str:
    child.send_signal(signal.SIGINT)
    try:
        return child.communicate(timeout=grace)[1]
    except subprocess.TimeoutExpired:
        return ""
