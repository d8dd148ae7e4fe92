"""hc_head forward: split of fn, projection, then weights and collapse in one launch, one token's columns a program."""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from mhc_ops.gates.core import gate_pre
from mhc_ops.pre.core import collapse_with, token_mixes
from mhc_ops.pre.fwd import BLOCK_D
from mhc_ops.project.core import cdiv, row_grid
from mhc_ops.project.fwd import STREAM_DTYPE, max_split, part_width, partial_specs, project_partials, project_plan


@triton.jit
def _head_program(
    p, x, part, scale, base, h, mixes, rstd, T, split, norm_eps, hc_eps,
    N: tl.constexpr, P: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (D + BD - 1) // BD
    t = p // blocks
    i = tl.arange(0, P)
    first = p % blocks == 0
    a, r = token_mixes(t, part, T, split, norm_eps, N, P, N * D, N, C, SP)
    tl.store(mixes + t.to(tl.int64) * N + i, a, mask=(i < N) & first)
    tl.store(rstd + t, r, mask=first)
    w = gate_pre(a * tl.load(scale) + tl.load(base + i, mask=i < N, other=0.0), hc_eps, False)
    collapse_with(x, h, w, t, (p % blocks) * BD + tl.arange(0, BD), N, P, D)


@triton.jit(do_not_specialize=["T", "split", "norm_eps", "hc_eps"])
def head_fwd_kernel(
    x, part, scale, base, h, mixes, rstd, T, split, norm_eps, hc_eps,
    N: tl.constexpr, P: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SP: tl.constexpr, BD: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if LOOP:
        for step in range(tl.cdiv(T * ((D + BD - 1) // BD) - pid, tl.num_programs(0))):
            _head_program(
                pid + step * tl.num_programs(0), x, part, scale, base, h, mixes, rstd, T, split, norm_eps, hc_eps, N, P, D, C, SP, BD
            )  # fmt: skip
    else:
        _head_program(pid, x, part, scale, base, h, mixes, rstd, T, split, norm_eps, hc_eps, N, P, D, C, SP, BD)


@cache
def head_spec(dtype: torch.dtype, n: int, d: int, npu: bool = False) -> Spec:
    stream = f"*{TRITON_DTYPE[dtype]}"
    types = {"x": stream, "part": "*fp32", "scale": "*fp32", "base": "*fp32", "h": stream, "mixes": "*fp32", "rstd": "*fp32"}
    types |= {"T": "i32", "split": "i32", "norm_eps": "fp32", "hc_eps": "fp32"}
    consts = {"N": n, "P": triton.next_power_of_2(n), "D": d, "C": part_width(n), "SP": max_split(n * d), "BD": BLOCK_D, "LOOP": npu}
    return Spec(
        head_fwd_kernel, types=types, consts=consts, num_warps=1, hot=True, targets=("ascend",) if npu else ("cuda", "hip"),
        tokens=min(BLOCK_D, d) / d, minimal_bytes=(n + 1) * d * dtype.itemsize + 4 * 2 * (n + 1),
    )  # fmt: skip


def head_fwd(
    x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, hc_eps: float, norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h, mixes, rstd"""
    x, fn, scale, base = x.contiguous(), fn.contiguous(), scale.contiguous(), base.contiguous()
    *lead, n, d = x.shape
    h = torch.empty((*lead, d), dtype=x.dtype, device=x.device)
    mixes = torch.empty((*lead, n), dtype=torch.float32, device=x.device)
    rstd = torch.empty(lead, dtype=torch.float32, device=x.device)
    tokens = x.numel() // (n * d)
    if tokens:
        plan = project_plan(x.device, x.dtype, n, n * d, tokens)
        part, pieces = plan.scratch.allocate(x.device)
        project_partials(plan, x, fn, part, pieces, tokens)
        spec = head_spec(x.dtype, n, d, x.device.type == "npu")
        grid = (row_grid(x.device, tokens * cdiv(d, BLOCK_D)),)
        spec.launch(grid, x, part, scale, base, h, mixes, rstd, tokens, plan.split, norm_eps, hc_eps)
    return h, mixes, rstd


def forward_specs(shape: ModelShape) -> Iterator[Spec]:
    n, d, dtype = shape.hc_mult, shape.hidden, STREAM_DTYPE[shape.dtype]
    yield from partial_specs(dtype, n, n * d)
    for npu in (False, True):
        yield head_spec(dtype, n, d, npu)
