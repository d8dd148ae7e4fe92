"""Sinkhorn as registered ops and the autograd.Function around them."""

import torch

from kernel_runtime import eager_call, eager_vjp, once_differentiable, register_specs
from mhc_ops.library import OPS
from reference import mhc as reference


def _forward(logits, iters, eps, convention):
    return reference.sinkhorn(logits, iters=iters, eps=eps, convention=convention)


def _backward(dcomb, logits, iters, eps, convention):
    return eager_vjp(lambda z: _forward(z, iters, eps, convention), [logits], [dcomb])[0]


def _comb_like(logits):
    return torch.empty(logits.shape, dtype=logits.dtype if logits.dtype == torch.float64 else torch.float32, device=logits.device)


FORWARD = OPS.register(
    "sinkhorn_fwd(Tensor logits, int iters, float eps, str convention, str impl) -> Tensor",
    fake=lambda logits, iters, eps, convention: _comb_like(logits),
    eager=_forward,
    triton="mhc_ops.sinkhorn.fwd:sinkhorn_fwd",
)
BACKWARD = OPS.register(
    "sinkhorn_bwd(Tensor dcomb, Tensor logits, int iters, float eps, str convention, str impl) -> Tensor",
    fake=lambda dcomb, logits, iters, eps, convention: torch.empty(logits.shape, dtype=logits.dtype, device=logits.device),
    eager=_backward,
    triton="mhc_ops.sinkhorn.bwd:sinkhorn_bwd",
)
run_forward = eager_call(FORWARD, replay=True)
run_backward = eager_call(BACKWARD, replay=True)
register_specs("mhc_ops.sinkhorn", "mhc_ops.sinkhorn.bwd:specs")


class Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, *options):
        ctx.save_for_backward(logits)
        ctx.options = options
        return run_forward(logits, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx, dcomb):
        (logits,) = ctx.saved_tensors
        return run_backward(dcomb, logits, *ctx.options), None, None, None, None
