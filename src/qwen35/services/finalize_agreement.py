"""How the ranks of a group agree on the host, before anything is launched."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from qwen35.domain.errors import AgreementError, CreationError

#: How long a rank may keep the others waiting in an exchange.
EXCHANGE_TIMEOUT = timedelta(minutes=5)

_UNHEARD = "the ranks could not be heard"

T = TypeVar("T")


class Agreement(Protocol):
    """An exchange of plain values between ranks, by the CPU: legal inside CUDA graph capture."""

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Waits for all ranks; raises ``AgreementError`` where one is lost."""


class Alone:
    """One rank agrees with itself."""

    def exchange(self, value: Any) -> list[Any]:
        return [value]


def together(agreement: Agreement, what: str, step: Callable[[], T]) -> T:
    """This rank's result of ``step``, once every rank has one. Every rank of ``agreement`` calls this together.

    Where ``step`` failed on any of them, raises ``CreationError`` alike on all, with ``what`` and every rank's reason;
    a failure that the ranks had agreed on within ``step`` is told once. Raises ``AgreementError`` where a rank is
    lost, with this rank's own failure if it has one: it may say which.
    """
    value: T | None = None
    error: Exception | None = None
    try:
        value = step()
    except Exception as exc:  # noqa: BLE001 - kernel packages raise anything; unheard, it leaves the others waiting
        error = exc
    own = None if error is None else _told(error)
    try:
        heard = agreement.exchange(own)
    except AgreementError as lost:
        if own is None:
            raise
        raise AgreementError(what, (*own[1], *lost.reasons)) from error
    if all(told is None for told in heard):
        return cast("T", value)
    reasons: list[str] = []
    for rank, told in enumerate(heard):
        agreed, texts = told or (True, ())
        reasons += texts if agreed else [f"rank {rank}: {text}" for text in texts]
    raise CreationError(what, dict.fromkeys(reasons)) from error


def _told(error: Exception) -> tuple[bool, tuple[str, ...]]:
    """What the others hear of a failure: whether all ranks know it, by rank, and its text."""
    if isinstance(error, CreationError):
        return True, error.reasons
    return False, (f"{type(error).__name__}: {error}",)


class GroupAgreement:
    """Over a process group of torch.distributed; where that one has no CPU side, over a gloo twin of it.

    Made by every rank of the group together. Keeps neither the group nor its twin alive: torch.distributed does,
    until they are destroyed. (The threads of a gloo group end with it; one that still runs when the interpreter ends
    aborts the process.) Raises ``AgreementError`` where a rank does not come to make the twin.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta = EXCHANGE_TIMEOUT) -> None:
        ranks = dist.get_process_group_ranks(group)
        if "gloo" not in dist.get_backend(group):
            try:
                group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
            except RuntimeError as exc:
                raise AgreementError(_UNHEARD, [str(exc)]) from exc
        self._size, self._group = len(ranks), weakref.ref(group)

    def exchange(self, value: Any) -> list[Any]:
        group = self._group()
        if group is None:
            raise AgreementError(_UNHEARD, ["the process group was destroyed"])
        values: list[Any] = [None] * self._size
        try:
            dist.all_gather_object(values, value, group=group)
        except RuntimeError as exc:
            raise AgreementError(_UNHEARD, [str(exc)]) from exc
        return values


class Agreements:
    """One agreement for each process group, made when first asked for, once whatever the number of threads.

    A group's agreement lasts as long as the group, which it does not keep alive.
    """

    def __init__(self, make: Callable[[Any], Agreement] = GroupAgreement) -> None:
        self._make = make
        self._made: list[tuple[weakref.ref[Any], Agreement]] = []
        self._lock = threading.Lock()

    def of(self, group: Any, size: int) -> Agreement:
        """The agreement of ``group`` (by identity); of one rank with itself where ``size`` is 1."""
        if size == 1:
            return Alone()
        with self._lock:
            self._made = [(have, agreement) for have, agreement in self._made if have() is not None]
            for have, agreement in self._made:
                if have() is group:
                    return agreement
            agreement = self._make(group)
            self._made.append((weakref.ref(group), agreement))
            return agreement


#: The agreements of this process: a group's gloo twin is made once, whoever asks.
PROCESS_AGREEMENTS = Agreements()
