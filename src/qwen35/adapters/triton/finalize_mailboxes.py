"""The memory through which ranks finalize together: an inbox and an outbox a rank, which every rank can write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from qwen35.domain.errors import UnsupportedError
from qwen35.domain.finalize_signature import WorkspaceSignature

#: Integers as wide as an element of the wire or of the tokens.
WORDS = {"float32": torch.int32, "bfloat16": torch.int16}

NOT_ARRIVED = -1

#: Memory of one rank's mailboxes; more rows than fit travel in several launches.
BUDGET = 192 << 20

#: The longest one-shot or two-step launch, in rows.
MOST_ROWS = 1024

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


def local_mailboxes(signature: WorkspaceSignature, of: Sizes) -> tuple[Mailboxes, ...]:
    """Mailboxes of all N ranks within one process: for a single rank, and for tests."""
    both = [
        _split(torch.full((of.bytes,), 0xFF, dtype=torch.uint8, device=signature.device), of)
        for _ in range(signature.tp_size)
    ]
    return tuple(_view(signature, of, both, rank, None) for rank in range(signature.tp_size))


def symmetric_mailboxes(signature: WorkspaceSignature, of: Sizes) -> Mailboxes:
    """Mailboxes over torch's symmetric memory; collective. Every rank's are marked before any rank returns.

    A symmetric memory backend that the process has already chosen is kept; raises ``UnsupportedError`` where it
    is not the one that maps peers' memory.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    group: Any = signature.group
    device = torch.device(signature.device)
    if symmetric_memory.get_backend(device) is None:
        symmetric_memory.set_backend(SYMMETRIC_BACKEND)
    backend = symmetric_memory.get_backend(device)
    if backend != SYMMETRIC_BACKEND:
        raise UnsupportedError(
            "symmetric memory", [f"symmetric memory backend requires {SYMMETRIC_BACKEND}, got {backend}"]
        )
    memory = symmetric_memory.empty(of.bytes, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(memory, group.group_name)
    memory.fill_(0xFF)
    torch.cuda.synchronize(device)
    dist.barrier(group=group)
    both = [_split(handle.get_buffer(rank, (of.bytes,), torch.uint8), of) for rank in range(signature.tp_size)]
    return _view(signature, of, both, signature.rank, (memory, handle))


def _split(memory: Tensor, of: Sizes) -> tuple[Tensor, Tensor]:
    inbox = of.inbox * WORDS[of.wire].itemsize
    return memory[:inbox].view(WORDS[of.wire]), memory[inbox : of.bytes].view(WORDS[of.dtype])


def _view(
    signature: WorkspaceSignature, of: Sizes, both: list[tuple[Tensor, Tensor]], rank: int, owner: Any
) -> Mailboxes:
    inboxes, outboxes = (tuple(part) for part in zip(*both, strict=True))

    def counters(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=signature.device)

    return Mailboxes(
        rows=of.rows, inbox=inboxes[rank], peers=inboxes, outbox=outboxes[rank], outboxes=outboxes,
        epochs=counters(of.rows), missing=counters(signature.tp_size), owner=owner,
    )  # fmt: skip
