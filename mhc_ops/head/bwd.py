"""hc_head backward: that of hc_pre (pre/bwd.py) with one gate, `pre`, and no iterations."""

from collections.abc import Iterator

import torch

from kernel_runtime.launch import Spec
from kernel_runtime.registry import ModelShape
from mhc_ops.head.fwd import forward_specs
from mhc_ops.pre.bwd import gates_dpre_spec, no_tokens, site_bwd, site_plan
from mhc_ops.project.bwd import dx_dfn_spec, reduce, reduce_spec
from mhc_ops.project.fwd import STREAM_DTYPE


def head_bwd(
    dh: torch.Tensor, x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, mixes: torch.Tensor, rstd: torch.Tensor,
    hc_eps: float, _norm_eps: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dx, dfn, dscale, dbase. _norm_eps is in rstd: the eager form alone, which projects again, needs it."""
    dh, x, fn, scale, base = dh.contiguous(), x.contiguous(), fn.contiguous(), scale.contiguous(), base.contiguous()
    if not x.numel():
        return no_tokens(x, fn, scale, base, None)[:4]
    n, d = x.shape[-2:]
    tokens = x.numel() // (n * d)
    plan, dx = site_plan(x.device, x.dtype, n, d, n, tokens, 1, "v4", False, False), torch.empty_like(x)
    dfn_part, dgate_part, _ = site_bwd(
        plan, plan.scratch.allocate(x.device), None, dh, None, mixes, mixes, x, fn, scale, base, None, mixes, rstd, hc_eps, dx, tokens
    )  # fmt: skip
    dfn, dbase, dscale = reduce(dfn_part, dgate_part, plan.dx.groups, fn, 1)
    return dx, dfn, dscale, dbase


def specs(shape: ModelShape) -> Iterator[Spec]:
    """hc_head in both directions"""
    n, d, dtype = shape.hc_mult, shape.hidden, STREAM_DTYPE[shape.dtype]
    yield from forward_specs(shape)
    for npu in (False, True):
        yield gates_dpre_spec(dtype, n, d, n, 1, "v4", False, False, npu)
        yield dx_dfn_spec(dtype, n, d, n, 1, False, True, npu)
    yield reduce_spec(n, n * d, 1)
