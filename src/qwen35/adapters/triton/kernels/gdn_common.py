"""Pieces that the GDN kernels share: gates, tiles, one step of the recurrence. All in float32."""

from __future__ import annotations

import triton
import triton.language as tl

#: Triton's interpreter cuts bfloat16 off where a GPU rounds to nearest even.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 ``x`` rounded to nearest even in ``DTYPE``."""
    if _INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def log_decay(a, A_log, dt_bias):
    """-exp(A_log) * softplus(a + dt_bias), softplus linear past 20."""
    x = a + dt_bias
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # log(1 + e) keeps the bits of e that 1 + e loses (Kahan's log1p).
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return -tl.exp(A_log) * tl.where(x > 20.0, x, log1p)


@triton.jit
def load_gates(gate, beta, A_log, dt_bias, gate_at, beta_at, head, mask, RAW: tl.constexpr):
    """Log decay and beta of one value head at the given offsets: a scalar or a vector of tokens."""
    g = tl.load(gate + gate_at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(beta + beta_at, mask=mask, other=0.0).to(tl.float32)
    if RAW:
        g = log_decay(g, tl.load(A_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32))
        b = 1.0 / (1.0 + tl.exp(-b))
    return g, b


@triton.jit
def load_pieces(
    at, columns, rows, WIDTH: tl.constexpr, INNER: tl.constexpr, PIECES: tl.constexpr, STREAM: tl.constexpr
):
    """Float32 pieces of INNER columns each: ``at`` points at the first; ``columns`` 0..INNER-1, ``rows`` the mask.

    STREAM: evict-first, for what is read once.
    """
    EVICT: tl.constexpr = "evict_first" if STREAM else ""
    pieces = ()
    for i in tl.static_range(PIECES):
        mask = (columns + i * INNER < WIDTH) & rows
        piece = tl.load(at + i * INNER, mask=mask, other=0.0, eviction_policy=EVICT)
        pieces = pieces + (piece.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return pieces


@triton.jit
def store_pieces(
    at, pieces, columns, rows, WIDTH: tl.constexpr, INNER: tl.constexpr, PIECES: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    """The reverse of ``load_pieces``, rounded to the dtype that ``at`` points at. STREAM: for what is not read soon."""
    CACHE: tl.constexpr = ".cs" if STREAM else ""
    for i in tl.static_range(PIECES):
        mask = (columns + i * INNER < WIDTH) & rows
        tl.store(at + i * INNER, rounded(pieces[i], at.dtype.element_ty), mask=mask, cache_modifier=CACHE)


@triton.jit
def select_pieces(condition, yes, no, PIECES: tl.constexpr):
    pieces = ()
    for i in tl.static_range(PIECES):
        pieces = pieces + (tl.where(condition, yes[i], no[i]),)  # type: ignore[assignment]  # noqa: RUF005
    return pieces


@triton.jit
def delta_step(state, q, k, v, scale, alpha, beta, PIECES: tl.constexpr):
    """One token: pieces of the state [BV, I], of q and k [I], v [BV]; returns the new state and o [BV].

    Sums over K are made across pieces first, inside a thread. Both products with the state take the old one, since
    S'q = alpha S q + delta (k.q), and what normalises q and k (eps 1e-6 in the root) is applied to sums: nothing
    waits for the update or for the norms.
    """
    sk = state[0] * k[0][None, :]
    sq = state[0] * q[0][None, :]
    kk, qq, kq = k[0] * k[0], q[0] * q[0], k[0] * q[0]
    for i in tl.static_range(1, PIECES):
        sk += state[i] * k[i][None, :]
        sq += state[i] * q[i][None, :]
        kk += k[i] * k[i]
        qq += q[i] * q[i]
        kq += k[i] * q[i]
    k_factor = tl.rsqrt(tl.sum(kk, 0) + 1e-6)
    q_factor = tl.rsqrt(tl.sum(qq, 0) + 1e-6) * scale
    delta = beta * (v - alpha * (tl.sum(sk, 1) * k_factor))
    o = alpha * (tl.sum(sq, 1) * q_factor) + delta * (tl.sum(kq, 0) * q_factor * k_factor)
    update = (delta * k_factor)[:, None]
    new = ()
    for i in tl.static_range(PIECES):
        new = new + (alpha * state[i] + update * k[i][None, :],)  # type: ignore[assignment]  # noqa: RUF005
    return new, o
