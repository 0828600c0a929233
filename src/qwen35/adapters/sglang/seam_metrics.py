"""Our counters on SGLang's Prometheus endpoint."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from qwen35.adapters.sglang.seam import said
from qwen35.services.counters import Counters

logger = logging.getLogger("qwen35")

#: Set by SGLang's launcher, before it spawns schedulers, where metrics are on.
DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
#: Every label that a counter of ours may carry; one that a counter does not use is empty.
LABELS = ("port", "phase", "adapter", "instead_of", "mode", "reason", "what", "argument")
#: SGLang's own name for the label of a data-parallel replica.
REPLICA = "dp_rank"
PREFIX = "qwen35_"


def metrics_wanted() -> bool:
    """Whether SGLang collects metrics from its processes."""
    return DIRECTORY_VARIABLE in os.environ


class PrometheusMirror:
    """Copies ``counters`` into prometheus_client's, which SGLang's endpoint gathers from all processes.

    ``replica``: the data-parallel one that they are labelled with (None: empty).

    Make one only where ``metrics_wanted()``: prometheus_client decides at its import whether it is gathered.
    """

    def __init__(self, counters: Counters, replica: int | None = None, period: float = 1.0) -> None:
        self._counters, self._period = counters, period
        self._replica = "" if replica is None else str(replica)
        self._seen: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
        self._metrics: dict[str, Any] = {}
        self._failing: frozenset[str] = frozenset()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="qwen35-metrics", daemon=True)

    def start(self) -> None:
        """Copy every ``period`` seconds from a thread of its own, so that no serving call waits for it."""
        self._thread.start()

    def stop(self) -> None:
        """Copy a last time and end the thread. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.copy()

    def copy(self) -> None:
        """Add what was counted since the last copy.

        A counter that cannot be written holds no other one back and is tried again at the next copy; each kind of
        error is logged when it begins.
        """
        failures: dict[str, tuple[str, Exception]] = {}
        with self._lock:
            for key, value in self._counters.snapshot().items():
                try:
                    self._copy_one(key, value)
                except Exception as exc:  # noqa: BLE001 - a thread that ended would leave the counters where they are
                    failures.setdefault(type(exc).__name__, (key[0], exc))
            begun = [failures[kind] for kind in failures if kind not in self._failing]
            self._failing = frozenset(failures)
        for name, failure in begun:
            logger.error(
                "qwen35: on SGLang's Prometheus endpoint the counter %r stands still (%s): %s. It is tried again at "
                "every copy, and so are others that fail alike", name, said(failure), _remedy(failure),
            )  # fmt: skip

    def _copy_one(self, key: tuple[str, tuple[tuple[str, str], ...]], value: int) -> None:
        delta = value - self._seen.get(key, 0)
        if not delta:
            return
        name, labels = key
        if name not in self._metrics:
            from prometheus_client import Counter

            about = f"qwen35: {name.replace('_', ' ')}"
            # In no registry of this process: the endpoint reads the files, and a second mirror may follow.
            self._metrics[name] = Counter(PREFIX + name, about, (*LABELS, REPLICA), registry=None)
        given = dict(labels)
        values = {label: given.get(label, "") for label in LABELS}
        self._metrics[name].labels(**values, **{REPLICA: self._replica}).inc(delta)
        self._seen[key] = value

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            self.copy()


def _remedy(failure: Exception) -> str:
    if isinstance(failure, OSError):
        path = os.environ.get(DIRECTORY_VARIABLE)
        return f"{path!r} ({DIRECTORY_VARIABLE}) must be a directory that this process can write to"
    return "no directory is at fault; report that, with the versions of qwen35 and prometheus_client"
