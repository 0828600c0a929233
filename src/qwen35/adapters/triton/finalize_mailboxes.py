"""The memory through which ranks finalize together: an inbox and an outbox a rank, which every rank can write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from qwen35.domain.errors import UnsupportedError
from qwen35.domain.finalize_signature import WorkspaceSignature
from qwen35.services.finalize_agreement import PROCESS_AGREEMENTS, Agreement, together
from qwen35.services.finalize_registry import synchronise

#: Integers as wide as an element of the wire or of the tokens.
WORDS = {"float32": torch.int32, "bfloat16": torch.int16}

NOT_ARRIVED = -1

#: Memory of one rank's mailboxes; more rows than fit travel in several launches.
BUDGET = 192 << 20

#: The longest one-shot or two-step launch, in rows.
MOST_ROWS = 1024

#: What is made here, in the messages of what all ranks agree on.
WHAT = "mailboxes between ranks"

#: Backend of torch's symmetric memory that maps the memory of peers of one host.
SYMMETRIC_BACKEND: Literal["CUDA"] = "CUDA"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailboxes:
    """One rank's view. ``peers`` and ``outboxes`` are all N ranks' in rank order, its own included.

    ``inbox`` [rows, buffers, N, D] words of the wire, ``outbox`` [rows, buffers, 2, D] words of the tokens, both
    flat; ``epochs`` [rows] int32, uses so far; ``missing`` [N] int32, ranks that were late (checked mode).
    ``owner`` keeps alive what the views are of.
    """

    rows: int
    inbox: Tensor
    peers: tuple[Tensor, ...]
    outbox: Tensor
    outboxes: tuple[Tensor, ...]
    epochs: Tensor
    missing: Tensor
    owner: Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of a launch, and elements of its two mailboxes."""

    rows: int
    inbox: int
    outbox: int
    wire: str
    dtype: str

    @property
    def bytes(self) -> int:
        return self.inbox * WORDS[self.wire].itemsize + self.outbox * WORDS[self.dtype].itemsize


def sizes(signature: WorkspaceSignature, wire: str, buffers: int) -> Sizes:
    """How many rows one launch takes, within the budget and ``max_m``."""

    def of(rows: int) -> Sizes:
        per_row = rows * buffers * signature.hidden
        return Sizes(rows, per_row * signature.tp_size, per_row * 2, wire, signature.dtype)

    return of(max(1, min(signature.max_m, MOST_ROWS, BUDGET // of(1).bytes)))


class PeerMemory(Protocol):
    """Memory that the ranks of a group share: first each rank's own, then everybody's."""

    def allocate(self, size: int, device: str) -> Tensor:
        """This rank's own, [size] uint8. Needs no other rank; raises ``UnsupportedError`` where it cannot be shared."""

    def meet(self, own: Tensor, group: Any) -> tuple[Sequence[Tensor], Any]:
        """What every rank of ``group`` allocated, in rank order, as this rank reaches it, and what keeps it so.
        Collective."""


def chosen_backend(device: str) -> str | None:
    """Torch's symmetric memory backend for ``device``, None where the process has none yet."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    return symmetric_memory.get_backend(torch.device(device))


def against_backend(chosen: str | None) -> tuple[str, ...]:
    """Why a backend that the process has chosen already cannot be used. One that it has not is chosen here."""
    if chosen in (None, SYMMETRIC_BACKEND):
        return ()
    return (f"symmetric memory backend requires {SYMMETRIC_BACKEND}, got {chosen}",)


class SymmetricMemory:
    """Torch's, mapped between peers of one host. A backend that the process has already chosen is kept."""

    def allocate(self, size: int, device: str) -> Tensor:
        from torch.distributed import _symmetric_memory as symmetric_memory

        where = torch.device(device)
        if chosen_backend(device) is None:
            symmetric_memory.set_backend(SYMMETRIC_BACKEND)
        reasons = against_backend(chosen_backend(device))
        if reasons:
            raise UnsupportedError("symmetric memory", reasons)
        return symmetric_memory.empty(size, dtype=torch.uint8, device=where)

    def meet(self, own: Tensor, group: Any) -> tuple[Sequence[Tensor], Any]:
        from torch.distributed import _symmetric_memory as symmetric_memory

        handle = symmetric_memory.rendezvous(own, group.group_name)
        shape = (own.numel(),)
        return [handle.get_buffer(rank, shape, torch.uint8) for rank in range(handle.world_size)], (own, handle)


def local_mailboxes(signature: WorkspaceSignature, of: Sizes) -> tuple[Mailboxes, ...]:
    """Mailboxes of all N ranks within one process: for a single rank, and for tests."""
    own = [_marked(torch.empty(of.bytes, dtype=torch.uint8, device=signature.device)) for _ in range(signature.tp_size)]
    return tuple(_joined(_alone(signature, of, own[rank]), of, own, rank, None) for rank in range(signature.tp_size))


def symmetric_mailboxes(
    signature: WorkspaceSignature, of: Sizes, *, agreement: Agreement | None = None, memory: PeerMemory | None = None,
    alone: Callable[[Mailboxes], None] | None = None,
) -> Mailboxes:  # fmt: skip
    """Mailboxes over memory that ranks share; collective. Every rank's are marked before any rank returns.

    ``alone``: what else this rank does by itself before it waits for another, given mailboxes in which it is its own
    every peer. Raises ``CreationError`` alike on all ranks where that, or any step, fails on one: a symmetric memory
    backend that the process has already chosen and that does not map peers' memory is such a failure.
    """
    agreement = agreement or PROCESS_AGREEMENTS.of(signature.group, signature.tp_size)
    shared = memory or SymmetricMemory()

    def by_itself() -> tuple[Tensor, Mailboxes]:
        own = _marked(shared.allocate(of.bytes, signature.device))
        mail = _alone(signature, of, own)
        if alone is not None:
            alone(mail)
        synchronise(signature.device)
        return own, mail

    own, mail = together(agreement, WHAT, by_itself)
    both, owner = together(agreement, WHAT, partial(shared.meet, own, signature.group))
    return _joined(mail, of, both, signature.rank, owner)


def _marked(memory: Tensor) -> Tensor:
    """``memory`` with every word "not arrived"."""
    return memory.fill_(0xFF)


def _alone(signature: WorkspaceSignature, of: Sizes, own: Tensor) -> Mailboxes:
    """Mailboxes of a rank that has met nobody: all N peers are itself."""
    inbox, outbox = _split(own, of)

    def counters(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=signature.device)

    return Mailboxes(
        rows=of.rows, inbox=inbox, peers=(inbox,) * signature.tp_size, outbox=outbox,
        outboxes=(outbox,) * signature.tp_size, epochs=counters(of.rows), missing=counters(signature.tp_size),
        owner=own,
    )  # fmt: skip


def _joined(mail: Mailboxes, of: Sizes, memory: Sequence[Tensor], rank: int, owner: Any) -> Mailboxes:
    """``mail`` with every rank's ``memory``, its own as it is reached there too."""
    inboxes, outboxes = (tuple(part) for part in zip(*(_split(each, of) for each in memory), strict=True))
    return replace(mail, inbox=inboxes[rank], peers=inboxes, outbox=outboxes[rank], outboxes=outboxes, owner=owner)


def _split(memory: Tensor, of: Sizes) -> tuple[Tensor, Tensor]:
    inbox = of.inbox * WORDS[of.wire].itemsize
    return memory[:inbox].view(WORDS[of.wire]), memory[inbox : of.bytes].view(WORDS[of.dtype])
