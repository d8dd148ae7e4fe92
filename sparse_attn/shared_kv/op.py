"""The attention as registered ops and the autograd.Function around them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kernel_runtime import eager_vjp, once_differentiable, register_specs
from reference import sparse_attn as reference
from sparse_attn.library import OPS

# What both ops take after their tensors: cuts of a pack (None: no pack), first positions as a tensor or as one number (None: right aligned)
_OPTIONS = (
    "Tensor? cu_q, Tensor? cu_ori, Tensor? cu_cmp, Tensor? q_offsets, SymInt? q_offset, float scale, SymInt cmp_ratio, SymInt? window"
)


def _attention(q, ori_kv, cmp_kv, cmp_indices, sinks, cu_q, cu_ori, cu_cmp, q_offsets, q_offset, scale, cmp_ratio, window, **returns):
    return reference.sparse_attn_shared_kv(
        q, ori_kv, cmp_kv, cmp_indices, sinks, softmax_scale=scale, cmp_ratio=cmp_ratio, window=window, cu_seqlens_q=cu_q,
        cu_seqlens_ori=cu_ori, cu_seqlens_cmp=cu_cmp, q_offset=q_offset if q_offsets is None else q_offsets, **returns,
    )  # fmt: skip


def _forward(*args):
    *inputs, return_cmp_probs = args
    results = _attention(*inputs, return_lse=True, return_cmp_probs=return_cmp_probs)
    return results if return_cmp_probs else (*results, results[1].new_empty(0))


def _forward_fake(q, ori_kv, cmp_kv, cmp_indices, sinks, *options):
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    probs_shape = cmp_indices.shape if options[-1] else (0,)
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide), q.new_empty(probs_shape, dtype=wide)


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """torch's own switch, on for the block if wanted: the reference's backward adds rows with index_add, atomic on a GPU otherwise."""
    before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or before:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _absent(like: torch.Tensor) -> torch.Tensor:
    """The gradient of an input that was not given: an op's output cannot be None."""
    return like.new_empty(0)


def _backward(dout, q, ori_kv, cmp_kv, cmp_indices, sinks, out, lse, *rest):
    *options, deterministic = rest
    with _deterministic(deterministic):
        grads = eager_vjp(
            lambda q, ori_kv, cmp_kv, sinks: _attention(q, ori_kv, cmp_kv, cmp_indices, sinks, *options),
            [q, ori_kv, cmp_kv, sinks],
            [dout],
        )
    return tuple(_absent(q) if x is None else g for x, g in zip((q, ori_kv, cmp_kv, sinks), grads))


def _backward_fake(dout, q, ori_kv, cmp_kv, cmp_indices, sinks, *_):
    return tuple(_absent(q) if x is None else x.new_empty(x.shape) for x in (q, ori_kv, cmp_kv, sinks))


FORWARD = OPS.register(
    f"shared_kv_fwd(Tensor q, Tensor ori_kv, Tensor? cmp_kv, Tensor? cmp_indices, Tensor? sinks, {_OPTIONS},"
    " bool return_cmp_probs, str impl) -> (Tensor out, Tensor lse, Tensor cmp_probs)",
    fake=_forward_fake,
    eager=_forward,
    triton="sparse_attn.shared_kv.choice:chosen_fwd",
    portable="sparse_attn.shared_kv.fwd:attention_fwd",
    hopper="sparse_attn.shared_kv.choice:hopper_fwd",
)
BACKWARD = OPS.register(
    "shared_kv_bwd(Tensor dout, Tensor q, Tensor ori_kv, Tensor? cmp_kv, Tensor? cmp_indices, Tensor? sinks, Tensor out, Tensor lse,"
    f" {_OPTIONS}, bool deterministic, str impl) -> (Tensor dq, Tensor dori_kv, Tensor dcmp_kv, Tensor dsinks)",
    fake=_backward_fake,
    eager=_backward,
    triton="sparse_attn.shared_kv.choice:chosen_bwd",
    portable="sparse_attn.shared_kv.bwd:attention_bwd",
    hopper="sparse_attn.shared_kv.choice:hopper_bwd",
)
register_specs("sparse_attn.shared_kv", "sparse_attn.shared_kv.choice:specs")


class SharedKV(torch.autograd.Function):
    """q, ori_kv, cmp_kv, cmp_indices, sinks, then _OPTIONS, return_cmp_probs, deterministic, impl -> out, lse, cmp_probs."""

    @staticmethod
    def forward(ctx, q, ori_kv, cmp_kv, cmp_indices, sinks, cu_q, cu_ori, cu_cmp, q_offsets, *options):
        *numbers, return_cmp_probs, deterministic, impl = options
        tensors = (q, ori_kv, cmp_kv, cmp_indices, sinks)
        cuts = (cu_q, cu_ori, cu_cmp, q_offsets)
        out, lse, probs = FORWARD(*tensors, *cuts, *numbers, return_cmp_probs, impl)
        ctx.save_for_backward(*tensors, out, lse, *cuts)
        ctx.options = (*numbers, deterministic, impl)
        ctx.mark_non_differentiable(lse, probs)
        ctx.set_materialize_grads(False)
        return out, lse, probs

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse, _dprobs):
        if dout is None:
            return (None,) * 16
        saved = ctx.saved_tensors
        cmp_kv, sinks = saved[2], saved[4]
        dq, dori, dcmp, dsinks = BACKWARD(dout, *saved, *ctx.options)
        return (dq, dori, None if cmp_kv is None else dcmp, None, None if sinks is None else dsinks, *(None,) * 11)
