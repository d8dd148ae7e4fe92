"""The vector BMMs backward: one token a program, all of its D columns. Letters as in mhc_ops/project/core.py.

Tiles are [P, R, 8]: 8 neighbouring columns are one load of a thread, which also sums over them and over the streams by itself; threads
and warps meet once per token, after the loop. Loads are staged ahead although there is no product to hide.
Ascend has vectors in place of threads and gets other tiles: mhc_ops/bmm/ascend/bwd.py.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from mhc_ops.bmm import fwd
from mhc_ops.bmm.ascend import bwd as ascend
from mhc_ops.project.core import row_grid

STAGES = 4


@triton.jit
def pre_bmm_bwd_kernel(dy, pre, x, dpre, dx, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr):
    """dpre[n] = sum_d dy[d] * x[n, d];  dx[n, d] = pre[n] * dy[d]"""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, P)
    n = tl.arange(0, P)[:, None, None]
    column = tl.arange(0, R)[:, None] * 8 + tl.arange(0, 8)[None, :]
    weight = tl.load(pre + t * N + i, mask=i < N, other=0.0)[:, None, None]
    acc = tl.zeros((P, R), tl.float32)
    for d0 in tl.range(0, D, R * 8, num_stages=STAGES):
        d = d0 + column
        on = (n < N) & (d < D)[None, :, :]
        at = t * (N * D) + n * D + d[None, :, :]
        g = tl.load(dy + t * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :, :]
        v = tl.load(x + at, mask=on, other=0.0).to(tl.float32)
        acc += tl.sum(v * g, 2)
        tl.store(dx + at, (weight * g).to(dx.dtype.element_ty), mask=on)
    tl.store(dpre + t * N + i, tl.sum(acc, 1), mask=i < N)


@triton.jit
def post_bmm_bwd_kernel(dout, post, f, dpost, df, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr):
    """dpost[k] = sum_d dout[k, d] * f[d];  df[d] = sum_k post[k] * dout[k, d]"""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, P)
    k = tl.arange(0, P)[:, None, None]
    column = tl.arange(0, R)[:, None] * 8 + tl.arange(0, 8)[None, :]
    weight = tl.load(post + t * N + i, mask=i < N, other=0.0)[:, None, None]
    acc = tl.zeros((P, R), tl.float32)
    for d0 in tl.range(0, D, R * 8, num_stages=STAGES):
        d = d0 + column
        on = (k < N) & (d < D)[None, :, :]
        g = tl.load(dout + t * (N * D) + k * D + d[None, :, :], mask=on, other=0.0).to(tl.float32)
        v = tl.load(f + t * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :, :]
        acc += tl.sum(g * v, 2)
        tl.store(df + t * D + d, tl.sum(g * weight, 0).to(df.dtype.element_ty), mask=d < D)
    tl.store(dpost + t * N + i, tl.sum(acc, 1), mask=i < N)


@triton.jit
def _res_row(g, acc, comb, x, dx, on, j, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Row j at a tile g of dout: stores dx[j] and returns acc plus this tile's part of dcomb[j]. comb, x, dx point at the token."""
    i = tl.arange(0, P)
    weight = tl.load(comb + j * N + i, mask=i < N, other=0.0)[:, None, None]
    tl.store(dx + j * D, tl.sum(g * weight, 0).to(dx.dtype.element_ty), mask=on)
    return acc + tl.sum(g * tl.load(x + j * D, mask=on, other=0.0).to(tl.float32)[None, :, :], 2)


@triton.jit
def res_bmm_bwd_kernel(dout, comb, x, dcomb, dx, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr):
    """dcomb[j, k] = sum_d x[j, d] * dout[k, d];  dx[j, d] = sum_k comb[j, k] * dout[k, d]"""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, P)
    k = tl.arange(0, P)[:, None, None]
    column = tl.arange(0, R)[:, None] * 8 + tl.arange(0, 8)[None, :]
    row = t * (N * D)
    comb += t * (N * N)
    dcomb += t * (N * N) + i
    # one accumulator a row of dcomb, named one by one because Triton 3.2 has no tuples of tensors
    a0 = tl.zeros((P, R), tl.float32)
    a1 = a0
    a2 = a0
    a3 = a0
    a4 = a0
    a5 = a0
    a6 = a0
    a7 = a0
    for d0 in tl.range(0, D, R * 8, num_stages=STAGES):
        d = d0 + column
        on = d < D
        g = tl.load(dout + row + k * D + d[None, :, :], mask=(k < N) & on[None, :, :], other=0.0).to(tl.float32)
        a0 = _res_row(g, a0, comb, x + row + d, dx + row + d, on, 0, N, D, P)
        a1 = _res_row(g, a1, comb, x + row + d, dx + row + d, on, 1, N, D, P)
        if N > 2:
            a2 = _res_row(g, a2, comb, x + row + d, dx + row + d, on, 2, N, D, P)
        if N > 3:
            a3 = _res_row(g, a3, comb, x + row + d, dx + row + d, on, 3, N, D, P)
        if N > 4:
            a4 = _res_row(g, a4, comb, x + row + d, dx + row + d, on, 4, N, D, P)
        if N > 5:
            a5 = _res_row(g, a5, comb, x + row + d, dx + row + d, on, 5, N, D, P)
        if N > 6:
            a6 = _res_row(g, a6, comb, x + row + d, dx + row + d, on, 6, N, D, P)
        if N > 7:
            a7 = _res_row(g, a7, comb, x + row + d, dx + row + d, on, 7, N, D, P)
    tl.store(dcomb, tl.sum(a0, 1), mask=i < N)
    tl.store(dcomb + N, tl.sum(a1, 1), mask=i < N)
    if N > 2:
        tl.store(dcomb + 2 * N, tl.sum(a2, 1), mask=i < N)
    if N > 3:
        tl.store(dcomb + 3 * N, tl.sum(a3, 1), mask=i < N)
    if N > 4:
        tl.store(dcomb + 4 * N, tl.sum(a4, 1), mask=i < N)
    if N > 5:
        tl.store(dcomb + 5 * N, tl.sum(a5, 1), mask=i < N)
    if N > 6:
        tl.store(dcomb + 6 * N, tl.sum(a6, 1), mask=i < N)
    if N > 7:
        tl.store(dcomb + 7 * N, tl.sum(a7, 1), mask=i < N)


ARGUMENTS = {
    "pre": ("dy", "pre", "x", "dpre", "dx"),
    "post": ("dout", "post", "f", "dpost", "df"),
    "res": ("dout", "comb", "x", "dcomb", "dx"),
}
KERNELS = {"pre": pre_bmm_bwd_kernel, "post": post_bmm_bwd_kernel, "res": res_bmm_bwd_kernel}


@cache
def backward_spec(op: str, dtype: torch.dtype, n: int, d: int, npu: bool) -> Spec:
    """op is "pre", "post" or "res"."""
    stream = f"*{TRITON_DTYPE[dtype]}"
    types = dict(zip(ARGUMENTS[op], (stream, "*fp32", stream, "*fp32", stream), strict=True))
    minimal = {"pre": 2 * n + 1, "post": n + 2, "res": 3 * n}[op] * d * dtype.itemsize
    p = triton.next_power_of_2(n)
    if npu:
        consts = {"N": n, "D": d, "P": p, "BD": min(ascend.block_d(op, p), triton.next_power_of_2(d))}
        return Spec(
            ascend.KERNELS[op], types={**types, "T": "i32"}, consts=consts, hot=True, targets=("ascend",), tokens=1, minimal_bytes=minimal
        )
    rows = min(64, max(8, triton.next_power_of_2(d) // 8))
    consts = {"N": n, "D": d, "P": p, "R": rows, "STAGES": STAGES}
    warps = max(1, rows // 32)
    return Spec(KERNELS[op], types, consts, num_warps=warps, hot=True, targets=("cuda", "hip"), tokens=1, minimal_bytes=minimal)


def _backward(
    op: str, dout: torch.Tensor, coefficient: torch.Tensor, tensor: torch.Tensor, n: int, npu: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dout, coefficient, tensor = dout.contiguous(), coefficient.contiguous(), tensor.contiguous()
    npu = tensor.device.type == "npu" if npu is None else npu
    d = tensor.shape[-1]
    dcoefficient, dtensor = torch.empty_like(coefficient), torch.empty_like(tensor)
    tokens = tensor.numel() // (d if op == "post" else n * d)
    if tokens:
        arguments = (dout, coefficient, tensor, dcoefficient, dtensor, *((tokens,) if npu else ()))
        backward_spec(op, tensor.dtype, n, d, npu).launch((row_grid(tensor.device, tokens),), *arguments)
    return dcoefficient, dtensor


# npu=True launches the form for Ascend on any device (tests run it in the interpreter); None picks it by the device.
def pre_bmm_bwd(dy: torch.Tensor, pre: torch.Tensor, x: torch.Tensor, npu: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward("pre", dy, pre, x, x.shape[-2], npu)


def post_bmm_bwd(dout: torch.Tensor, post: torch.Tensor, f: torch.Tensor, npu: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward("post", dout, post, f, post.shape[-1], npu)


def res_bmm_bwd(dout: torch.Tensor, comb: torch.Tensor, x: torch.Tensor, npu: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward("res", dout, comb, x, x.shape[-2], npu)


def specs(shape: ModelShape) -> Iterator[Spec]:
    yield from fwd.specs(shape)
    for npu in (False, True):
        for op in ("pre", "post", "res"):
            yield backward_spec(op, fwd.STREAM_DTYPE[shape.dtype], shape.hc_mult, shape.hidden, npu)
