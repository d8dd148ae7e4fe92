"""What lies between the library's ops in a layer, each in one pass over its tensors on a GPU: public functions with `impl` as in the library.

    swiglu(gate_up)             silu(min(gate, limit)) * clip(up)
    combine(rows, place, w)     the weighted sum of a token's rows, wherever the sort has put them
    copy_rows / sum_rows        the other end of the dispatch: a token's row for each of its experts, whose gradient is a sum of rows
    rms_norm(x, weight)         x / rms(x) * weight
    norm_rope(x), rope(x)       RMS norm without weight, and RoPE on the last channels

impl "eager" is plain PyTorch under autograd, as is "auto" on a CPU, and anything on an NPU, where these kernels have not been tried. The
kernels are in fused_kernels.py; they round once, at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernel_runtime import OpLibrary, eager_call, register_specs
from kernel_runtime.impl import select_impl
from reference.rope import apply_rope

OPS = OpLibrary("v4_train_example")
register_specs("train_example", "train_example.fused_kernels:specs")


def _no_eager(*_: object) -> None:
    raise NotImplementedError("the eager form of this op runs under plain autograd, see train_example/fused.py")


def _register(schema: str, fake, launcher: str):
    return eager_call(OPS.register(schema, fake=fake, eager=_no_eager, triton=f"train_example.fused_kernels:{launcher}"))


_swiglu_fwd = _register(
    "swiglu_fwd(Tensor gate_up, float limit, str impl) -> Tensor", lambda x, limit: x.new_empty(x.shape[0], x.shape[1] // 2), "swiglu_fwd"
)
_swiglu_bwd = _register(
    "swiglu_bwd(Tensor grad, Tensor gate_up, float limit, str impl) -> Tensor", lambda grad, x, limit: x.new_empty(x.shape), "swiglu_bwd"
)
_gather_sum = _register(
    "gather_sum(Tensor rows, Tensor place, Tensor? weights, int k, str impl) -> Tensor",
    lambda rows, place, weights, k: rows.new_empty(place.shape[0] // k, rows.shape[1]),
    "gather_sum",
)
_combine_bwd = _register(
    "combine_bwd(Tensor grad, Tensor rows, Tensor place, Tensor weights, str impl) -> (Tensor drows, Tensor dweights)",
    lambda grad, rows, place, weights: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
    "combine_bwd",
)
_rms_norm_fwd = _register(
    "rms_norm_fwd(Tensor x, Tensor weight, float eps, str impl) -> Tensor", lambda x, weight, eps: x.new_empty(x.shape), "rms_norm_fwd"
)
_rms_norm_bwd = _register(
    "rms_norm_bwd(Tensor grad, Tensor x, Tensor weight, float eps, str impl) -> (Tensor dx, Tensor dweight)",
    lambda grad, x, weight, eps: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    "rms_norm_bwd",
)
_norm_rope = _register(
    "norm_rope(Tensor x, Tensor? grad, Tensor cos, Tensor sin, float eps, bool inverse, str impl) -> Tensor",
    lambda x, grad, cos, sin, eps, inverse: (x if grad is None else grad).new_empty(x.shape),
    "norm_rope",
)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.limit = limit
        return _swiglu_fwd(gate_up, limit, "triton")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _swiglu_bwd(grad, *ctx.saved_tensors, ctx.limit, "triton"), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, place: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, place, weights)
        return _gather_sum(rows, place, weights, weights.shape[1], "triton")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        rows, place, weights = ctx.saved_tensors
        drows, dweights = _combine_bwd(grad, rows, place, weights, "triton")
        return drows, None, dweights


class _CopyRows(torch.autograd.Function):
    """x[order // k]; the backward is a sum over the k places of each token, in fp32 and without a scatter-add."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, place: Tensor, k: int, kernel: bool) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k, ctx.kernel = k, kernel
        return x[order // k]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (place,) = ctx.saved_tensors
        if ctx.kernel:
            dx = _gather_sum(grad, place, None, ctx.k, "triton")
        else:
            dx = grad[place].view(-1, ctx.k, grad.shape[1]).sum(dim=1)
        return dx, None, None, None, None


class _GatherRows(torch.autograd.Function):
    """rows[place] for a permutation `place`; the backward gathers with the inverse permutation instead of scattering."""

    @staticmethod
    def forward(ctx, rows: Tensor, place: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[place]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        return grad[order], None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _rms_norm_fwd(x, weight, eps, "triton")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return *_rms_norm_bwd(grad, *ctx.saved_tensors, ctx.eps, "triton"), None


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, eps: float, inverse: bool) -> Tensor:
        ctx.save_for_backward(*((x, cos, sin) if eps >= 0 else (cos, sin)))
        ctx.eps, ctx.inverse = eps, inverse
        return _norm_rope(x, None, cos, sin, eps, inverse, "triton")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        saved = ctx.saved_tensors
        cos, sin = saved[-2:]
        x = saved[0] if ctx.eps >= 0 else grad
        return _norm_rope(x, grad, cos, sin, ctx.eps, ctx.inverse, "triton"), None, None, None, None


def _kernel(op: str, impl: str, tensor: Tensor) -> bool:
    return tensor.device.type != "npu" and select_impl(op, impl, tensor) == "triton"


def swiglu(gate_up: Tensor, limit: float, impl: str = "auto") -> Tensor:
    """gate_up [M, 2I], gate first -> [M, I]: silu of the gate, clipped above at limit, times up, clipped on both sides."""
    if _kernel("swiglu", impl, gate_up):
        return _SwiGLU.apply(gate_up, float(limit))
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def copy_rows(x: Tensor, order: Tensor, place: Tensor, k: int, impl: str = "auto") -> Tensor:
    """x [T, D] -> [T * k, D]: row i is that of token order[i] // k; place is the inverse permutation of order."""
    return _CopyRows.apply(x, order, place, k, _kernel("copy_rows", impl, x))


def permute_rows(rows: Tensor, place: Tensor, order: Tensor) -> Tensor:
    """rows[place]; order is the inverse permutation of place."""
    return _GatherRows.apply(rows, place, order)


def combine(rows: Tensor, order: Tensor, place: Tensor, weights: Tensor, impl: str = "auto") -> Tensor:
    """rows [T * k, D] in sorted order, weights [T, k] fp32 (fp64) -> [T, D] in the rows' dtype, summed in the weights'."""
    if _kernel("combine", impl, weights):
        return _Combine.apply(rows, place, weights)
    rows = permute_rows(rows, place, order).view(*weights.shape, rows.shape[1])
    return (rows.to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, impl: str = "auto") -> Tensor:
    """x [..., D], weight [D] fp32 (fp64) -> x / rms(x) * weight in x's dtype, computed in the weight's."""
    if _kernel("rms_norm", impl, weight):
        return _RMSNorm.apply(x, weight, float(eps))
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False, impl: str = "auto") -> Tensor:
    """`apply_rope` for x [B, S, C] or [B, S, N, C] and cos and sin [S, R / 2]."""
    return _rotated(x, cos, sin, -1.0, inverse, impl)


def norm_rope(x: Tensor, cos: Tensor, sin: Tensor, *, eps: float, impl: str = "auto") -> Tensor:
    """`rope` of x / rms(x) over the channels."""
    return _rotated(x, cos, sin, eps, False, impl)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, eps: float, inverse: bool, impl: str) -> Tensor:
    if x.dim() not in (3, 4) or x.shape[1] != cos.shape[0]:
        raise ValueError(f"x must be [B, S, C] or [B, S, N, C] with S = {cos.shape[0]} as cos has, got shape {tuple(x.shape)}")
    if _kernel("rope", impl, x):
        heads = x if x.dim() == 4 else x[:, :, None]
        return _NormRope.apply(heads, cos, sin, float(eps), inverse).view(x.shape)
    if eps >= 0:
        x = F.rms_norm(x, x.shape[-1:], eps=eps)
    if x.dim() == 4:
        cos, sin = cos[:, None], sin[:, None]
    return apply_rope(x, cos, sin, inverse=inverse)
