"""Pieces that the GDN kernels share: gates, normalisation, one step of the recurrence. All in float32."""

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
def sigmoid(b):
    return 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def load_gates(gate, beta, A_log, dt_bias, gate_at, beta_at, head, mask, RAW: tl.constexpr):
    """Log decay and beta of one value head at the given offsets: a scalar or a vector of tokens."""
    g = tl.load(gate + gate_at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(beta + beta_at, mask=mask, other=0.0).to(tl.float32)
    if RAW:
        g = log_decay(g, tl.load(A_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32))
        b = sigmoid(b)
    return g, b


@triton.jit
def inner_products(q, k, scale, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The factors that normalise q (times ``scale``) and k, eps 1e-6 in the root, and the normalised q.k.

    q and k point at the head. Normalising sums rather than tokens lets products with the state start early.
    """
    at = tl.arange(0, BLOCK)
    inside = (at < WIDTH) & live
    q1 = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
    k1 = tl.load(k + at, mask=inside, other=0.0).to(tl.float32)
    q_factor = tl.rsqrt(tl.sum(q1 * q1, 0) + 1e-6) * scale
    k_factor = tl.rsqrt(tl.sum(k1 * k1, 0) + 1e-6)
    return q_factor, k_factor, tl.sum(q1 * k1, 0) * q_factor * k_factor


@triton.jit
def delta_step(state, q, k, v, q_factor, k_factor, qk, alpha, beta):
    """One token: state [K/I, BV, I], raw q and k [K/I, 1, I], v [BV]; returns the new state and o [BV].

    Both products are taken with the old state, since S'q = alpha S q + delta (k.q): neither waits for the update.
    """
    sk = tl.sum(tl.sum(state * k, 0), 1) * k_factor
    sq = tl.sum(tl.sum(state * q, 0), 1) * q_factor
    delta = beta * (v - alpha * sk)
    return alpha * state + (delta * k_factor)[None, :, None] * k, alpha * sq + delta * qk
