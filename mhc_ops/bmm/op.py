"""The three vector BMMs as registered ops and the autograd.Functions around them."""

import torch

from kernel_runtime import eager_call, eager_vjp, once_differentiable, register_specs
from mhc_ops.library import OPS
from reference import mhc as reference


def _vjp(fn):
    return lambda dout, a, b: eager_vjp(fn, [a, b], [dout])


def _grads_like(dout, a, b):
    return a.new_empty(a.shape), b.new_empty(b.shape)


PRE_FORWARD = OPS.register(
    "pre_bmm_fwd(Tensor pre, Tensor x, str impl) -> Tensor",
    fake=lambda pre, x: x.new_empty((*x.shape[:-2], x.shape[-1])),
    eager=reference.pre_bmm,
    triton="mhc_ops.bmm.fwd:pre_bmm_fwd",
)
PRE_BACKWARD = OPS.register(
    "pre_bmm_bwd(Tensor dy, Tensor pre, Tensor x, str impl) -> (Tensor dpre, Tensor dx)",
    fake=_grads_like,
    eager=_vjp(reference.pre_bmm),
    triton="mhc_ops.bmm.bwd:pre_bmm_bwd",
)
POST_FORWARD = OPS.register(
    "post_bmm_fwd(Tensor post, Tensor f, str impl) -> Tensor",
    fake=lambda post, f: f.new_empty((*post.shape, f.shape[-1])),
    eager=reference.post_bmm,
    triton="mhc_ops.bmm.fwd:post_bmm_fwd",
)
POST_BACKWARD = OPS.register(
    "post_bmm_bwd(Tensor dout, Tensor post, Tensor f, str impl) -> (Tensor dpost, Tensor df)",
    fake=_grads_like,
    eager=_vjp(reference.post_bmm),
    triton="mhc_ops.bmm.bwd:post_bmm_bwd",
)
RES_FORWARD = OPS.register(
    "res_bmm_fwd(Tensor comb, Tensor x, str impl) -> Tensor",
    fake=lambda comb, x: x.new_empty(x.shape),
    eager=reference.res_bmm,
    triton="mhc_ops.bmm.fwd:res_bmm_fwd",
)
RES_BACKWARD = OPS.register(
    "res_bmm_bwd(Tensor dout, Tensor comb, Tensor x, str impl) -> (Tensor dcomb, Tensor dx)",
    fake=_grads_like,
    eager=_vjp(reference.res_bmm),
    triton="mhc_ops.bmm.bwd:res_bmm_bwd",
)
run_pre_forward = eager_call(PRE_FORWARD, replay=True)
run_pre_backward = eager_call(PRE_BACKWARD, replay=True)
run_post_forward = eager_call(POST_FORWARD, replay=True)
run_post_backward = eager_call(POST_BACKWARD, replay=True)
run_res_forward = eager_call(RES_FORWARD, replay=True)
run_res_backward = eager_call(RES_BACKWARD, replay=True)
register_specs("mhc_ops.bmm", "mhc_ops.bmm.bwd:specs")


class PreBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pre, x, impl):
        ctx.save_for_backward(pre, x)
        ctx.impl = impl
        return run_pre_forward(pre, x, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *run_pre_backward(dy, *ctx.saved_tensors, ctx.impl), None


class PostBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, post, f, impl):
        ctx.save_for_backward(post, f)
        ctx.impl = impl
        return run_post_forward(post, f, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return *run_post_backward(dout, *ctx.saved_tensors, ctx.impl), None


class ResBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comb, x, impl):
        ctx.save_for_backward(comb, x)
        ctx.impl = impl
        return run_res_forward(comb, x, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return *run_res_backward(dout, *ctx.saved_tensors, ctx.impl), None
