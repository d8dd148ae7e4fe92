"""The gates as registered ops and the autograd.Function around them."""

import torch

from kernel_runtime import eager_call, eager_vjp, once_differentiable, register_specs
from mhc_ops.library import OPS
from reference import mhc as reference

_OPTIONS = "int hc_mult, int iters, float hc_eps, str convention"


def _forward(mixes, scale, base, hc_mult, iters, hc_eps, convention):
    return reference.hc_gates(mixes, scale, base, hc_mult=hc_mult, iters=iters, hc_eps=hc_eps, convention=convention)


def _forward_fake(mixes, scale, base, hc_mult, *options):
    lead = mixes.shape[:-1]
    return tuple(mixes.new_empty((*lead, *tail)) for tail in ((hc_mult,), (hc_mult,), (hc_mult, hc_mult)))


def _backward(dpre, dpost, dcomb, mixes, scale, base, *options):
    return eager_vjp(lambda *t: _forward(*t, *options), [mixes, scale, base], [dpre, dpost, dcomb])


def _backward_fake(dpre, dpost, dcomb, mixes, scale, base, *options):
    return tuple(t.new_empty(t.shape) for t in (mixes, scale, base))


FORWARD = OPS.register(
    f"gates_fwd(Tensor mixes, Tensor scale, Tensor base, {_OPTIONS}, str impl) -> (Tensor pre, Tensor post, Tensor comb)",
    fake=_forward_fake,
    eager=_forward,
    triton="mhc_ops.gates.fwd:gates_fwd",
)
BACKWARD = OPS.register(
    "gates_bwd(Tensor? dpre, Tensor? dpost, Tensor? dcomb, Tensor mixes, Tensor scale, Tensor base,"
    f" {_OPTIONS}, str impl) -> (Tensor dmixes, Tensor dscale, Tensor dbase)",
    fake=_backward_fake,
    eager=_backward,
    triton="mhc_ops.gates.bwd:gates_bwd",
)
run_forward = eager_call(FORWARD, replay=True)
run_backward = eager_call(BACKWARD, replay=True)
register_specs("mhc_ops.gates", "mhc_ops.gates.bwd:specs")


class Gates(torch.autograd.Function):
    """mixes, scale, base, then _OPTIONS, impl -> pre, post, comb"""

    @staticmethod
    def forward(ctx, mixes, scale, base, *options):
        ctx.save_for_backward(mixes, scale, base)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return run_forward(mixes, scale, base, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx, dpre, dpost, dcomb):
        return *run_backward(dpre, dpost, dcomb, *ctx.saved_tensors, *ctx.options), *(None,) * 5
