"""Expand: the streams after a sublayer, one token a program. Imports Triton. Letters as in mhc_ops/project/core.py."""

import triton
import triton.language as tl

from mhc_ops.project.core import load_streams, load_weights, weighted_streams


@triton.jit
def expand_program(
    p, f, x, post, comb, pre_mix, out, y,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, COLLAPSE: tl.constexpr, FEED: tl.constexpr = True, MIX: tl.constexpr = True,
):  # fmt: skip
    """out[k, d] = post[k] * f[d] + sum_j comb[j, k] * x[j, d] for BD columns of one token: the FIRST index of comb is contracted.

    COLLAPSE: also y[d] = sum_k pre_mix[k] * out[k, d], of out as it is stored. FEED, MIX: with the first, the second term (post_bmm and
    res_bmm have one of them).
    """
    blocks: tl.constexpr = (D + BD - 1) // BD
    t = (p // blocks).to(tl.int64)
    d = (p % blocks) * BD + tl.arange(0, BD)
    on = d < D
    row = t * (N * D) + d
    if FEED:
        fv = tl.load(f + t * D + d, mask=on, other=0.0).to(tl.float32)
    if MIX:
        x0, x1, x2, x3, x4, x5, x6, x7 = load_streams(x + row, on, N, D)
    total = tl.zeros((BD,), tl.float32)
    for k in tl.static_range(N):
        if FEED:
            v = fv * tl.load(post + t * N + k)
        if MIX:
            w0, w1, w2, w3, w4, w5, w6, w7 = load_weights(comb + t * (N * N) + k, N, N)
            mixed = weighted_streams(x0, x1, x2, x3, x4, x5, x6, x7, w0, w1, w2, w3, w4, w5, w6, w7, N)
            if FEED:
                v += mixed
            else:
                v = mixed
        v = v.to(out.dtype.element_ty)
        tl.store(out + row + k * D, v, mask=on)
        if COLLAPSE:
            w = tl.load(pre_mix + t * N + k)
            if k == 0:
                total = v.to(tl.float32) * w
            else:
                total = tl.fma(v.to(tl.float32), w, total)  # the order of weighted_streams
    if COLLAPSE:
        tl.store(y + t * D + d, total.to(y.dtype.element_ty), mask=on)
