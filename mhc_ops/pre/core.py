"""Device functions of the gates beside the streams: from partial sums of the projection to coefficients, and the collapse. Imports Triton.

Letters as in mhc_ops/project/core.py; part [split, T, C] as in mhc_ops/project/fwd.py.
"""

import triton
import triton.language as tl

from mhc_ops.gates.core import comb_mask, gates_block, load_block, store_block, token_mask
from mhc_ops.project.core import collapse_tile, pick_weights


@triton.jit
def site_program(
    p, part, scale, base, mixes, rstd, pre, post, comb, T, split, norm_eps, hc_eps,
    N: tl.constexpr, P: tl.constexpr, K: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    ITERS: tl.constexpr, PAPER: tl.constexpr, STORE_PRE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Coefficients of BT tokens; [8, P, P] on one warp keeps every iteration in a thread or in shuffles. pre only with STORE_PRE."""
    first = p * BT
    row = first.to(tl.int64)
    t = tl.arange(0, BT)
    i = tl.arange(0, P)
    live = first + t < T
    square = tl.zeros((BT,), tl.float32)
    m_pre = tl.zeros((BT, P), tl.float32)
    m_post = tl.zeros((BT, P), tl.float32)
    m_comb = tl.zeros((BT, P, P), tl.float32)
    for s in range(split):
        piece = part + (tl.cast(s, tl.int64) * T + row) * C
        square += tl.load(piece + t * C + M, mask=live, other=0.0)
        a, b, c = load_block(piece, live, C, N, P, BT)
        m_pre += a
        m_post += b
        m_comb += c
    r = tl.rsqrt(square * (1.0 / K) + norm_eps)
    tl.store(rstd + row + t, r, mask=live)
    m_pre *= r[:, None]
    m_post *= r[:, None]
    m_comb *= r[:, None, None]
    store_block(mixes + row * M, live, m_pre, m_post, m_comb, M, N, P, BT)
    v_pre, v_post, v_comb = gates_block(m_pre, m_post, m_comb, live, scale, base, hc_eps, N, P, ITERS, PAPER)
    on = token_mask(live, N, P)
    two = row * N + t[:, None] * N + i[None, :]
    if STORE_PRE:
        tl.store(pre + two, v_pre, mask=on)
    tl.store(post + two, v_post, mask=on)
    three = row * (N * N) + t[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
    tl.store(comb + three, v_comb, mask=comb_mask(live, N, P))


@triton.jit
def token_mixes(t, part, T, split, norm_eps, N: tl.constexpr, P: tl.constexpr, K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SP: tl.constexpr):
    """The first N mixes of one token [P], and r. SP, a power of two, is at least `split`; all pieces are loaded at once."""
    i = tl.arange(0, P)
    s = tl.arange(0, SP)
    row = part + (s.to(tl.int64) * T + t) * C
    on = s < split
    a = tl.load(row[:, None] + i[None, :], mask=on[:, None] & (i < N)[None, :], other=0.0)
    square = tl.load(row + M, mask=on, other=0.0)
    r = tl.rsqrt(tl.sum(square, 0) * (1.0 / K) + norm_eps)
    return tl.sum(a, 0) * r, r


@triton.jit
def collapse_with(x, y, w, t, d, N: tl.constexpr, P: tl.constexpr, D: tl.constexpr):
    """collapse_tile with weights from a vector [P]"""
    w0, w1, w2, w3, w4, w5, w6, w7 = pick_weights(w, N, P)
    collapse_tile(x, y, w0, w1, w2, w3, w4, w5, w6, w7, t.to(tl.int64), d, N, D)
