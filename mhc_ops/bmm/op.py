"""The three vector BMMs as registered ops and the autograd.Function around them."""

import torch

from kernel_runtime import eager_call, eager_vjp, once_differentiable, register_specs
from mhc_ops.library import OPS
from reference import mhc as reference


def _register(op, coefficient, tensor, result, fn, fake):
    """Registers <op>_bmm_fwd(coefficient, tensor) -> result and its backward; returns how they are called"""
    forward = OPS.register(
        f"{op}_bmm_fwd(Tensor {coefficient}, Tensor {tensor}, str impl) -> Tensor",
        fake=fake,
        eager=fn,
        triton=f"mhc_ops.bmm.fwd:{op}_bmm_fwd",
    )
    backward = OPS.register(
        f"{op}_bmm_bwd(Tensor d{result}, Tensor {coefficient}, Tensor {tensor}, str impl) -> (Tensor d{coefficient}, Tensor d{tensor})",
        fake=lambda dresult, a, b: (a.new_empty(a.shape), b.new_empty(b.shape)),
        eager=lambda dresult, a, b: eager_vjp(fn, [a, b], [dresult]),
        triton=f"mhc_ops.bmm.bwd:{op}_bmm_bwd",
    )
    return eager_call(forward, replay=True), eager_call(backward, replay=True)


CALLS = {
    "pre": _register("pre", "pre", "x", "y", reference.pre_bmm, lambda pre, x: x.new_empty((*x.shape[:-2], x.shape[-1]))),
    "post": _register("post", "post", "f", "out", reference.post_bmm, lambda post, f: f.new_empty((*post.shape, f.shape[-1]))),
    "res": _register("res", "comb", "x", "out", reference.res_bmm, lambda comb, x: x.new_empty(x.shape)),
}
register_specs("mhc_ops.bmm", "mhc_ops.bmm.bwd:specs")


class Bmm(torch.autograd.Function):
    """coefficient, tensor, op ("pre", "post" or "res"), impl -> result"""

    @staticmethod
    def forward(ctx, coefficient, tensor, op, impl):
        ctx.save_for_backward(coefficient, tensor)
        ctx.op, ctx.impl = op, impl
        return CALLS[op][0](coefficient, tensor, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx, dresult):
        return *CALLS[ctx.op][1](dresult, *ctx.saved_tensors, ctx.impl), None, None
