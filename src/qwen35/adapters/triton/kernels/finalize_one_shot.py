"""Finalize, all-reduce, residual and RMSNorm in one launch: every rank sends its share of every row to every rank.

A row is cut into SPLITS slices, one a program, so that few rows still fill many multiprocessors. A program sends
its slice, then reads the whole row (the sum of squares needs it) and writes its slice of the results. Programs
loop over items with one ahead: item i + 1 is sent before item i is awaited. No send ever waits, and items meet
programs alike on every rank, so as long as all programs of a launch are resident nothing can block for good.
"""

from __future__ import annotations

# A constexpr and a run-time condition are two statements in Triton.
# ruff: noqa: SIM102
import triton
import triton.language as tl

from qwen35.adapters.triton.kernels.finalize_common import (
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
def _send(
    source, weights, indices, shared, peers, epoch, item, source_rows, rank,
    D: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    SLICE_BLOCK: tl.constexpr, PIECES: tl.constexpr, WIRE: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Send one slice of one row to every rank, this one included, piece by piece, so that links are busy early: what a
    piece adds up is asked for before the piece before it is sent."""
    row = item // SPLITS
    start = (item % SPLITS) * (D // SPLITS)
    slot = slot_of(row, epoch, rank, N, D) + start
    within = tl.arange(0, SLICE_BLOCK // PIECES)
    chosen, factors = row_choices(weights, indices, row, TOP_K)
    terms = row_terms(
        source, shared, chosen, factors, row, source_rows, start + within, within < D // SPLITS, D, TOP_K, SHARED
    )
    for piece in tl.static_range(PIECES):
        coming = terms
        after = within + SLICE_BLOCK // PIECES
        if piece + 1 < PIECES:
            coming = row_terms(
                source, shared, chosen, factors, row, source_rows, start + after, after < D // SPLITS, D, TOP_K, SHARED
            )
        bits = wire_bits(row_total(terms, chosen, factors, source_rows, TOP_K, SHARED), WIRE, WORD)
        for peer in tl.static_range(N):
            tl.store(peers[peer] + slot + within, bits, mask=within < D // SPLITS)
        terms = coming
        within = after


@triton.jit
def _receive(
    held, factor, norm_out, residual_out, inbox, epochs, missing, item, epoch, split_rows, spin_limit,
    eps, weight_bias,
    D: tl.constexpr, N: tl.constexpr, N_POW2: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    SLICE_BLOCK: tl.constexpr, WIRE: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Await one row, write one slice of its results, and leave the mailboxes ready."""
    row = item // SPLITS
    split = item % SPLITS
    start = split * (D // SPLITS)
    source = tl.arange(0, N_POW2)[:, None]
    columns = row_columns(BLOCK, VECTOR)
    if row < split_rows:
        # The row's last use may have been a split one, which nobody could clear while its siblings read.
        own = tl.arange(0, SLICE_BLOCK)
        clear(inbox + slot_of(row, epoch - 1, 0, N, D) + start, source, own, own < D // SPLITS, N, D, WORD)
    slots = inbox + slot_of(row, epoch, 0, N, D)
    total, squares = await_total(
        slots, source, columns, held.to(tl.float32), missing, spin_limit, N, D, WIRE, CHECKED
    )
    norm = normed(total, squares, factor.to(tl.float32), eps, weight_bias, D)
    mine = (columns >= start) & (columns < start + D // SPLITS)
    at = row.to(tl.int64) * D + columns
    tl.store(residual_out + at, total.to(residual_out.dtype.element_ty), mask=mine)
    tl.store(norm_out + at, norm.to(norm_out.dtype.element_ty), mask=mine)
    if SPLITS == 1:
        clear(slots, source, columns, columns < D, N, D, WORD)
    if split == SPLITS - 1:
        # Every slice of the row has arrived, so every program that needed this epoch has read it.
        tl.store(epochs + row, epoch + 1)


@triton.jit(
    do_not_specialize=["m", "steps", "source_rows", "rank", "split_rows", "spin_limit"],
    do_not_specialize_on_alignment=["weights", "indices"],
)
def finalize_one_shot(
    source, weights, indices, shared, residual, gamma, norm_out, residual_out, inbox, peers, epochs, missing,
    m, steps, source_rows, rank, split_rows, spin_limit, eps, weight_bias,
    D: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr, N_POW2: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, SLICE_BLOCK: tl.constexpr, PIECES: tl.constexpr, WIRE: tl.constexpr,
    WORD: tl.constexpr, VECTOR: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """``peers`` are the N ranks' inboxes as this rank reaches them, ``inbox`` is its own.

    ``steps`` is ceil(m * SPLITS / programs), and 1 where SPLITS is above 1. ``split_rows``: rows from there on are
    never used with SPLITS above 1. VECTOR is the words of one 16-byte access. SEND and RECEIVE are both true in
    service; programs that run one after another (the interpreter) test them apart.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    items = m * SPLITS
    columns = row_columns(BLOCK, VECTOR)
    factor = tl.load(gamma + columns, mask=columns < D, other=0.0)
    if SPLITS > 1:
        held = tl.load(residual + (pid // SPLITS).to(tl.int64) * D + columns, mask=columns < D, other=0.0)
        epoch = tl.load(epochs + pid // SPLITS, volatile=True)
        if SEND:
            _send(
                source, weights, indices, shared, peers, epoch, pid, source_rows, rank,
                D, TOP_K, SHARED, N, SPLITS, SLICE_BLOCK, PIECES, WIRE, WORD,
            )  # fmt: skip
        if RECEIVE:
            _receive(
                held, factor, norm_out, residual_out, inbox, epochs, missing, pid, epoch, split_rows,
                spin_limit, eps, weight_bias,
                D, N, N_POW2, SPLITS, BLOCK, SLICE_BLOCK, WIRE, WORD, VECTOR, CHECKED,
            )  # fmt: skip
    else:
        held = tl.zeros([BLOCK], residual.dtype.element_ty)
        epoch = 0
        for step in range(steps + 1):
            item = step * programs + pid
            before = item - programs
            # Asked for with the sending, so that it is there when the row's sum is.
            at = item.to(tl.int64) * D + columns
            coming = tl.load(residual + at, mask=(columns < D) & (item < items), other=0.0)
            sent = tl.load(epochs + item, mask=item < items, other=0, volatile=True)
            if SEND:
                if item < items:
                    _send(
                        source, weights, indices, shared, peers, sent, item, source_rows, rank,
                        D, TOP_K, SHARED, N, SPLITS, SLICE_BLOCK, PIECES, WIRE, WORD,
                    )  # fmt: skip
            if RECEIVE:
                if (before >= 0) & (before < items):
                    _receive(
                        held, factor, norm_out, residual_out, inbox, epochs, missing, before, epoch, split_rows,
                        spin_limit, eps, weight_bias,
                        D, N, N_POW2, SPLITS, BLOCK, SLICE_BLOCK, WIRE, WORD, VECTOR, CHECKED,
                    )  # fmt: skip
            epoch = sent
            held = coming
