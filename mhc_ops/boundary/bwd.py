"""hc_post_pre backward: three launches. On sm_90 those of mhc_ops/hopper, where they cover the call (`hopper.takes`), elsewhere:

1. gates and dpre (pre/bwd.py);
2. the gradient of the streams between the sublayers, all its parts added up (project/bwd.py), with the first stage of d(fn), d(gate);
3. the backward of the expansion from it (post/bwd.py) beside the second stage, which costs no launch of its own.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from mhc_ops import hopper
from mhc_ops.boundary.fwd import forward_specs
from mhc_ops.library import mix_columns
from mhc_ops.post.bwd import expand_bwd_program, post_bwd, post_bwd_spec, tile
from mhc_ops.pre.bwd import no_tokens, site_bwd, site_bwd_specs, site_gradients, site_plan
from mhc_ops.project.bwd import REDUCE_BLOCK, gate_width, reduce, reduce_spec, reduce_tile, reduce_tiles
from mhc_ops.project.fwd import STREAM_DTYPE


@triton.jit(do_not_specialize=["groups"])
def reduce_expand_bwd_kernel(
    dfn_part, dgate_part, dfn, dbase, dscale, dout, f, x, post, comb, df, dx, dpost, dcomb, groups,
    N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, S: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = M * ((N * D + BK - 1) // BK) + 1
    pid = tl.program_id(0)
    if pid < tiles:
        reduce_tile(pid, dfn_part, dgate_part, dfn, dbase, dscale, groups, N * D, M, S, L, BK)
    else:
        expand_bwd_program(pid - tiles, dout, f, x, post, comb, df, dx, dpost, dcomb, N, D, R, W, STAGES)


@cache
def reduce_expand_bwd_spec(dtype: torch.dtype, n: int, d: int) -> Spec:
    stream, m = f"*{TRITON_DTYPE[dtype]}", mix_columns(n)
    types = dict.fromkeys(("dfn_part", "dgate_part", "dfn", "dbase", "dscale"), "*fp32")
    types |= {"dout": stream, "f": stream, "x": stream, "post": "*fp32", "comb": "*fp32", "df": stream, "dx": stream}
    types |= {"dpost": "*fp32", "dcomb": "*fp32", "groups": "i32"}
    sizes, warps = tile(dtype, n, d)
    consts = {"N": n, "D": d, "M": m, "S": 3, "L": gate_width(m, 3), "BK": REDUCE_BLOCK, **sizes}
    return Spec(reduce_expand_bwd_kernel, types=types, consts=consts, num_warps=warps, hot=True, targets=("cuda", "hip"))


def post_pre_bwd(
    dstreams: torch.Tensor | None, dy: torch.Tensor | None, dpre: torch.Tensor | None, dpost_out: torch.Tensor | None,
    dcomb_out: torch.Tensor | None, f: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, streams: torch.Tensor,
    fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, pre_mix: torch.Tensor | None, mixes: torch.Tensor, rstd: torch.Tensor,
    iters: int, hc_eps: float, _norm_eps: float, convention: str,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """df, dx, dpost, dcomb of the site that ends, dfn, dscale, dbase, dpre_mix of the one that begins. _norm_eps is in rstd: the eager form
    alone, which projects again, needs it."""
    f, x, post, comb, streams = f.contiguous(), x.contiguous(), post.contiguous(), comb.contiguous(), streams.contiguous()
    fn, scale, base = fn.contiguous(), scale.contiguous(), base.contiguous()
    pre_mix = None if pre_mix is None else pre_mix.contiguous()
    n, d = x.shape[-2:]
    m, k = fn.shape
    tokens = x.numel() // k
    if not tokens:
        dx, dfn, dscale, dbase, dpre_mix = no_tokens(x, fn, scale, base, pre_mix)
        return torch.empty_like(f), dx, torch.empty_like(post), torch.empty_like(comb), dfn, dscale, dbase, dpre_mix
    dstreams = None if dstreams is None else dstreams.contiguous()
    dy, dpre, dpost_out, dcomb_out = site_gradients(dy, dpre, dpost_out, dcomb_out, x, mixes)
    if dstreams is not None and hopper.takes(x, dstreams, dy, f, post, comb, *(() if pre_mix is None else (pre_mix,))):
        from mhc_ops.hopper.bwd import boundary_bwd

        return boundary_bwd(
            dstreams, dy, dpre, dpost_out, dcomb_out, f, x, post, comb, streams, fn, scale, base, pre_mix, mixes, rstd, iters, hc_eps,
            convention,
        )  # fmt: skip
    plan = site_plan(
        x.device, x.dtype, n, d, m, tokens, iters, convention, dpre is not None, pre_mix is not None, dstreams is not None, True
    )  # fmt: skip
    scratch = plan.scratch.allocate(x.device)
    total = scratch[-1]
    dfn_part, dgate_part, dpre_mix = site_bwd(
        plan, scratch, dstreams, dy, dpre, dpost_out, dcomb_out, streams, fn, scale, base, pre_mix, mixes, rstd, hc_eps, total, tokens
    )  # fmt: skip
    groups = plan.dx.groups
    if x.device.type == "npu":
        dfn, dbase, dscale = reduce(dfn_part, dgate_part, groups, fn, 3)
        return *post_bwd(total, f, x, post, comb), dfn, dscale, dbase, dpre_mix
    df, dx, dpost, dcomb = torch.empty_like(f), torch.empty_like(x), torch.empty_like(post), torch.empty_like(comb)
    dfn, dscale, dbase = torch.empty_like(fn), torch.empty_like(scale), torch.empty_like(base)
    reduce_expand_bwd_spec(x.dtype, n, d).launch(
        (reduce_tiles(m, k, 3) + tokens,), dfn_part, dgate_part, dfn, dbase, dscale, total, f, x, post, comb, df, dx, dpost, dcomb, groups
    )  # fmt: skip
    return df, dx, dpost, dcomb, dfn, dscale, dbase, dpre_mix


def specs(shape: ModelShape) -> Iterator[Spec]:
    """hc_post_pre in both directions"""
    n, d, dtype = shape.hc_mult, shape.hidden, STREAM_DTYPE[shape.dtype]
    yield from forward_specs(shape)
    yield from site_bwd_specs(shape, True)
    yield reduce_expand_bwd_spec(dtype, n, d)
    yield post_bwd_spec(dtype, n, d, True)
    yield reduce_spec(mix_columns(n), n * d, 3)
    if hopper.has_gluon() and hopper.covers(dtype, n, d):
        from mhc_ops.hopper.bwd import specs as hopper_specs

        yield from hopper_specs(d)
