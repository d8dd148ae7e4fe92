"""hc_post forward: one launch."""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from mhc_ops.post.core import expand_program
from mhc_ops.project.core import cdiv, row_grid
from mhc_ops.project.fwd import STREAM_DTYPE

BLOCK_D = 512  # two warps; 1024 on four is the same at D = 4096 and leaves a tail at 2560


@triton.jit(do_not_specialize=["T"])
def post_fwd_kernel(f, x, post, comb, out, T, N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, LOOP: tl.constexpr):
    if LOOP:
        for step in range(tl.cdiv(T * ((D + BD - 1) // BD) - tl.program_id(0), tl.num_programs(0))):
            expand_program(tl.program_id(0) + step * tl.num_programs(0), f, x, post, comb, post, out, f, N, D, BD, False)
    else:
        expand_program(tl.program_id(0), f, x, post, comb, post, out, f, N, D, BD, False)


def block_d(n: int, npu: bool) -> int:
    return BLOCK_D if n > 4 or not npu else 2 * BLOCK_D  # Ascend's unified buffer holds all streams of a tile in fp32


@cache
def post_spec(dtype: torch.dtype, n: int, d: int, npu: bool = False) -> Spec:
    stream = f"*{TRITON_DTYPE[dtype]}"
    types = {"f": stream, "x": stream, "post": "*fp32", "comb": "*fp32", "out": stream, "T": "i32"}
    consts = {"N": n, "D": d, "BD": block_d(n, npu), "LOOP": npu}
    return Spec(
        post_fwd_kernel, types=types, consts=consts, num_warps=2, hot=True, targets=("ascend",) if npu else ("cuda", "hip"),
        tokens=min(consts["BD"], d) / d, minimal_bytes=(2 * n + 1) * d * dtype.itemsize + 4 * (n + n * n),
    )  # fmt: skip


def post_fwd(f: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    f, x, post, comb = f.contiguous(), x.contiguous(), post.contiguous(), comb.contiguous()
    n, d = x.shape[-2:]
    out = torch.empty_like(x)
    tokens = x.numel() // (n * d)
    if tokens:
        spec = post_spec(x.dtype, n, d, x.device.type == "npu")
        spec.launch((row_grid(x.device, tokens * cdiv(d, spec.consts["BD"])),), f, x, post, comb, out, tokens)
    return out


def forward_specs(shape: ModelShape) -> Iterator[Spec]:
    for npu in (False, True):
        yield post_spec(STREAM_DTYPE[shape.dtype], shape.hc_mult, shape.hidden, npu)
