"""The vector BMMs forward: BLOCK_D columns of one token a program, coefficients as scalars. Letters as in mhc_ops/project/core.py.

post_bmm and res_bmm are the two terms of the expansion, mhc_ops/post/core.py.

One source for every target: with LOOP a program walks over many row blocks (an NPU has few cores and a small grid), without it does one.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.device import on_npu
from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from mhc_ops.post.core import expand_program
from mhc_ops.project.core import cdiv, collapse_tile, load_weights, row_grid

BLOCK_D = 1024
STREAM_DTYPE = {name: dtype for dtype, name in TRITON_DTYPE.items()}


@triton.jit
def pre_bmm_program(p, pre, x, y, N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """y[d] = sum_n pre[n] * x[n, d] for BD columns of one token"""
    blocks: tl.constexpr = (D + BD - 1) // BD
    t = (p // blocks).to(tl.int64)
    w0, w1, w2, w3, w4, w5, w6, w7 = load_weights(pre + t * N, 1, N)
    collapse_tile(x, y, w0, w1, w2, w3, w4, w5, w6, w7, t, (p % blocks) * BD + tl.arange(0, BD), N, D)


@triton.jit(do_not_specialize=["T"])
def pre_bmm_fwd_kernel(pre, x, y, T, N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, LOOP: tl.constexpr):
    pid = tl.program_id(0)
    if LOOP:
        for i in range(0, tl.cdiv(T * ((D + BD - 1) // BD) - pid, tl.num_programs(0))):
            pre_bmm_program(pid + i * tl.num_programs(0), pre, x, y, N, D, BD)
    else:
        pre_bmm_program(pid, pre, x, y, N, D, BD)


@triton.jit(do_not_specialize=["T"])
def post_bmm_fwd_kernel(post, f, out, T, N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, LOOP: tl.constexpr):
    pid = tl.program_id(0)
    if LOOP:
        for i in range(0, tl.cdiv(T * ((D + BD - 1) // BD) - pid, tl.num_programs(0))):
            expand_program(pid + i * tl.num_programs(0), f, f, post, post, post, out, out, N, D, BD, False, MIX=False)
    else:
        expand_program(pid, f, f, post, post, post, out, out, N, D, BD, False, MIX=False)


@triton.jit(do_not_specialize=["T"])
def res_bmm_fwd_kernel(comb, x, out, T, N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, LOOP: tl.constexpr):
    pid = tl.program_id(0)
    if LOOP:
        for i in range(0, tl.cdiv(T * ((D + BD - 1) // BD) - pid, tl.num_programs(0))):
            expand_program(pid + i * tl.num_programs(0), x, x, comb, comb, comb, out, out, N, D, BD, False, FEED=False)
    else:
        expand_program(pid, x, x, comb, comb, comb, out, out, N, D, BD, False, FEED=False)


@cache
def forward_spec(op: str, dtype: torch.dtype, n: int, d: int, npu: bool) -> Spec:
    """op is "pre", "post" or "res"."""
    coefficient, tensor, result = {"pre": ("pre", "x", "y"), "post": ("post", "f", "out"), "res": ("comb", "x", "out")}[op]
    stream = f"*{TRITON_DTYPE[dtype]}"
    block_d = min(BLOCK_D, triton.next_power_of_2(d))
    return Spec(
        {"pre": pre_bmm_fwd_kernel, "post": post_bmm_fwd_kernel, "res": res_bmm_fwd_kernel}[op],
        types={coefficient: "*fp32", tensor: stream, result: stream, "T": "i32"},
        consts={"N": n, "D": d, "BD": block_d, "LOOP": npu},
        hot=True,
        targets=("ascend",) if npu else ("cuda", "hip"),
        tokens=min(block_d, d) / d,
        minimal_bytes={"pre": n + 1, "post": n + 1, "res": 2 * n}[op] * d * dtype.itemsize,
    )


def _forward(op: str, coefficient: torch.Tensor, tensor: torch.Tensor, lead: torch.Size, streams: bool, n: int, npu: bool | None) -> torch.Tensor:
    coefficient, tensor = coefficient.contiguous(), tensor.contiguous()
    d = tensor.shape[-1]
    out = torch.empty((*lead, n, d) if streams else (*lead, d), dtype=tensor.dtype, device=tensor.device)
    if tokens := lead.numel():
        spec = forward_spec(op, tensor.dtype, n, d, on_npu(tensor.device, npu))
        grid = row_grid(tensor.device, tokens * cdiv(d, spec.consts["BD"]))
        spec.launch((grid,), coefficient, tensor, out, tokens)
    return out


# npu=True launches the form for Ascend on any device (tests run it in the interpreter); None picks it by the device.
def pre_bmm_fwd(pre: torch.Tensor, x: torch.Tensor, npu: bool | None = None) -> torch.Tensor:
    return _forward("pre", pre, x, x.shape[:-2], False, x.shape[-2], npu)


def post_bmm_fwd(post: torch.Tensor, f: torch.Tensor, npu: bool | None = None) -> torch.Tensor:
    return _forward("post", post, f, f.shape[:-1], True, post.shape[-1], npu)


def res_bmm_fwd(comb: torch.Tensor, x: torch.Tensor, npu: bool | None = None) -> torch.Tensor:
    return _forward("res", comb, x, x.shape[:-2], True, x.shape[-2], npu)


def specs(shape: ModelShape) -> Iterator[Spec]:
    for npu in (False, True):
        for op in ("pre", "post", "res"):
            yield forward_spec(op, STREAM_DTYPE[shape.dtype], shape.hc_mult, shape.hidden, npu)
