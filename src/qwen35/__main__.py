"""``python -m qwen35``, and the command ``qwen35``."""

from __future__ import annotations

import faulthandler
import sys


def main() -> None:
    """The command line. Ctrl-C ends in exit status 130 from here on; before, it ends the interpreter's own start.

    Where a kernel's code crashes the process, the Python stack is written first.
    """
    faulthandler.enable()
    try:
        from qwen35.cli.interrupts import deferred

        with deferred():
            from qwen35.cli.main import app
        app(prog_name="qwen35")
    except KeyboardInterrupt:
        from qwen35.cli.house import EXIT_INTERRUPTED

        sys.stderr.write("interrupted\n")
        raise SystemExit(EXIT_INTERRUPTED) from None


if __name__ == "__main__":
    main()
