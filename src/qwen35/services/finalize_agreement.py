"""How the ranks of a group agree on the host, before anything is launched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from qwen35.domain.errors import AgreementError

#: How long a rank may keep the others waiting in an exchange.
EXCHANGE_TIMEOUT = timedelta(minutes=5)


class Agreement(Protocol):
    """An exchange of plain values between ranks, by the CPU: legal inside CUDA graph capture."""

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Waits for all ranks; raises ``AgreementError`` where one is lost."""


class Alone:
    """One rank agrees with itself."""

    def exchange(self, value: Any) -> list[Any]:
        return [value]


class GroupAgreement:
    """Over a process group of torch.distributed; where that one has no CPU side, over a gloo twin of it.

    Made by every rank of the group together. Holds the group, and its twin for as long as it lives.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta = EXCHANGE_TIMEOUT) -> None:
        ranks = dist.get_process_group_ranks(group)
        self._size, self._group = len(ranks), group
        if "gloo" not in dist.get_backend(group):
            self._group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)

    def exchange(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as exc:
            raise AgreementError("the ranks could not be heard", [str(exc)]) from exc
        return values


class Agreements:
    """One agreement for each process group, made when first asked for, once whatever the number of threads."""

    def __init__(self, make: Callable[[Any], Agreement] = GroupAgreement) -> None:
        self._make = make
        self._made: list[tuple[object, Agreement]] = []
        self._lock = threading.Lock()

    def of(self, group: Any, size: int) -> Agreement:
        """The agreement of ``group`` (by identity); of one rank with itself where ``size`` is 1."""
        if size == 1:
            return Alone()
        with self._lock:
            for have, agreement in self._made:
                if have is group:
                    return agreement
            agreement = self._make(group)
            self._made.append((group, agreement))
            return agreement
