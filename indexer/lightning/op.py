"""Lightning indexer as registered ops and the autograd.Function around them."""

import torch

from indexer.library import LAYOUT_NUMBERS, LAYOUT_TENSORS, OPS, eager_deterministic, offset_of
from kernel_runtime import eager_call, eager_vjp, once_differentiable, register_specs
from reference import indexer as reference


def _forward(q, k, weights, cu_seqlens_q, cu_seqlens_k, q_offsets, topk, cmp_ratio, q_offset, sorted, query_chunk):
    return reference.lightning_indexer(
        q, k, weights, topk, cmp_ratio=cmp_ratio, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        q_offset=offset_of(q_offset, q_offsets),
    )  # fmt: skip


def _fake_forward(q, k, weights, cu_seqlens_q, cu_seqlens_k, q_offsets, topk, *options):
    shape = (*weights.shape[:-1], topk)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty(shape, dtype=torch.int32, device=q.device), torch.empty(shape, dtype=dtype, device=q.device)


def _backward(dscores, q, k, weights, indices, cu_seqlens_q, cu_seqlens_k, deterministic):
    def scores(q, k, weights):
        return reference.selected_scores(q, k, weights, indices, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)

    with eager_deterministic(deterministic):
        return eager_vjp(scores, [q, k, weights], [dscores])


def _fake_backward(dscores, q, k, weights, *options):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, weights))


FORWARD = OPS.register(
    f"lightning_indexer_fwd(Tensor q, Tensor k, Tensor weights, {LAYOUT_TENSORS}, SymInt topk, {LAYOUT_NUMBERS}, bool sorted,"
    " SymInt query_chunk, str impl) -> (Tensor, Tensor)",
    fake=_fake_forward,
    eager=_forward,
    triton="indexer.lightning.fwd:lightning_indexer_fwd",
)
BACKWARD = OPS.register(
    "lightning_indexer_bwd(Tensor dscores, Tensor q, Tensor k, Tensor weights, Tensor indices, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " bool deterministic, str impl) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    eager=_backward,
    triton="indexer.lightning.bwd:lightning_indexer_bwd",
)
run_forward = eager_call(FORWARD, replay=True)
run_backward = eager_call(BACKWARD)
register_specs("indexer.lightning", "indexer.lightning.bwd:specs")


class LightningIndexer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, weights, cu_seqlens_q, cu_seqlens_k, q_offsets, topk, cmp_ratio, q_offset, sorted, query_chunk, deterministic, impl
    ):
        options = (topk, cmp_ratio, q_offset, sorted, query_chunk, impl)
        indices, scores = run_forward(q, k, weights, cu_seqlens_q, cu_seqlens_k, q_offsets, *options)
        ctx.save_for_backward(q, k, weights, indices, cu_seqlens_q, cu_seqlens_k)
        ctx.deterministic, ctx.impl = deterministic, impl
        ctx.mark_non_differentiable(indices)
        return indices, scores

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dscores):
        q, k, weights, indices, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        grads = run_backward(dscores, q, k, weights, indices, cu_seqlens_q, cu_seqlens_k, ctx.deterministic, ctx.impl)
        return *grads, *([None] * 10)
