"""Reasons as metric labels: a bounded number of them."""

from __future__ import annotations

#: Past this many, further reasons are counted together.
MOST_REASONS = 32
FURTHER = "a further reason; the log has it"


class BoundedReasons:
    """The reasons that were seen first have labels of their own."""

    def __init__(self, most: int = MOST_REASONS) -> None:
        self._most = most
        self._told: set[str] = set()

    def new(self, reason: str) -> bool:
        """Whether ``reason`` has no label of its own yet, and should be logged."""
        return reason not in self._told

    def label(self, reason: str) -> str:
        """``reason``, or past the bound what stands for all further ones."""
        if reason not in self._told and len(self._told) < self._most:
            self._told.add(reason)
        return reason if reason in self._told else FURTHER
