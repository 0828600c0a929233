"""What the one-shot and the two-step finalize share: a rank's share of a row, mailboxes, and the norm.

Mailboxes. A value and the news of its arrival are one word: an element whose bits are all ones has not arrived.
No result of arithmetic has these bits (the NaN of the hardware is 0x7fff...), so nothing is lost but a NaN's
payload, and -0.0 is a value like any other. ``inbox`` is [rows, BUFFERS, N, D] on every rank: slot ``src`` of a row
holds what rank ``src`` sent. A row's ``epoch`` counts its uses, in step on all ranks; use e is in buffer e % BUFFERS.

A peer writes use e + 2 of a row only after it has consumed use e + 1, which this rank sent from a kernel that
started after its kernel of use e had ended. So what use e cleared, or what is cleared in use e + 1 of use e's
buffer, is clear before use e + 4 is written there.
"""

from __future__ import annotations

# Triton needs both branches of a constexpr choice spelled out, and grows tuples by "+" only.
# ruff: noqa: RET505, RUF005
import triton
import triton.language as tl

#: Buffers of a row; a power of two, so that epochs may wrap.
BUFFERS = 4

_BUFFERS = tl.constexpr(BUFFERS)


@triton.jit
def wire_bits(value, WIRE: tl.constexpr, WORD: tl.constexpr):
    """``value`` rounded to WIRE, as integers of its width that are never all ones."""
    bits = value.to(WIRE).to(WORD, bitcast=True)
    if WORD.primitive_bitwidth == 32:
        return tl.where(bits == -1, 0x7FFFFFFF, bits)
    else:
        return tl.where(bits == -1, 0x7FFF, bits).to(WORD)


@triton.jit
def slot_of(row, epoch, src, N: tl.constexpr, D: tl.constexpr):
    """Offset of slot ``src`` of a row's current buffer, in words."""
    return ((row.to(tl.int64) * _BUFFERS + (epoch & (_BUFFERS - 1))) * N + src) * D


@triton.jit
def row_choices(weights, indices, row, TOP_K: tl.constexpr):
    """A row's indices and weights, all asked for together; with TOP_K 0 there are none."""
    first = row.to(tl.int64) * TOP_K
    chosen = ()
    factors = ()
    for j in tl.static_range(TOP_K):
        chosen = chosen + (tl.load(indices + first + j),)  # type: ignore[assignment]
        factors = factors + (tl.load(weights + first + j).to(tl.float32),)  # type: ignore[assignment]
    return chosen, factors


@triton.jit
def row_terms(
    source, shared, chosen, factors, row, source_rows, columns, inside,
    D: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """What ``row_total`` adds up, as it is in memory: loads that nothing waits for yet.

    A choice that is dropped, of weight zero or out of range is not read. With TOP_K 0 the source is plain, [m, D].
    """
    at = row.to(tl.int64) * D + columns
    terms = ()
    if TOP_K == 0:
        terms = terms + (tl.load(source + at, mask=inside, other=0.0),)  # type: ignore[assignment]
    if SHARED:
        terms = terms + (tl.load(shared + at, mask=inside, other=0.0),)  # type: ignore[assignment]
    for j in tl.static_range(TOP_K):
        here = source + chosen[j].to(tl.int64) * D + columns
        used = _used(chosen[j], factors[j], source_rows)
        terms = terms + (tl.load(here, mask=inside & used, other=0.0),)  # type: ignore[assignment]
    return terms


@triton.jit
def row_total(terms, chosen, factors, source_rows, TOP_K: tl.constexpr, SHARED: tl.constexpr):
    """This rank's share of a row in float32: ``shared + sum_j w_j * routed[idx_j]``, or the plain source.

    A choice that was not read adds zero, whatever its weight.
    """
    FIRST: tl.constexpr = 1 if SHARED and TOP_K > 0 else 0
    if TOP_K == 0:
        return terms[0].to(tl.float32)
    else:
        total = tl.zeros(terms[0].shape, tl.float32)
        if SHARED:
            total += terms[0].to(tl.float32)
        for j in tl.static_range(TOP_K):
            used = _used(chosen[j], factors[j], source_rows)
            total += tl.where(used, factors[j], 0.0) * terms[FIRST + j].to(tl.float32)
        return total


@triton.jit
def _used(index, weight, rows):
    """Whether a choice contributes."""
    return (index >= 0) & (index < rows) & (weight != 0.0)


@triton.jit
def clear(slots, source, columns, inside, N: tl.constexpr, D: tl.constexpr, WORD: tl.constexpr):
    """Mark ``columns`` [n] of the N slots at ``slots`` as not arrived; ``source`` is [N_POW2, 1]."""
    empty = tl.full([source.shape[0], columns.shape[0]], -1, WORD)
    tl.store(slots + source * D + columns[None, :], empty, mask=(source < N) & inside[None, :])


@triton.jit
def await_slots(
    slots, source, columns, missing, names, spin_limit,
    N: tl.constexpr, D: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """The words [N_POW2, n] of N slots, read until all have arrived.

    Checked: after ``spin_limit`` reads, ``missing`` [ranks] is set at the ``names`` [N_POW2, 1] of the slots that are
    not complete; their words, all ones, are NaN.
    """
    here = slots + source * D + columns
    mask = (source < N) & (columns < D)
    words = tl.load(here, mask=mask, other=0, volatile=True)
    late = _late(words)
    spins = spin_limit
    while _again(late, spins, CHECKED):
        words = tl.load(here, mask=mask, other=0, volatile=True)
        late = _late(words)
        spins -= 1
    if CHECKED:
        _note_missing(words, late, missing, names, source < N)
    return words


@triton.jit
def _late(words):
    """Whether any of ``words`` [N_POW2, n] has not arrived."""
    return tl.max(tl.max((words == -1).to(tl.int32), axis=0), axis=0)


@triton.jit
def await_total(
    slots, source, columns, held, missing, spin_limit,
    N: tl.constexpr, D: tl.constexpr, WIRE: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """``held`` [n] plus the sum of N slots, and the sum of its squares, once all have arrived.

    Arrival and squares are reduced in one pass, so that nothing is left to wait for after the last word. One
    order of sums for all ranks. Checked: as ``await_slots``.
    """
    here = slots + source * D + columns[None, :]
    mask = (source < N) & (columns[None, :] < D)
    words = tl.load(here, mask=mask, other=0, volatile=True)
    total, late, squares = _total_of(words, held, WIRE)
    spins = spin_limit
    while _again(late, spins, CHECKED):
        words = tl.load(here, mask=mask, other=0, volatile=True)
        total, late, squares = _total_of(words, held, WIRE)
        spins -= 1
    if CHECKED:
        _note_missing(words, late, missing, source, source < N)
    return total, squares


@triton.jit
def await_others(
    slots, source, columns, held, own, rank, missing, spin_limit,
    N: tl.constexpr, D: tl.constexpr, WIRE: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """As ``await_total``, with this rank's ``own`` words [n] at hand: its slot is not read."""
    mine = source == rank
    here = slots + source * D + columns[None, :]
    mask = (source < N) & (source != rank) & (columns[None, :] < D)
    words = tl.where(mine, own[None, :], tl.load(here, mask=mask, other=0, volatile=True))
    total, late, squares = _total_of(words, held, WIRE)
    spins = spin_limit
    while _again(late, spins, CHECKED):
        words = tl.where(mine, own[None, :], tl.load(here, mask=mask, other=0, volatile=True))
        total, late, squares = _total_of(words, held, WIRE)
        spins -= 1
    if CHECKED:
        _note_missing(words, late, missing, source, source < N)
    return total, squares


@triton.jit
def _again(late, spins, CHECKED: tl.constexpr):
    if CHECKED:
        return (late != 0) & (spins > 0)
    else:
        return late != 0


@triton.jit
def _total_of(words, held, WIRE: tl.constexpr):
    late = tl.max((words == -1).to(tl.int32), axis=0)
    total = held + tl.sum(words.to(WIRE, bitcast=True).to(tl.float32), axis=0)
    late, squares = tl.reduce((late, total * total), 0, _late_and_squares)
    return total, late, squares


@triton.jit
def _late_and_squares(late, squares, other_late, other_squares):
    return late | other_late, squares + other_squares


@triton.jit
def _note_missing(words, late, missing, names, known):
    if late != 0:
        absent = tl.max((words == -1).to(tl.int32), axis=1, keep_dims=True)
        tl.store(missing + names, absent, mask=(absent != 0) & known)


@triton.jit
def normed(total, squares, gamma, eps, weight_bias, D: tl.constexpr):
    """RMSNorm of ``total`` [n], whose squares add up to ``squares``."""
    return total * tl.rsqrt(squares / D + eps) * (gamma + weight_bias)


@triton.jit
def row_columns(BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Columns of a row, so that tokens and words of a row are spread over threads alike (VECTOR at a time)."""
    return tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
