"""hc_post backward: one launch, one token a program, and the same as a device function for the boundary.

    df[d] = sum_k post[k] * g[k, d]      dx[j, d] = sum_k comb[j, k] * g[k, d]
    dpost[k] = sum_d g[k, d] * f[d]      dcomb[j, k] = sum_d x[j, d] * g[k, d]            g the gradient of the new streams

[R, W] tiles and sums along W keep the reductions in a thread until the end of D, and loads are staged ahead although there is no product.
GPUs take the accumulators as a tuple of N*N + N tensors [R]; Ascend's Triton has no tuples and gets tiles over the streams,
mhc_ops/post/ascend.py.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.device import on_npu
from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from mhc_ops.post import ascend
from mhc_ops.post.fwd import forward_specs
from mhc_ops.project.core import row_grid
from mhc_ops.project.fwd import STREAM_DTYPE


@triton.jit
def expand_bwd_program(
    t, dout, f, x, post, comb, df, dx, dpost, dcomb,
    N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
    FEED: tl.constexpr = True, MIX: tl.constexpr = True,
):  # fmt: skip
    """FEED, MIX: with f and post, with x and comb (post_bmm and res_bmm have one pair of them)"""
    t = t.to(tl.int64)
    at = tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
    row = t * (N * D) + at
    rowf = t * D + at
    p = ()
    if FEED:
        for k in tl.static_range(N):
            p = p + (tl.load(post + t * N + k),)
    FIRST: tl.constexpr = N if FEED else 0  # of dcomb among the accumulators
    acc = ()
    for _ in tl.static_range(FIRST + (N * N if MIX else 0)):
        acc = acc + (tl.zeros((R,), tl.float32),)
    for d in tl.range(0, D, R * W, num_stages=STAGES):
        on = at < D - d
        raw = ()
        for k in tl.static_range(N):
            raw = raw + (tl.load(dout + row + d + k * D, mask=on, other=0.0),)
        if FEED:
            fv = tl.load(f + rowf + d, mask=on, other=0.0)
        xs = ()
        if MIX:
            for j in tl.static_range(N):
                xs = xs + (tl.load(x + row + d + j * D, mask=on, other=0.0),)
        g = ()
        for k in tl.static_range(N):
            g = g + (raw[k].to(tl.float32),)
        new = ()
        if FEED:
            fv = fv.to(tl.float32)
            v = g[0] * p[0]
            for k in tl.static_range(1, N):
                v += g[k] * p[k]
            tl.store(df + rowf + d, v.to(df.dtype.element_ty), mask=on)
            for k in tl.static_range(N):
                new = new + (acc[k] + tl.sum(g[k] * fv, 1),)
        if MIX:
            for j in tl.static_range(N):
                xj = xs[j].to(tl.float32)
                for k in tl.static_range(N):
                    new = new + (acc[FIRST + j * N + k] + tl.sum(xj * g[k], 1),)
                v = g[0] * tl.load(comb + t * (N * N) + j * N)
                for k in tl.static_range(1, N):
                    v += g[k] * tl.load(comb + t * (N * N) + j * N + k)
                tl.store(dx + row + d + j * D, v.to(dx.dtype.element_ty), mask=on)
        acc = new
    if FEED:
        for k in tl.static_range(N):
            tl.store(dpost + t * N + k, tl.sum(acc[k], 0))
    if MIX:
        for i in tl.static_range(N * N):
            tl.store(dcomb + t * (N * N) + i, tl.sum(acc[FIRST + i], 0))


@triton.jit
def post_bwd_kernel(
    dout, f, x, post, comb, df, dx, dpost, dcomb,
    N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expand_bwd_program(tl.program_id(0), dout, f, x, post, comb, df, dx, dpost, dcomb, N, D, R, W, STAGES)


def tile(dtype: torch.dtype, n: int, d: int) -> tuple[dict[str, int], int]:
    """R, W and STAGES, and warps: 16-byte loads; one warp where N*N accumulators take the registers, or a token has few columns"""
    rows, stages = (64, 4) if d > 2560 and n <= 4 else (32, 3)
    return {"R": rows, "W": 4 if dtype == torch.float32 else 8, "STAGES": stages}, rows // 32


@cache
def post_bwd_spec(dtype: torch.dtype, n: int, d: int, npu: bool = False) -> Spec:
    stream = f"*{TRITON_DTYPE[dtype]}"
    types = {"dout": stream, "f": stream, "x": stream, "post": "*fp32", "comb": "*fp32", "df": stream, "dx": stream}
    types |= {"dpost": "*fp32", "dcomb": "*fp32"}
    if npu:
        consts = {"N": n, "D": d, **ascend.tile(n)}
        minimal = (3 * n + 2) * d * dtype.itemsize + 4 * 2 * (n + n * n)
        return Spec(
            ascend.post_bwd_ascend_kernel, types={**types, "T": "i32"}, consts=consts, hot=True, targets=("ascend",), tokens=1,
            minimal_bytes=minimal,
        )  # fmt: skip
    sizes, warps = tile(dtype, n, d)
    return Spec(post_bwd_kernel, types=types, consts={"N": n, "D": d, **sizes}, num_warps=warps, hot=True, targets=("cuda", "hip"))


def post_bwd(
    dout: torch.Tensor, f: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, npu: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu=True launches the form for Ascend on any device (tests run it in the interpreter); None picks it by the device."""
    dout, f, x, post, comb = dout.contiguous(), f.contiguous(), x.contiguous(), post.contiguous(), comb.contiguous()
    npu = on_npu(x.device, npu)
    n, d = x.shape[-2:]
    df, dx, dpost, dcomb = torch.empty_like(f), torch.empty_like(x), torch.empty_like(post), torch.empty_like(comb)
    tokens = x.numel() // (n * d)
    if tokens:
        arguments = (dout, f, x, post, comb, df, dx, dpost, dcomb, *((tokens,) if npu else ()))
        post_bwd_spec(x.dtype, n, d, npu).launch((row_grid(x.device, tokens),), *arguments)
    return df, dx, dpost, dcomb


def specs(shape: ModelShape) -> Iterator[Spec]:
    """hc_post in both directions"""
    yield from forward_specs(shape)
    for npu in (False, True):
        yield post_bwd_spec(STREAM_DTYPE[shape.dtype], shape.hc_mult, shape.hidden, npu)
