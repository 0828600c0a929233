"""How a failure of the plugin leaves a process of SGLang: in one line, and with nobody left waiting for it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from qwen35.adapters.sglang.seam import said
from qwen35.domain.errors import Qwen35Error, UnavailableError

logger = logging.getLogger("qwen35")


def end_scheduler(exc: Qwen35Error) -> NoReturn:
    """Raise ``SystemExit`` with one line, logged first, after telling the parent what SGLang tells it: SIGQUIT.

    SGLang tells it of an ``Exception`` only, with a traceback, and a data-parallel controller waits for ever for a
    scheduler that just ends.
    """
    line = f"qwen35: {exc}"
    logger.error("%s", line)
    parent = multiprocessing.parent_process()
    # SGLang makes schedulers by multiprocessing; a Ray actor's parent is not SGLang's.
    if parent is not None and parent.pid is not None and parent.is_alive():
        os.kill(parent.pid, signal.SIGQUIT)
    raise SystemExit(line) from exc


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Turn what SGLang raises in the body into ``UnavailableError`` for ``what``; errors of ours stay as they are."""
    try:
        yield
    except Qwen35Error:
        raise
    except Exception as exc:
        raise UnavailableError(what, [said(exc)]) from exc
