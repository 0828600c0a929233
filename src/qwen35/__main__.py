"""``python -m qwen35``, and the command ``qwen35``."""

from __future__ import annotations

import sys

from qwen35.cli.house import EXIT_INTERRUPTED
from qwen35.cli.interrupts import deferred


def main() -> None:
    """The command line. Ctrl-C ends in ``EXIT_INTERRUPTED`` from here on."""
    try:
        with deferred():
            from qwen35.cli.main import app
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(EXIT_INTERRUPTED) from None
    app(prog_name="qwen35")


if __name__ == "__main__":
    main()
