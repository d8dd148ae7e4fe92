"""The projection as registered ops and the autograd.Function around them."""

import torch

from kernel_runtime import eager_call, eager_vjp, once_differentiable, register_specs
from mhc_ops.library import OPS, coefficient_dtype
from reference import mhc as reference


def _forward(x, fn, norm_eps):
    return reference.hc_project(x, fn, norm_eps=norm_eps)


def _forward_fake(x, fn, norm_eps):
    lead, dtype = x.shape[:-2], coefficient_dtype(x)
    return x.new_empty((*lead, fn.shape[0]), dtype=dtype), x.new_empty(lead, dtype=dtype)


def _backward(dmixes, x, fn, mixes, rstd):
    # The kernel works from mixes and rstd and needs no norm_eps. The reference gets, token by token, the one that rstd stands for.
    norm_eps = rstd.pow(-2) - x.to(rstd.dtype).square().mean((-2, -1))
    return eager_vjp(lambda x, fn: _forward(x, fn, norm_eps), [x, fn], [dmixes, None])


FORWARD = OPS.register(
    "project_fwd(Tensor x, Tensor fn, float norm_eps, str impl) -> (Tensor mixes, Tensor rstd)",
    fake=_forward_fake,
    eager=_forward,
    triton="mhc_ops.project.fwd:project_fwd",
)
BACKWARD = OPS.register(
    "project_bwd(Tensor dmixes, Tensor x, Tensor fn, Tensor mixes, Tensor rstd, str impl) -> (Tensor dx, Tensor dfn)",
    fake=lambda dmixes, x, fn, mixes, rstd: (x.new_empty(x.shape), fn.new_empty(fn.shape)),
    eager=_backward,
    triton="mhc_ops.project.bwd:project_bwd",
)
run_forward = eager_call(FORWARD, replay=True)
run_backward = eager_call(BACKWARD, replay=True)
register_specs("mhc_ops.project", "mhc_ops.project.bwd:specs")


class Project(torch.autograd.Function):
    """x, fn, norm_eps, impl -> mixes, rstd (which carries no gradient)"""

    @staticmethod
    def forward(ctx, x, fn, norm_eps, impl):
        mixes, rstd = run_forward(x, fn, norm_eps, impl)
        ctx.save_for_backward(x, fn, mixes, rstd)
        ctx.impl = impl
        ctx.mark_non_differentiable(rstd)
        return mixes, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx, dmixes, _drstd):
        return *run_backward(dmixes, *ctx.saved_tensors, ctx.impl), None, None
