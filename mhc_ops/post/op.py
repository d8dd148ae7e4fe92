"""What comes after a sublayer, as registered ops and the autograd.Function around them."""

import torch

from kernel_runtime import eager_call, eager_vjp, once_differentiable, register_specs
from mhc_ops.library import OPS
from reference import mhc as reference

FORWARD = OPS.register(
    "post_fwd(Tensor f, Tensor x, Tensor post, Tensor comb, str impl) -> Tensor",
    fake=lambda f, x, post, comb: x.new_empty(x.shape),
    eager=reference.hc_post,
    triton="mhc_ops.post.fwd:post_fwd",
)
BACKWARD = OPS.register(
    "post_bwd(Tensor dout, Tensor f, Tensor x, Tensor post, Tensor comb, str impl) -> (Tensor df, Tensor dx, Tensor dpost, Tensor dcomb)",
    fake=lambda dout, *inputs: tuple(t.new_empty(t.shape) for t in inputs),
    eager=lambda dout, *inputs: eager_vjp(reference.hc_post, inputs, [dout]),
    triton="mhc_ops.post.bwd:post_bwd",
)
run_forward = eager_call(FORWARD, replay=True)
run_backward = eager_call(BACKWARD, replay=True)
register_specs("mhc_ops.post", "mhc_ops.post.bwd:specs")


class Post(torch.autograd.Function):
    """f, x, post, comb, impl[, replay] -> streams"""

    @staticmethod
    def forward(ctx, f, x, post, comb, *options):
        ctx.save_for_backward(f, x, post, comb)
        ctx.impl = options[0]
        return run_forward(f, x, post, comb, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return *run_backward(dout, *ctx.saved_tensors, ctx.impl), None, None
