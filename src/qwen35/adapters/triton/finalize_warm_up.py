"""What a rank compiles before it meets the others, and what all of them then run once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qwen35.adapters.triton.finalize_launch import Cut, Rows, compile_launch
from qwen35.adapters.triton.finalize_mailboxes import Mailboxes
from qwen35.ports.finalize_checks import WEIGHT_DTYPES, torch_dtype


class WarmUp:
    """One launch of every kernel that calls of 1..max_m can reach, where one launch takes at most ``rows``.

    ``roll_call``, once ``alone`` has run: an all-reduce of each kind, the smallest first, through which each rank
    hears every other. All that it needs is allocated and compiled by then.
    """

    def __init__(self, cut: Cut, rows: int, *, checked: bool) -> None:
        self._cut, self._rows, self._checked = cut, rows, checked
        self.roll_call: tuple[Rows, ...] = ()

    def alone(self, mail: Mailboxes) -> None:
        """Compile and load the kernels that are called, and those of the roll call, which may time out.

        In checked mode of both kinds, since a captured launch waits like an unchecked one.
        """
        every = tuple(_every(self._cut, self._rows))
        for rows in every:
            one_shot = self._cut.one_shot(rows.residual.shape[0])
            for spin_limit in (0, 1) if self._checked or rows.indices is None else (0,):
                compile_launch(
                    self._cut, mail, rows, self._cut.signature.rank, one_shot=one_shot, spin_limit=spin_limit
                )
        self.roll_call = tuple(rows for rows in every if rows.indices is None)


def _every(cut: Cut, most: int) -> Iterator[Rows]:
    """Zeros for an all-reduce and, of each dtype of weights, a finalize of every telling size, in ascending order."""
    signature, sizes = cut.signature, _telling_sizes(cut, most)
    gamma = torch.ones(signature.hidden, dtype=torch_dtype(signature.dtype), device=signature.device)
    zeros, norm, residual = (gamma.new_zeros(sizes[-1], signature.hidden) for _ in range(3))
    dropped = torch.full((sizes[-1], signature.top_k), -1, dtype=torch.int32, device=signature.device)
    weights = [torch.zeros_like(dropped, dtype=dtype) for dtype in WEIGHT_DTYPES]
    for m in sizes:
        source = zeros[:m]
        yield Rows(source=source, residual=source, gamma=gamma, norm=norm[:m], out_residual=residual[:m])
        for of in weights:
            yield Rows(
                source=source, weights=of[:m], indices=dropped[:m], shared=source if signature.shared_expert else None,
                residual=source, gamma=gamma, norm=norm[:m], out_residual=residual[:m],
            )  # fmt: skip


def _telling_sizes(cut: Cut, most: int) -> list[int]:
    """One m for each kernel: the largest launch that it serves.

    A single row comes first: of many, a rank sends the next while it waits, so who waits for a missing one is late too.
    """
    by_kernel = {cut.kernel(m): m for m in range(1, most + 1)}
    return sorted({1, *by_kernel.values()})
