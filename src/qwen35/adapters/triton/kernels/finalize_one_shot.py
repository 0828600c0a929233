"""Finalize, all-reduce, residual and RMSNorm in one launch: every rank sends its share of every row to every rank.

A row is cut into SPLITS slices, one a program, so that few rows still fill many multiprocessors. A program sends
its slice, then reads the whole row (the sum of squares needs it) and writes its slice of the results. A program that
has one whole row (SINGLE) keeps its own share and takes the others' piece by piece, as they come. Where there are more
rows than programs, these loop over rows with one ahead: row i + 1 is sent before row i is awaited. No send ever waits,
and items meet programs alike on every rank, so as long as all programs of a launch are resident nothing can block for
good.
"""

from __future__ import annotations

# A constexpr and a run-time condition are two statements in Triton, whose tuples grow by "+" only.
# ruff: noqa: SIM102, RUF005
# mypy: disable-error-code="unreachable"
import triton
import triton.language as tl

from qwen35.adapters.triton.kernels.finalize_common import (
    await_others,
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
    """Send one slice of one row to every rank, this one included, piece by piece, so that links are busy early.

    Where programs loop over whole rows, what a piece adds up is asked for before the piece before it is sent; programs
    that have nothing else to do are slower that way (benchmarks/results/finalize_sweep.json).
    """
    AHEAD: tl.constexpr = SPLITS == 1
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
        if AHEAD and piece + 1 < PIECES:
            coming = row_terms(
                source, shared, chosen, factors, row, source_rows, start + after, after < D // SPLITS, D, TOP_K, SHARED
            )
        bits = wire_bits(row_total(terms, chosen, factors, source_rows, TOP_K, SHARED), WIRE, WORD)
        for peer in tl.static_range(N):
            tl.store(peers[peer] + slot + within, bits, mask=within < D // SPLITS)
        if not AHEAD and piece + 1 < PIECES:
            coming = row_terms(
                source, shared, chosen, factors, row, source_rows, start + after, after < D // SPLITS, D, TOP_K, SHARED
            )
        terms = coming
        within = after


@triton.jit
def _single(
    source, weights, indices, shared, residual, gamma, norm_out, residual_out, inbox, peers, epochs, missing,
    row, source_rows, rank, split_rows, spin_limit, eps, weight_bias,
    D: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr, N_POW2: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr, WIRE: tl.constexpr, WORD: tl.constexpr,
    VECTOR: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """One row by one program: its share is sent to the others only, and never leaves this program's registers."""
    ranks = tl.arange(0, N_POW2)[:, None]
    first = row_columns(PIECE, VECTOR)
    at_row = row.to(tl.int64) * D
    epoch = tl.load(epochs + row, volatile=True)
    slot = slot_of(row, epoch, rank, N, D)
    chosen, factors = row_choices(weights, indices, row, TOP_K)
    held = ()
    own = ()
    for piece in tl.static_range(PIECES):
        columns = first + piece * PIECE
        terms = row_terms(source, shared, chosen, factors, row, source_rows, columns, columns < D, D, TOP_K, SHARED)
        bits = wire_bits(row_total(terms, chosen, factors, source_rows, TOP_K, SHARED), WIRE, WORD)
        if SEND:
            for peer in tl.static_range(N):
                tl.store(peers[peer] + slot + columns, bits, mask=(columns < D) & (rank != peer))
        own = own + (bits,)  # type: ignore[assignment]
        held = held + (tl.load(residual + at_row + columns, mask=columns < D, other=0.0),)  # type: ignore[assignment]
    if RECEIVE:
        slots = inbox + slot_of(row, epoch, 0, N, D)
        last_use = inbox + slot_of(row, epoch - 1, 0, N, D)
        squares = 0.0
        totals = ()
        for piece in tl.static_range(PIECES):
            columns = first + piece * PIECE
            if row < split_rows:
                # The row's last use may have been a split one, which nobody could clear while its siblings read.
                clear(last_use, ranks, columns, columns < D, N, D, WORD)
            total, part = await_others(
                slots, ranks, columns, held[piece].to(tl.float32), own[piece], rank, missing, spin_limit,
                N, D, WIRE, CHECKED,
            )  # fmt: skip
            squares += part
            totals = totals + (total,)
        for piece in tl.static_range(PIECES):
            columns = first + piece * PIECE
            inside = columns < D
            factor = tl.load(gamma + columns, mask=inside, other=0.0).to(tl.float32)
            norm = normed(totals[piece], squares, factor, eps, weight_bias, D)
            tl.store(residual_out + at_row + columns, totals[piece].to(residual_out.dtype.element_ty), mask=inside)
            tl.store(norm_out + at_row + columns, norm.to(norm_out.dtype.element_ty), mask=inside)
            empty = tl.full([N_POW2, PIECE], -1, WORD)
            here = slots + ranks * D + columns[None, :]
            tl.store(here, empty, mask=(ranks < N) & (ranks != rank) & inside[None, :])
        tl.store(epochs + row, epoch + 1)


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
    total, squares = await_total(slots, source, columns, held.to(tl.float32), missing, spin_limit, N, D, WIRE, CHECKED)
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
    SPLITS: tl.constexpr, SINGLE: tl.constexpr, BLOCK: tl.constexpr, SLICE_BLOCK: tl.constexpr, PIECES: tl.constexpr,
    WIRE: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr, SEND: tl.constexpr,
    RECEIVE: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """``peers`` are the N ranks' inboxes as this rank reaches them, ``inbox`` is its own.

    ``steps`` is ceil(m * SPLITS / programs), and 1 where SPLITS is above 1 or SINGLE. ``split_rows``: rows from there
    on are never used with SPLITS above 1. VECTOR is the words of one 16-byte access. SEND and RECEIVE are both true in
    service; programs that run one after another (the interpreter) test them apart.
    """
    pid = tl.program_id(0)
    if SINGLE:
        _single(
            source, weights, indices, shared, residual, gamma, norm_out, residual_out, inbox, peers, epochs, missing,
            pid, source_rows, rank, split_rows, spin_limit, eps, weight_bias,
            D, TOP_K, SHARED, N, N_POW2, BLOCK // PIECES, PIECES, WIRE, WORD, VECTOR, SEND, RECEIVE, CHECKED,
        )  # fmt: skip
    else:
        _shared_or_looping(
            source, weights, indices, shared, residual, gamma, norm_out, residual_out, inbox, peers, epochs, missing,
            pid, m, steps, source_rows, rank, split_rows, spin_limit, eps, weight_bias,
            D, TOP_K, SHARED, N, N_POW2, SPLITS, BLOCK, SLICE_BLOCK, PIECES, WIRE, WORD, VECTOR, SEND, RECEIVE,
            CHECKED,
        )  # fmt: skip


@triton.jit
def _shared_or_looping(
    source, weights, indices, shared, residual, gamma, norm_out, residual_out, inbox, peers, epochs, missing,
    pid, m, steps, source_rows, rank, split_rows, spin_limit, eps, weight_bias,
    D: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr, N_POW2: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, SLICE_BLOCK: tl.constexpr, PIECES: tl.constexpr,
    WIRE: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """One slice of a row that programs share, or row after row."""
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
