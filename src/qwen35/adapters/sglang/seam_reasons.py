"""Reasons as metric labels and log lines: one a kind, and a bounded number of them."""

from __future__ import annotations

from qwen35.domain.capabilities import reason_kind

#: Past this many, further kinds are counted together.
MOST_REASONS = 32
FURTHER = "a further reason; the log has the first of them"


class BoundedReasons:
    """The kinds of reason that were seen first have a label and a log line of their own; all further ones share one."""

    def __init__(self, most: int = MOST_REASONS) -> None:
        self._most = most
        self._known: set[str] = set()
        self._logged: set[str] = set()

    def label(self, reason: str) -> str:
        """The kind of ``reason``, or past the bound what stands for all further ones."""
        kind = reason_kind(reason)
        if kind not in self._known and len(self._known) >= self._most:
            return FURTHER
        self._known.add(kind)
        return kind

    def line(self, reason: str) -> str | None:
        """What to log of ``reason``; None where one of its label was logged before."""
        label = self.label(reason)
        if label in self._logged:
            return None
        self._logged.add(label)
        return f"{reason} (further reasons are counted together and not logged)" if label == FURTHER else reason
