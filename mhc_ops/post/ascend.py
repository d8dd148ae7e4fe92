"""hc_post backward for Ascend: [P, BD] tiles over the streams, no tuples, programs walk over tokens. Formulas: mhc_ops/post/bwd.py."""

import triton
import triton.language as tl


def tile(n: int) -> dict[str, int]:
    """P and BD: the unified buffer holds 192 KB, and there are P + 1 accumulators [P, BD]."""
    p = triton.next_power_of_2(n)
    return {"P": p, "BD": {2: 1024, 4: 512, 8: 128}[p]}


@triton.jit
def _row(g, acc, comb, x, dx, on, j, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Row j at a tile g [P, BD] of the gradient: stores dx[j], returns acc plus this tile's part of dcomb[j]; pointers at the token"""
    k = tl.arange(0, P)
    weight = tl.load(comb + j * N + k, mask=k < N, other=0.0)
    tl.store(dx + j * D, tl.sum(g * weight[:, None], 0).to(dx.dtype.element_ty), mask=on)
    return acc + g * tl.load(x + j * D, mask=on, other=0.0).to(tl.float32)[None, :]


@triton.jit
def expand_bwd_token(
    t, dout, f, x, post, comb, df, dx, dpost, dcomb, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, FEED: tl.constexpr
):
    """Token t (int64). FEED: with f and post; res_bmm has none"""
    row = t * (N * D)
    w = comb + t * (N * N)
    k = tl.arange(0, P)
    if FEED:
        p = tl.load(post + t * N + k, mask=k < N, other=0.0)
        s = tl.zeros((P, BD), tl.float32)
    a0 = tl.zeros((P, BD), tl.float32)
    a1 = tl.zeros((P, BD), tl.float32)
    a2 = tl.zeros((P, BD), tl.float32)
    a3 = tl.zeros((P, BD), tl.float32)
    a4 = tl.zeros((P, BD), tl.float32)
    a5 = tl.zeros((P, BD), tl.float32)
    a6 = tl.zeros((P, BD), tl.float32)
    a7 = tl.zeros((P, BD), tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        on = d < D
        g = tl.load(dout + row + k[:, None] * D + d[None, :], mask=(k < N)[:, None] & on[None, :], other=0.0).to(tl.float32)
        if FEED:
            s += g * tl.load(f + t * D + d, mask=on, other=0.0).to(tl.float32)[None, :]
            tl.store(df + t * D + d, tl.sum(g * p[:, None], 0).to(df.dtype.element_ty), mask=on)
        a0 = _row(g, a0, w, x + row + d, dx + row + d, on, 0, N, D, P)
        a1 = _row(g, a1, w, x + row + d, dx + row + d, on, 1, N, D, P)
        if N > 2:
            a2 = _row(g, a2, w, x + row + d, dx + row + d, on, 2, N, D, P)
        if N > 3:
            a3 = _row(g, a3, w, x + row + d, dx + row + d, on, 3, N, D, P)
        if N > 4:
            a4 = _row(g, a4, w, x + row + d, dx + row + d, on, 4, N, D, P)
        if N > 5:
            a5 = _row(g, a5, w, x + row + d, dx + row + d, on, 5, N, D, P)
        if N > 6:
            a6 = _row(g, a6, w, x + row + d, dx + row + d, on, 6, N, D, P)
        if N > 7:
            a7 = _row(g, a7, w, x + row + d, dx + row + d, on, 7, N, D, P)
    if FEED:
        tl.store(dpost + t * N + k, tl.sum(s, 1), mask=k < N)
    out = dcomb + t * (N * N) + k
    tl.store(out, tl.sum(a0, 1), mask=k < N)
    tl.store(out + N, tl.sum(a1, 1), mask=k < N)
    if N > 2:
        tl.store(out + 2 * N, tl.sum(a2, 1), mask=k < N)
    if N > 3:
        tl.store(out + 3 * N, tl.sum(a3, 1), mask=k < N)
    if N > 4:
        tl.store(out + 4 * N, tl.sum(a4, 1), mask=k < N)
    if N > 5:
        tl.store(out + 5 * N, tl.sum(a5, 1), mask=k < N)
    if N > 6:
        tl.store(out + 6 * N, tl.sum(a6, 1), mask=k < N)
    if N > 7:
        tl.store(out + 7 * N, tl.sum(a7, 1), mask=k < N)


@triton.jit(do_not_specialize=["T"])
def post_bwd_ascend_kernel(dout, f, x, post, comb, df, dx, dpost, dcomb, T, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr):
    pid = tl.program_id(0)
    for step in range(tl.cdiv(T - pid, tl.num_programs(0))):
        t = (pid + step * tl.num_programs(0)).to(tl.int64)
        expand_bwd_token(t, dout, f, x, post, comb, df, dx, dpost, dcomb, N, D, P, BD, True)
