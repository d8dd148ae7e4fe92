"""lightning_indexer: the public function."""

from torch import Tensor

from indexer.library import MAX_DIM, MAX_TOPK, check_bool, check_indexer, resolve_deterministic
from indexer.lightning.op import LightningIndexer
from kernel_runtime import apply_function, check_int, run_eager, select_impl
from reference import indexer as reference


def no_kernel(q: Tensor, topk: int) -> str | None:
    """Why the kernels do not cover a case, None if they do."""
    if q.shape[-1] > MAX_DIM:
        return f"Di = {q.shape[-1]}; kernels take at most {MAX_DIM} channels"
    if topk > MAX_TOPK:
        return f"topk = {topk}; kernels take at most {MAX_TOPK}"
    return None


def lightning_indexer(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    cmp_ratio: int = 4,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    sorted: bool = True,
    query_chunk: int | None = None,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The ``topk`` compressed blocks of the highest score ``sum_h weights[t, h] * relu(q[t, h] . k[s])`` that each query may see.

    Layouts: BSND, or TND (documents packed along one axis) when cu_seqlens_q is given. B batch, S queries, S3 compressed keys, T and T3
    the same of all documents, H heads, Di channels.

    q             [B, S, H, Di] or [T, H, Di], bf16, fp16 or fp32 (fp64: eager form alone).
    k             [B, S3, Di] or [T3, Di], dtype of q.
    weights       [B, S, H] or [T, H], fp32 or the dtype of q; carries every scale (Di^-0.5 * H^-0.5 in DeepSeek-V4).
    topk          slots of the result, at least 1; may exceed S3.
    cmp_ratio     tokens of a block: the query at position t sees the blocks s < (t + 1) // cmp_ratio, at least 1.
    cu_seqlens_q, cu_seqlens_k   int32 [documents + 1], where each document's queries and keys start and end. Queries past the last
                  document see nothing. Values are trusted.
    q_offset      position of the first query, an int or int32 tensor with one a batch entry [B] or document; None is 0.
    sorted        False may return the same blocks in any order.
    query_chunk   queries whose scores are held at a time by the kernel; the default keeps the score buffer below 256 MiB. Where there are
                  more than 4096 blocks, a list of candidates is held too: 64 MiB at most with 512 slots, 256 with 2048, the less the
                  more blocks there are.
    deterministic sums the gradient of k to the same bits in every run; None follows torch.are_deterministic_algorithms_enabled().
                  impl="eager" is plain autograd and follows PyTorch's own switch alone.
    impl          "auto", "triton" or "eager", see kernel_runtime.impl.

    Returns (indices int32, scores fp32), both [B, S, topk] or [T, topk]: score descending, ties by ascending index, each index counted
    from 0 in its batch entry or document; the tail of a query that sees fewer blocks is -1 with score -inf. Scores are differentiable in
    q, k and weights (relu'(0) = 0), indices are not. Formulas: reference/indexer.py. Double backward is refused.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or option.
    """
    op = "lightning_indexer"
    layout = check_indexer(op, ("q", "k"), q, k, weights, cmp_ratio, cu_seqlens_q, cu_seqlens_k, q_offset)
    check_int(op, "topk", topk, minimum=1)
    check_bool(op, "sorted", sorted)
    if query_chunk is not None:
        check_int(op, "query_chunk", query_chunk, minimum=1)
    deterministic = resolve_deterministic(op, deterministic)
    how = select_impl(op, impl, q, no_kernel=no_kernel(q, topk))
    if impl == "eager":
        return run_eager(
            reference.lightning_indexer, q, k, weights, topk, cmp_ratio=cmp_ratio, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            q_offset=q_offset,
        )  # fmt: skip
    options = (topk, *layout.numbers, sorted, query_chunk or 0)
    return apply_function(LightningIndexer, q, k, weights, *layout.tensors, *options, deterministic, how)
