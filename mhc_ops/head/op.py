"""The exit as registered ops and the autograd.Function around them."""

import torch

from kernel_runtime import eager_call, eager_vjp, once_differentiable, register_specs
from mhc_ops.library import OPS, coefficient_dtype
from reference import mhc as reference


def _forward(x, fn, scale, base, hc_eps, norm_eps):
    """reference.hc_head with what its backward saves"""
    mixes, rstd = reference.hc_project(x, fn, norm_eps=norm_eps)
    return reference.pre_bmm(reference.head_weights(mixes, scale, base, hc_eps=hc_eps), x), mixes, rstd


def _forward_fake(x, fn, *_):
    *lead, _, d = x.shape
    dtype = coefficient_dtype(x)
    return x.new_empty((*lead, d)), x.new_empty((*lead, fn.shape[0]), dtype=dtype), x.new_empty(lead, dtype=dtype)


def _backward(dh, x, fn, scale, base, mixes, rstd, *options):
    return eager_vjp(lambda *t: _forward(*t, *options)[0], [x, fn, scale, base], [dh])


FORWARD = OPS.register(
    "head_fwd(Tensor x, Tensor fn, Tensor scale, Tensor base, float hc_eps, float norm_eps, str impl) -> (Tensor h, Tensor mixes, Tensor rstd)",
    fake=_forward_fake,
    eager=_forward,
    triton="mhc_ops.head.fwd:head_fwd",
)
BACKWARD = OPS.register(
    "head_bwd(Tensor dh, Tensor x, Tensor fn, Tensor scale, Tensor base, Tensor mixes, Tensor rstd,"
    " float hc_eps, float norm_eps, str impl) -> (Tensor dx, Tensor dfn, Tensor dscale, Tensor dbase)",
    fake=lambda dh, x, fn, scale, base, *_: tuple(t.new_empty(t.shape) for t in (x, fn, scale, base)),
    eager=_backward,
    triton="mhc_ops.head.bwd:head_bwd",
)
run_forward = eager_call(FORWARD, replay=True)
run_backward = eager_call(BACKWARD, replay=True)
register_specs("mhc_ops.head", "mhc_ops.head.bwd:specs")


class Head(torch.autograd.Function):
    """x, fn, scale, base, hc_eps, norm_eps, impl -> h"""

    @staticmethod
    def forward(ctx, x, fn, scale, base, *options):
        h, mixes, rstd = run_forward(x, fn, scale, base, *options)
        ctx.save_for_backward(x, fn, scale, base, mixes, rstd)
        ctx.options = options
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        return *run_backward(dh, *ctx.saved_tensors, *ctx.options), None, None, None
