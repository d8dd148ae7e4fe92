"""The boundary of two sublayers as registered ops and the autograd.Function around them."""

import torch

from kernel_runtime import eager_call, eager_vjp, once_differentiable, register_specs
from mhc_ops.library import OPS
from mhc_ops.pre import op as pre_op
from mhc_ops.pre.op import OPTIONS, SITE
from reference import mhc as reference


def _forward(f, x, post, comb, *site_and_options):
    streams = reference.hc_post(f, x, post, comb)
    return streams, *pre_op.forward(streams, *site_and_options)


def _backward(dstreams, dy, dpre, dpost_out, dcomb_out, f, x, post, comb, streams, fn, scale, base, pre_mix, mixes, rstd, *options):
    *grads, dpre_mix = eager_vjp(
        lambda *t: _forward(*t, *options)[:5],
        [f, x, post, comb, fn, scale, base, pre_mix],
        [dstreams, dy, dpre, dpost_out, dcomb_out],
    )
    return *grads, f.new_empty(0) if pre_mix is None else dpre_mix


def _backward_fake(dstreams, dy, dpre, dpost_out, dcomb_out, f, x, post, comb, streams, fn, scale, base, pre_mix, *_):
    return pre_op.grads_like(f, x, post, comb, fn, scale, base, pre_mix)


FORWARD = OPS.register(
    f"post_pre_fwd(Tensor f, Tensor x, Tensor post, Tensor comb, {SITE}, {OPTIONS}, str impl)"
    " -> (Tensor streams, Tensor y, Tensor pre, Tensor post_out, Tensor comb_out, Tensor mixes, Tensor rstd)",
    fake=lambda f, x, post, comb, fn, *_: (x.new_empty(x.shape), *pre_op.forward_fake(x, fn)),
    eager=_forward,
    triton="mhc_ops.boundary.fwd:post_pre_fwd",
)
BACKWARD = OPS.register(
    "post_pre_bwd(Tensor? dstreams, Tensor? dy, Tensor? dpre, Tensor? dpost_out, Tensor? dcomb_out,"
    f" Tensor f, Tensor x, Tensor post, Tensor comb, Tensor streams, {SITE}, Tensor mixes, Tensor rstd, {OPTIONS}, str impl)"
    " -> (Tensor df, Tensor dx, Tensor dpost, Tensor dcomb, Tensor dfn, Tensor dscale, Tensor dbase, Tensor dpre_mix)",
    fake=_backward_fake,
    eager=_backward,
    triton="mhc_ops.boundary.bwd:post_pre_bwd",
)
run_forward = eager_call(FORWARD, replay=True)
run_backward = eager_call(BACKWARD, replay=True)
register_specs("mhc_ops.boundary", "mhc_ops.boundary.bwd:specs")


class PostPre(torch.autograd.Function):
    """f, x, post, comb, SITE, OPTIONS, impl[, replay] -> streams, y, pre, post, comb (the last two of the site that begins)"""

    @staticmethod
    def forward(ctx, f, x, post, comb, fn, scale, base, pre_mix, *options):
        streams, *outputs, mixes, rstd = run_forward(f, x, post, comb, fn, scale, base, pre_mix, *options)
        ctx.save_for_backward(f, x, post, comb, streams, fn, scale, base, pre_mix, mixes, rstd)
        ctx.options = options[:5]
        ctx.set_materialize_grads(False)
        return streams, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        *found, dpre_mix = run_backward(*grads, *saved, *ctx.options)
        return *found, None if saved[8] is None else dpre_mix, *(None,) * 6
