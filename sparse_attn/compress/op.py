"""The compressor as registered ops and the autograd.Function around them."""

from __future__ import annotations

import torch

from kernel_runtime import eager_vjp, once_differentiable, register_specs
from reference import compress as reference
from sparse_attn.library import OPS

_INPUTS = "Tensor kv, Tensor gate, Tensor position_bias, int ratio, bool overlap, Tensor? cu_seqlens, str impl"


def _forward(kv, gate, position_bias, ratio, overlap, cu_seqlens):
    return reference.compress_kv(kv, gate, position_bias, ratio, overlap=overlap, cu_seqlens=cu_seqlens)


def _forward_fake(kv, gate, position_bias, ratio, overlap, cu_seqlens):
    *lead, tokens, channels = kv.shape
    return kv.new_empty((*lead, tokens // ratio, channels // (2 if overlap else 1)))


def _backward(dout, kv, gate, position_bias, *options):
    return eager_vjp(lambda *tensors: _forward(*tensors, *options), [kv, gate, position_bias], [dout])


def _backward_fake(dout, kv, gate, position_bias, *_):
    return kv.new_empty(kv.shape), gate.new_empty(gate.shape), position_bias.new_empty(position_bias.shape)


FORWARD = OPS.register(
    f"compress_fwd({_INPUTS}) -> Tensor", fake=_forward_fake, eager=_forward, triton="sparse_attn.compress.fwd:compress_fwd"
)
BACKWARD = OPS.register(
    f"compress_bwd(Tensor dout, {_INPUTS}) -> (Tensor dkv, Tensor dgate, Tensor dposition_bias)",
    fake=_backward_fake,
    eager=_backward,
    triton="sparse_attn.compress.bwd:compress_bwd",
)
register_specs("sparse_attn.compress", "sparse_attn.compress.bwd:specs")


class Compress(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv, gate, position_bias, ratio, overlap, cu_seqlens, impl):
        ctx.save_for_backward(kv, gate, position_bias, cu_seqlens)
        ctx.options = (ratio, overlap, impl)
        return FORWARD(kv, gate, position_bias, ratio, overlap, cu_seqlens, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        kv, gate, position_bias, cu_seqlens = ctx.saved_tensors
        ratio, overlap, impl = ctx.options
        return *BACKWARD(dout, kv, gate, position_bias, ratio, overlap, cu_seqlens, impl), None, None, None, None
