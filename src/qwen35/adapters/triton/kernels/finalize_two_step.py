"""Finalize, all-reduce, residual and RMSNorm by row ownership: each row is summed and normalised once.

A rank sends its share of a row to the row's owner only; the owner sums, adds the residual, norms, and sends both
results to every rank. ``outbox`` is [rows, BUFFERS, 2, D] in the token dtype on every rank: residual, then norm.
A program is three steps deep: row i + 2 is sent, row i + 1 is reduced where this rank owns it, row i is taken
over. Every wait is for something that its sender does at an earlier step, so as long as all programs of a launch
are resident nothing can block for good.
"""

from __future__ import annotations

# A constexpr and a run-time condition are two statements in Triton.
# ruff: noqa: SIM102
import triton
import triton.language as tl

from qwen35.adapters.triton.kernels.finalize_common import (
    await_slots,
    await_total,
    clear,
    normed,
    row_choices,
    row_columns,
    row_terms,
    row_total,
    slot_of,
    wire_bits,
)


@triton.jit
def _share(
    source, weights, indices, shared, peers, epochs, row, owner, source_rows, rank,
    D: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    WIRE: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Send this rank's share of a row to its owner; returns the row's epoch."""
    epoch = tl.load(epochs + row, volatile=True)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    chosen, factors = row_choices(weights, indices, row, TOP_K)
    terms = row_terms(source, shared, chosen, factors, row, source_rows, columns, inside, D, TOP_K, SHARED)
    bits = wire_bits(row_total(terms, chosen, factors, source_rows, TOP_K, SHARED), WIRE, WORD)
    at = slot_of(row, epoch, rank, N, D) + columns
    for peer in tl.static_range(N):
        tl.store(peers[peer] + at, bits, mask=inside & (owner == peer))
    return epoch


@triton.jit
def _reduce(
    residual, gamma, inbox, outboxes, missing, row, epoch, spin_limit, eps, weight_bias,
    D: tl.constexpr, N: tl.constexpr, N_POW2: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr,
    WORD: tl.constexpr, TOKEN: tl.constexpr, TOKEN_WORD: tl.constexpr, VECTOR: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """As the row's owner: await all shares, and send residual and norm to every rank."""
    source = tl.arange(0, N_POW2)[:, None]
    columns = row_columns(BLOCK, VECTOR)
    inside = columns < D
    held = tl.load(residual + row.to(tl.int64) * D + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gamma + columns, mask=inside, other=0.0).to(tl.float32)
    slots = inbox + slot_of(row, epoch, 0, N, D)
    total, squares = await_total(slots, source, columns, held, missing, spin_limit, N, D, WIRE, CHECKED)
    norm = normed(total, squares, factor, eps, weight_bias, D)
    at = slot_of(row, epoch, 0, 2, D) + columns
    first = wire_bits(total, TOKEN, TOKEN_WORD)
    second = wire_bits(norm, TOKEN, TOKEN_WORD)
    for peer in tl.static_range(N):
        tl.store(outboxes[peer] + at, first, mask=inside)
        tl.store(outboxes[peer] + at + D, second, mask=inside)
    clear(slots, source, columns, inside, N, D, WORD)


@triton.jit
def _take(
    norm_out, residual_out, inbox, outbox, epochs, missing, row, epoch, owner, split_rows, spin_limit,
    D: tl.constexpr, N: tl.constexpr, N_POW2: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr,
    TOKEN: tl.constexpr, TOKEN_WORD: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Await the owner's results of a row, write them out, and leave the mailboxes ready."""
    columns = tl.arange(0, BLOCK)
    if row < split_rows:
        # The row's last use may have been a split one-shot, which nobody could clear while its siblings read.
        source = tl.arange(0, N_POW2)[:, None]
        clear(inbox + slot_of(row, epoch - 1, 0, N, D), source, columns, columns < D, N, D, WORD)
    both = tl.arange(0, 2)[:, None]
    results = outbox + slot_of(row, epoch, 0, 2, D)
    names = tl.zeros([2, 1], tl.int32) + owner
    words = await_slots(results, both, columns[None, :], missing, names, spin_limit, 2, D, CHECKED)
    clear(results, both, columns, columns < D, 2, D, TOKEN_WORD)
    values = words.to(TOKEN, bitcast=True).to(tl.float32)
    at = row.to(tl.int64) * D + columns
    total = tl.sum(tl.where(both == 0, values, 0.0), axis=0)
    norm = tl.sum(tl.where(both == 1, values, 0.0), axis=0)
    tl.store(residual_out + at, total.to(residual_out.dtype.element_ty), mask=columns < D)
    tl.store(norm_out + at, norm.to(norm_out.dtype.element_ty), mask=columns < D)
    tl.store(epochs + row, epoch + 1)


@triton.jit(
    do_not_specialize=["m", "steps", "source_rows", "rank", "split_rows", "spin_limit"],
    do_not_specialize_on_alignment=["weights", "indices"],
)
def finalize_two_step(
    source, weights, indices, shared, residual, gamma, norm_out, residual_out, inbox, peers, outbox, outboxes,
    epochs, missing, m, steps, source_rows, rank, split_rows, spin_limit, eps, weight_bias,
    D: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr, N_POW2: tl.constexpr,
    BLOCK: tl.constexpr, WIRE: tl.constexpr, WORD: tl.constexpr, TOKEN: tl.constexpr, TOKEN_WORD: tl.constexpr,
    VECTOR: tl.constexpr, SEND: tl.constexpr, REDUCE: tl.constexpr, TAKE: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """``peers`` and ``outboxes`` are the N ranks' mailboxes as this rank reaches them.

    ``steps`` is ceil(m / programs). SEND, REDUCE and TAKE are all true in service; programs that run one after
    another (the interpreter) test them apart.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    sent = 0  # epoch of the row that the last step sent, and of the one before
    reduced = 0
    for step in range(steps + 2):
        row = step * programs + pid
        middle = row - programs
        last = middle - programs
        epoch = sent
        if SEND:
            if row < m:
                # Owners alternate from step to step, so that every program owns its part of the rows.
                epoch = _share(
                    source, weights, indices, shared, peers, epochs, row, (pid + step) % N, source_rows, rank,
                    D, TOP_K, SHARED, N, BLOCK, WIRE, WORD,
                )  # fmt: skip
        if REDUCE:
            if (middle >= 0) & (middle < m) & ((pid + step - 1) % N == rank):
                if not SEND:
                    sent = tl.load(epochs + middle, volatile=True)
                _reduce(
                    residual, gamma, inbox, outboxes, missing, middle, sent, spin_limit, eps, weight_bias,
                    D, N, N_POW2, BLOCK, WIRE, WORD, TOKEN, TOKEN_WORD, VECTOR, CHECKED,
                )  # fmt: skip
        if TAKE:
            if (last >= 0) & (last < m):
                if not SEND:
                    reduced = tl.load(epochs + last, volatile=True)
                _take(
                    norm_out, residual_out, inbox, outbox, epochs, missing, last, reduced, (pid + step - 2) % N,
                    split_rows, spin_limit,
                    D, N, N_POW2, BLOCK, WORD, TOKEN, TOKEN_WORD, CHECKED,
                )  # fmt: skip
        reduced = sent
        sent = epoch
