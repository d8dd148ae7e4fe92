"""The indexer's KL loss as one registered op that gives value and gradients, the autograd.Function around it, the checkpoint policy."""

import torch
from torch.utils.checkpoint import CheckpointPolicy

from indexer.library import LAYOUT_NUMBERS, LAYOUT_TENSORS, OPS, eager_deterministic, offset_of
from kernel_runtime import eager_call, eager_vjp, once_differentiable, register_specs
from reference import indexer as scores_reference
from reference import indexer_loss as reference


def _loss(
    q_index, k_index, weights, indices, teacher, q, cmp_kv, lse, scores, cu_seqlens_q, cu_seqlens_k, q_offsets, softmax_scale, factor, target,
    cmp_ratio, q_offset, gradients, deterministic,
):  # fmt: skip
    found = []  # scores are not taken: the gradients need the products that they come from

    def total(q_index, k_index, weights):
        rows, valid = reference.indexer_kl_rows(
            q_index, k_index, weights, indices, teacher=teacher, q=q, cmp_kv=cmp_kv, lse=lse, softmax_scale=softmax_scale, target=target,
            cmp_ratio=cmp_ratio, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, q_offset=offset_of(q_offset, q_offsets),
        )  # fmt: skip
        found.extend([rows.sum(), valid.sum(dtype=torch.int32)])
        return found[0]

    dtype = scores_reference.compute_dtype(q_index)
    leaves = [q_index, k_index.to(dtype), weights.to(dtype)]  # gradients of k and weights stay in the dtype of the sums
    if gradients:
        with eager_deterministic(deterministic):
            grads = eager_vjp(total, leaves, [torch.ones((), dtype=dtype, device=q_index.device)])
    else:
        total(*leaves)
        grads = tuple(x.new_empty(0) for x in leaves)
    return found[0].detach() * factor, found[1], *grads


def _fake_loss(q_index, k_index, weights, *options):
    dtype = torch.float64 if q_index.dtype == torch.float64 else torch.float32
    device, gradients = q_index.device, options[-2]
    total, count = torch.empty((), dtype=dtype, device=device), torch.empty((), dtype=torch.int32, device=device)
    pairs = ((q_index, q_index.dtype), (k_index, dtype), (weights, dtype))
    return total, count, *(torch.empty(x.shape if gradients else (0,), dtype=d, device=device) for x, d in pairs)


# total: factor * sum of L_t, scalar. count: valid rows, int32 scalar. Then, without the factor, the gradients of q_index in its
# dtype, of k_index and weights in fp32 (fp64 for fp64), or three empty tensors without `gradients`.
LOSS = OPS.register(
    "indexer_kl_loss(Tensor q_index, Tensor k_index, Tensor weights, Tensor? indices, Tensor? teacher, Tensor? q, Tensor? cmp_kv,"
    f" Tensor? lse, Tensor? scores, {LAYOUT_TENSORS}, float softmax_scale, float factor, str target, {LAYOUT_NUMBERS}, bool gradients,"
    " bool deterministic, str impl) -> (Tensor total, Tensor count, Tensor dq_index, Tensor dk_index, Tensor dweights)",
    fake=_fake_loss,
    eager=_loss,
    triton="indexer.kl_loss.fwd:indexer_kl_loss_fwd",
)

KL_OPS = (LOSS,)


def save_kl_policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """Selective activation checkpointing that keeps the KL loss's results, so that it does not run again in the backward pass.

    ``checkpoint(fn, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_kl_policy))``; everything else is
    recomputed. ``list(KL_OPS)`` is the same as an op list, to be joined with other ops that shall be kept.
    Kept between forward and backward: the gradients of q_index, k_index and weights, about the size of q_index.
    """
    return CheckpointPolicy.MUST_SAVE if op in KL_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _scale(dq_index, dk_index, dweights, dloss, factor, weights_dtype):
    wide = torch.promote_types(dq_index.dtype, torch.float32)
    dtypes = (dq_index.dtype, dq_index.dtype, weights_dtype)
    scale = dloss * factor
    return tuple((g.to(wide) * scale).to(d) for g, d in zip((dq_index, dk_index, dweights), dtypes))


def _fake_scale(dq_index, dk_index, dweights, dloss, factor, weights_dtype):
    dtypes = (dq_index.dtype, dq_index.dtype, weights_dtype)
    return tuple(torch.empty(g.shape, dtype=d, device=g.device) for g, d in zip((dq_index, dk_index, dweights), dtypes))


# The saved gradients times a scalar tensor and a factor, each product rounded once; a bf16 tensor
# times an fp32 scalar tensor would round the scalar to bf16 first.
BACKWARD = OPS.register(
    "indexer_kl_loss_bwd(Tensor dq_index, Tensor dk_index, Tensor dweights, Tensor dloss, float factor, ScalarType weights_dtype, str impl)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_fake_scale,
    eager=_scale,
    triton="indexer.kl_loss.bwd:indexer_kl_loss_bwd",
)
run_loss = eager_call(LOSS, replay=True)
run_backward = eager_call(BACKWARD, replay=True)
register_specs("indexer.kl_loss", "indexer.kl_loss.bwd:specs")


class IndexerKLLoss(torch.autograd.Function):
    """coefficient * total / denominator; the gradients come from the forward op, the backward only scales them."""

    @staticmethod
    def forward(ctx, q_index, k_index, weights, mean, denominator, coefficient, *args):
        on_device = isinstance(denominator, torch.Tensor) or (mean and denominator is None)
        # a factor that is known on the host goes into the op, which saves launches
        ctx.factor, scale = 1.0 if on_device else coefficient / (1 if denominator is None else denominator), None
        loss, count, *grads = run_loss(q_index, k_index, weights, *args[:10], ctx.factor, *args[10:])  # 10: up to softmax_scale
        if on_device:
            denominator = count.clamp(min=1) if denominator is None else denominator
            scale = (torch.full_like(loss, coefficient) / denominator).to(loss.dtype)
            loss = loss * scale
        ctx.weights_dtype, ctx.impl = weights.dtype, args[-1]
        ctx.save_for_backward(*grads, *([] if scale is None else [scale]))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        dq_index, dk_index, dweights, *scale = ctx.saved_tensors
        grads = run_backward(dq_index, dk_index, dweights, dloss * scale[0] if scale else dloss, ctx.factor, ctx.weights_dtype, ctx.impl)
        return *grads, *([None] * (len(ctx.needs_input_grad) - 3))
