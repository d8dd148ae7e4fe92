"""The vector BMMs backward: one token a program, all of its D columns. Letters as in mhc_ops/project/core.py.

On a GPU post_bmm and res_bmm are the two halves of the expansion's backward, mhc_ops/post/bwd.py.
Ascend has vectors in place of threads and gets other tiles: mhc_ops/bmm/ascend/bwd.py.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.device import on_npu
from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from mhc_ops.bmm import fwd
from mhc_ops.bmm.ascend import bwd as ascend
from mhc_ops.post.bwd import expand_bwd_program, tile
from mhc_ops.project.core import row_grid, stream_sums


@triton.jit
def pre_bmm_bwd_kernel(
    dy, pre, x, dpre, dx, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr
):
    """dpre[n] = sum_d dy[d] * x[n, d];  dx[n, d] = pre[n] * dy[d]"""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, P)
    tl.store(dpre + t * N + i, stream_sums(dy, x, t, pre, dx, N, P, D, R, W, STAGES, True, False), mask=i < N)


@triton.jit
def post_bmm_bwd_kernel(dout, post, f, dpost, df, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr):
    """dpost[k] = sum_d dout[k, d] * f[d];  df[d] = sum_k post[k] * dout[k, d]"""
    expand_bwd_program(tl.program_id(0), dout, f, f, post, post, df, df, dpost, dpost, N, D, R, W, STAGES, MIX=False)


@triton.jit
def res_bmm_bwd_kernel(dout, comb, x, dcomb, dx, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr):
    """dcomb[j, k] = sum_d x[j, d] * dout[k, d];  dx[j, d] = sum_k comb[j, k] * dout[k, d]"""
    expand_bwd_program(tl.program_id(0), dout, x, x, comb, comb, dx, dx, dcomb, dcomb, N, D, R, W, STAGES, FEED=False)


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
        return Spec(ascend.KERNELS[op], types={**types, "T": "i32"}, consts=consts, hot=True, targets=("ascend",), tokens=1, minimal_bytes=minimal)
    sizes, warps = tile(dtype, n, d)
    consts = {"N": n, "D": d, **({"P": p} if op == "pre" else {}), **sizes}
    return Spec(KERNELS[op], types, consts, num_warps=warps, hot=True, targets=("cuda", "hip"), tokens=1, minimal_bytes=minimal)


def _backward(
    op: str, dout: torch.Tensor, coefficient: torch.Tensor, tensor: torch.Tensor, n: int, npu: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dout, coefficient, tensor = dout.contiguous(), coefficient.contiguous(), tensor.contiguous()
    npu = on_npu(tensor.device, npu)
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
