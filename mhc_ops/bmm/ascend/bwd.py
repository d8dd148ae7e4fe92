"""The vector BMMs backward for Ascend: a program walks over tokens; rows of BD columns in the unified buffer, summed over columns once.

The arithmetic is that of mhc_ops/bmm/bwd.py, which has the launchers and the formulas.
"""

import triton
import triton.language as tl


def block_d(op: str, p: int) -> int:
    """Columns of a tile: the unified buffer holds 192 KB, and "res" keeps P accumulators [P, BD]."""
    return {2: 2048, 4: 512, 8: 128}[p] if op == "res" else 4096 // p


@triton.jit(do_not_specialize=["T"])
def pre_bmm_bwd_ascend_kernel(dy, pre, x, dpre, dx, T, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr):
    pid = tl.program_id(0)
    n = tl.arange(0, P)
    for s in range(0, tl.cdiv(T - pid, tl.num_programs(0))):
        t = (pid + s * tl.num_programs(0)).to(tl.int64)
        weight = tl.load(pre + t * N + n, mask=n < N, other=0.0)[:, None]
        acc = tl.zeros((P, BD), tl.float32)
        for d0 in range(0, D, BD):
            d = d0 + tl.arange(0, BD)
            on = (n < N)[:, None] & (d < D)[None, :]
            at = n[:, None] * D + d[None, :]
            g = tl.load(dy + t * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            acc += tl.load(x + t * (N * D) + at, mask=on, other=0.0).to(tl.float32) * g
            tl.store(dx + t * (N * D) + at, (weight * g).to(dx.dtype.element_ty), mask=on)
        tl.store(dpre + t * N + n, tl.sum(acc, 1), mask=n < N)


@triton.jit(do_not_specialize=["T"])
def post_bmm_bwd_ascend_kernel(dout, post, f, dpost, df, T, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr):
    pid = tl.program_id(0)
    k = tl.arange(0, P)
    for s in range(0, tl.cdiv(T - pid, tl.num_programs(0))):
        t = (pid + s * tl.num_programs(0)).to(tl.int64)
        weight = tl.load(post + t * N + k, mask=k < N, other=0.0)[:, None]
        acc = tl.zeros((P, BD), tl.float32)
        for d0 in range(0, D, BD):
            d = d0 + tl.arange(0, BD)
            on = (k < N)[:, None] & (d < D)[None, :]
            g = tl.load(dout + t * (N * D) + k[:, None] * D + d[None, :], mask=on, other=0.0).to(tl.float32)
            acc += g * tl.load(f + t * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            tl.store(df + t * D + d, tl.sum(g * weight, 0).to(df.dtype.element_ty), mask=d < D)
        tl.store(dpost + t * N + k, tl.sum(acc, 1), mask=k < N)


@triton.jit
def _res_row(g, acc, comb, x, dx, on, j, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    i = tl.arange(0, P)
    weight = tl.load(comb + j * N + i, mask=i < N, other=0.0)[:, None]
    tl.store(dx + j * D, tl.sum(g * weight, 0).to(dx.dtype.element_ty), mask=on)
    return acc + g * tl.load(x + j * D, mask=on, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["T"])
def res_bmm_bwd_ascend_kernel(dout, comb, x, dcomb, dx, T, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, P)
    for s in range(0, tl.cdiv(T - pid, tl.num_programs(0))):
        t = (pid + s * tl.num_programs(0)).to(tl.int64)
        row = t * (N * D)
        weights = comb + t * (N * N)
        a0 = tl.zeros((P, BD), tl.float32)
        a1 = a0
        a2 = a0
        a3 = a0
        a4 = a0
        a5 = a0
        a6 = a0
        a7 = a0
        for d0 in range(0, D, BD):
            d = d0 + tl.arange(0, BD)
            on = d < D
            at = dout + row + i[:, None] * D + d[None, :]
            g = tl.load(at, mask=(i < N)[:, None] & on[None, :], other=0.0).to(tl.float32)
            a0 = _res_row(g, a0, weights, x + row + d, dx + row + d, on, 0, N, D, P)
            a1 = _res_row(g, a1, weights, x + row + d, dx + row + d, on, 1, N, D, P)
            if N > 2:
                a2 = _res_row(g, a2, weights, x + row + d, dx + row + d, on, 2, N, D, P)
            if N > 3:
                a3 = _res_row(g, a3, weights, x + row + d, dx + row + d, on, 3, N, D, P)
            if N > 4:
                a4 = _res_row(g, a4, weights, x + row + d, dx + row + d, on, 4, N, D, P)
            if N > 5:
                a5 = _res_row(g, a5, weights, x + row + d, dx + row + d, on, 5, N, D, P)
            if N > 6:
                a6 = _res_row(g, a6, weights, x + row + d, dx + row + d, on, 6, N, D, P)
            if N > 7:
                a7 = _res_row(g, a7, weights, x + row + d, dx + row + d, on, 7, N, D, P)
        out = dcomb + t * (N * N) + i
        tl.store(out, tl.sum(a0, 1), mask=i < N)
        tl.store(out + N, tl.sum(a1, 1), mask=i < N)
        if N > 2:
            tl.store(out + 2 * N, tl.sum(a2, 1), mask=i < N)
        if N > 3:
            tl.store(out + 3 * N, tl.sum(a3, 1), mask=i < N)
        if N > 4:
            tl.store(out + 4 * N, tl.sum(a4, 1), mask=i < N)
        if N > 5:
            tl.store(out + 5 * N, tl.sum(a5, 1), mask=i < N)
        if N > 6:
            tl.store(out + 6 * N, tl.sum(a6, 1), mask=i < N)
        if N > 7:
            tl.store(out + 7 * N, tl.sum(a7, 1), mask=i < N)


KERNELS = {"pre": pre_bmm_bwd_ascend_kernel, "post": post_bmm_bwd_ascend_kernel, "res": res_bmm_bwd_ascend_kernel}
