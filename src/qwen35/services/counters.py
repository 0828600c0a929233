"""How often which adapter served, fell back and why: labels and integers, readable from Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

_Key = tuple[str, tuple[tuple[str, str], ...]]


class Counter:
    """One count; calling it adds one. Thread-safe."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0

    def __call__(self) -> None:
        with self._lock:
            self.value += 1


def mode(captured: bool) -> str:
    """The label ``mode`` of what is counted inside CUDA graph capture, or else eagerly."""
    return "captured" if captured else "eager"


class Counters:
    """Thread-safe counters, each a name with sorted labels.

    No host code runs in a graph replay, so calls are labelled ``mode="eager"`` or ``mode="captured"``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[_Key, Counter] = {}
        self._gauges: dict[_Key, Callable[[], float]] = {}

    def add(self, name: str, /, **labels: str) -> None:
        """Add one to the counter ``name`` with these labels."""
        self.counter(name, **labels)()

    def counter(self, name: str, /, **labels: str) -> Counter:
        """This counter itself: for hot paths, where labels are sorted once."""
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            return self._counts.setdefault(key, Counter())

    def watch(self, name: str, read: Callable[[], float], /, **labels: str) -> None:
        """Make ``read()`` the value of the gauge ``name`` with these labels, such as bytes held now."""
        with self._lock:
            self._gauges[name, tuple(sorted(labels.items()))] = read

    def gauges(self) -> Mapping[_Key, float]:
        """What every gauge reads now."""
        with self._lock:
            gauges = dict(self._gauges)
        return {key: read() for key, read in gauges.items()}  # outside the lock: a reading may count

    def total(self, name: str, **labels: str) -> int:
        """The sum over every counter ``name`` whose labels include ``labels``."""
        wanted = set(labels.items())
        return sum(v for (n, have), v in self.snapshot().items() if n == name and wanted <= set(have))

    def snapshot(self) -> Mapping[_Key, int]:
        """A copy of every counter that has counted."""
        with self._lock:
            return {key: count.value for key, count in self._counts.items() if count.value}
