"""What comes before a sublayer, as registered ops and the autograd.Function around them."""

import torch

from kernel_runtime import eager_call, eager_vjp, once_differentiable, register_specs
from mhc_ops.library import OPS, coefficient_dtype
from reference import mhc as reference

SITE = "Tensor fn, Tensor scale, Tensor base, Tensor? pre_mix"
OPTIONS = "int iters, float hc_eps, float norm_eps, str convention"


def forward(x, fn, scale, base, pre_mix, iters, hc_eps, norm_eps, convention):
    """reference.hc_pre with what its backward saves"""
    mixes, rstd = reference.hc_project(x, fn, norm_eps=norm_eps)
    pre, post, comb = reference.hc_gates(mixes, scale, base, hc_mult=x.shape[-2], iters=iters, hc_eps=hc_eps, convention=convention)
    return reference.pre_bmm(pre if pre_mix is None else pre_mix, x), pre, post, comb, mixes, rstd


def forward_fake(x, fn, *_):
    *lead, n, d = x.shape
    dtype = coefficient_dtype(x)
    tails = ((n,), (n,), (n, n), (fn.shape[0],), ())
    return x.new_empty((*lead, d)), *(x.new_empty((*lead, *tail), dtype=dtype) for tail in tails)


def grads_like(*tensors):
    """One gradient per tensor; for an input that was not given (None) an empty one like the first, as kernel_runtime.ops makes of a launcher's
    None."""
    return tuple(tensors[0].new_empty(0) if t is None else t.new_empty(t.shape) for t in tensors)


def _backward(dy, dpre, dpost, dcomb, x, fn, scale, base, pre_mix, mixes, rstd, *options):
    *grads, dpre_mix = eager_vjp(lambda *t: forward(*t, *options)[:4], [x, fn, scale, base, pre_mix], [dy, dpre, dpost, dcomb])
    return *grads, x.new_empty(0) if pre_mix is None else dpre_mix


def _backward_fake(dy, dpre, dpost, dcomb, x, fn, scale, base, pre_mix, *_):
    return grads_like(x, fn, scale, base, pre_mix)


FORWARD = OPS.register(
    f"pre_fwd(Tensor x, {SITE}, {OPTIONS}, str impl) -> (Tensor y, Tensor pre, Tensor post, Tensor comb, Tensor mixes, Tensor rstd)",
    fake=forward_fake,
    eager=forward,
    triton="mhc_ops.pre.fwd:pre_fwd",
)
BACKWARD = OPS.register(
    f"pre_bwd(Tensor? dy, Tensor? dpre, Tensor? dpost, Tensor? dcomb, Tensor x, {SITE}, Tensor mixes, Tensor rstd, {OPTIONS}, str impl)"
    " -> (Tensor dx, Tensor dfn, Tensor dscale, Tensor dbase, Tensor dpre_mix)",
    fake=_backward_fake,
    eager=_backward,
    triton="mhc_ops.pre.bwd:pre_bwd",
)
run_forward = eager_call(FORWARD, replay=True)
run_backward = eager_call(BACKWARD, replay=True)
register_specs("mhc_ops.pre", "mhc_ops.pre.bwd:specs")


class Pre(torch.autograd.Function):
    """x, SITE, OPTIONS, impl[, replay] -> y, pre, post, comb"""

    @staticmethod
    def forward(ctx, x, fn, scale, base, pre_mix, *options):
        y, pre, post, comb, mixes, rstd = run_forward(x, fn, scale, base, pre_mix, *options)
        ctx.save_for_backward(x, fn, scale, base, pre_mix, mixes, rstd)
        ctx.options = options[:5]
        ctx.set_materialize_grads(False)
        return y, pre, post, comb

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dpre, dpost, dcomb):
        saved = ctx.saved_tensors
        *grads, dpre_mix = run_backward(dy, dpre, dpost, dcomb, *saved, *ctx.options)
        return *grads, None if saved[4] is None else dpre_mix, *(None,) * 6
