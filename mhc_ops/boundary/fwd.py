"""hc_post_pre forward: three launches. On sm_90 the two of mhc_ops/hopper, where they cover the call (`hopper.takes`), elsewhere:

1. the new streams (post/core.py) beside the split of fn, so that the split costs no launch of its own; with pre_mix, which is known
   beforehand, y is made here too, while the streams are on the chip;
2. the projection of the new streams;
3. gates and collapse (pre/fwd.py); with pre_mix gates alone.
"""

from collections.abc import Iterator
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from kernel_runtime.workspace import Scratch
from mhc_ops import hopper
from mhc_ops.library import mix_columns
from mhc_ops.post.core import expand_program
from mhc_ops.post.fwd import block_d
from mhc_ops.pre.fwd import gates_collapse, gates_collapse_spec
from mhc_ops.project.core import PLANS, cdiv, row_grid
from mhc_ops.project.fwd import (
    SPLIT_BLOCK,
    STREAM_DTYPE,
    part_width,
    project_partials,
    project_plan,
    project_spec,
    split_fn_tile,
    split_tiles,
)  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def expand_split_kernel(
    f, x, post, comb, pre_mix, fn, out, y, pieces, T,
    N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, C: tl.constexpr, COLLAPSE: tl.constexpr, SPLIT: tl.constexpr,
    BD: tl.constexpr, BK: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """SPLIT: the first programs (or, with LOOP, steps) split fn"""
    tiles: tl.constexpr = C * ((N * D + BK - 1) // BK) if SPLIT else 0
    pid = tl.program_id(0)
    if LOOP:
        if SPLIT:
            for step in range(tl.cdiv(tiles - pid, tl.num_programs(0))):
                split_fn_tile(pid + step * tl.num_programs(0), fn, pieces, N * D, M, C, BK)
        for step in range(tl.cdiv(T * ((D + BD - 1) // BD) - pid, tl.num_programs(0))):
            expand_program(pid + step * tl.num_programs(0), f, x, post, comb, pre_mix, out, y, N, D, BD, COLLAPSE)
    elif pid < tiles:
        if SPLIT:
            split_fn_tile(pid, fn, pieces, N * D, M, C, BK)
    else:
        expand_program(pid - tiles, f, x, post, comb, pre_mix, out, y, N, D, BD, COLLAPSE)


@cache
def expand_split_spec(dtype: torch.dtype, n: int, d: int, pre_mix: bool, npu: bool = False) -> Spec:
    stream, m = f"*{TRITON_DTYPE[dtype]}", mix_columns(n)
    types = {"f": stream, "x": stream, **dict.fromkeys(("post", "comb", "pre_mix", "fn"), "*fp32"), "out": stream, "y": stream}
    split = dtype == torch.bfloat16
    types |= {"pieces": "*bf16" if split else "*fp32", "T": "i32"}
    consts = {
        "N": n, "D": d, "M": m, "C": part_width(m), "COLLAPSE": pre_mix, "SPLIT": split, "BD": block_d(n, npu), "BK": SPLIT_BLOCK,
        "LOOP": npu,
    }  # fmt: skip
    minimal = (2 * n + 1 + pre_mix) * d * dtype.itemsize + 4 * (n + n * n + pre_mix * n)
    return Spec(
        expand_split_kernel, types=types, consts=consts, num_warps=2, hot=True, targets=("ascend",) if npu else ("cuda", "hip"),
        tokens={"x": min(consts["BD"], d) / d}, minimal_bytes=minimal,
    )  # fmt: skip


@lru_cache(PLANS)
def expand_plan(device: torch.device, dtype: torch.dtype, n: int, d: int, tokens: int, pre_mix: bool) -> tuple[Spec, tuple[int, ...]]:
    spec = expand_split_spec(dtype, n, d, pre_mix, device.type == "npu")
    programs = tokens * cdiv(d, spec.consts["BD"]) + (split_tiles(mix_columns(n), n * d) if spec.consts["SPLIT"] else 0)
    return spec, (row_grid(device, programs),)


def post_pre_fwd(
    f: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    pre_mix: torch.Tensor | None, iters: int, hc_eps: float, norm_eps: float, convention: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """streams, y, then pre, post and comb of the site that begins, its mixes and rstd"""
    f, x, post, comb = f.contiguous(), x.contiguous(), post.contiguous(), comb.contiguous()
    fn, scale, base = fn.contiguous(), scale.contiguous(), base.contiguous()
    pre_mix = None if pre_mix is None else pre_mix.contiguous()
    n, d = x.shape[-2:]
    m, k = fn.shape
    part: Scratch
    tokens, part, split = x.numel() // k, base, 0
    copied = (f, post, comb) if pre_mix is None else (f, post, comb, pre_mix)
    if tokens and hopper.takes(x, *copied, aligned=hopper.FORWARD_ALIGNED):
        from mhc_ops.hopper.fwd import boundary_fwd

        return boundary_fwd(f, x, post, comb, fn, scale, base, pre_mix, iters, hc_eps, norm_eps, convention)
    streams, y = torch.empty_like(x), torch.empty_like(f)
    if tokens:
        device, dtype = x.device, x.dtype
        plan = project_plan(device, dtype, m, k, tokens)
        part, pieces = plan.scratch.allocate(device)
        spec, grid = expand_plan(device, dtype, n, d, tokens, pre_mix is not None)
        spec.launch(
            grid, f, x, post, comb, post if pre_mix is None else pre_mix, fn, streams, y, pieces if plan.splits_fn else fn, tokens
        )  # fmt: skip
        project_partials(plan, streams, fn, part, pieces, tokens, split_fn=False)
        split = plan.split
    gates = gates_collapse(
        streams, part, split, tokens, scale, base, pre_mix, y, iters, hc_eps, norm_eps, convention, collapse=pre_mix is None
    )  # fmt: skip
    return streams, y, *gates


def forward_specs(shape: ModelShape) -> Iterator[Spec]:
    n, d, dtype = shape.hc_mult, shape.hidden, STREAM_DTYPE[shape.dtype]
    for npu in (False, True):
        yield project_spec(dtype, mix_columns(n), n * d, npu)
    for npu in (False, True):
        for pre_mix in (False, True):
            yield expand_split_spec(dtype, n, d, pre_mix, npu)
            yield gates_collapse_spec(dtype, n, d, shape.sinkhorn_iters, "v4", pre_mix, not pre_mix, npu)
    if hopper.has_gluon() and hopper.covers(dtype, n, d, hopper.FORWARD_ALIGNED):
        from mhc_ops.hopper.fwd import specs as hopper_specs

        yield from hopper_specs(d, shape.sinkhorn_iters)
