"""The vector BMMs backward for Ascend: a program walks over tokens; rows of BD columns in the unified buffer, summed over columns once.

The arithmetic is that of mhc_ops/bmm/bwd.py, which has the launchers and the formulas.
"""

import triton
import triton.language as tl

from mhc_ops.post.ascend import expand_bwd_token


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


@triton.jit(do_not_specialize=["T"])
def res_bmm_bwd_ascend_kernel(dout, comb, x, dcomb, dx, T, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr):
    pid = tl.program_id(0)
    for s in range(0, tl.cdiv(T - pid, tl.num_programs(0))):
        t = (pid + s * tl.num_programs(0)).to(tl.int64)
        expand_bwd_token(t, dout, x, x, comb, comb, dx, dx, dcomb, dcomb, N, D, P, BD, False)


KERNELS = {"pre": pre_bmm_bwd_ascend_kernel, "post": post_bmm_bwd_ascend_kernel, "res": res_bmm_bwd_ascend_kernel}
