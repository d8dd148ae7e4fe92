"""Lightning indexer: the specification in plain PyTorch.

Shape letters
    B   batch                         H   index heads
    S   queries of a sequence         Di  channels of an index head
    S3  compressed keys (blocks)      K   selected slots of a query (``topk``)
    T, T3  queries and compressed keys of all packed documents (layout TND: no batch axis)

Formulas (the lightning indexer of DeepSeek-V3.2 and V4, technical reports, section "sparse attention")
    I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])            the caller folds every scale into w; relu'(0) = 0
    block s is visible to the query at position t   iff   s < (t + 1) // cmp_ratio
    position t = q_offset + i for query i; q_offset None means 0; both are counted per document in TND
    result: the K visible blocks of the highest score, score descending, ties by ascending index; the tail without a block is
    index -1 with score -inf (K may exceed S3)

Arithmetic is fp64 when an input is fp64 and fp32 otherwise. Memory: queries are walked in chunks, so that the products [queries, H, S3]
exist for one chunk only, in the backward pass too (each chunk is recomputed there).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# elements of the largest intermediate (products of one chunk of queries with every key and head): 2^26 fp32 elements are 256 MiB
CHUNK_ELEMENTS = 1 << 26


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
) -> tuple[Tensor, Tensor]:
    """The ``topk`` best visible blocks of each query.

    q [B, S, H, Di] or [T, H, Di]; k [B, S3, Di] or [T3, Di]; weights [B, S, H] or [T, H]; cu_seqlens_q, cu_seqlens_k int32 [documents + 1]
    select TND; q_offset an int or an int32 tensor, one a batch entry or document.
    Returns indices int32 and scores, both [B, S, topk] or [T, topk]; an index counts from 0 in its own batch entry or document. Scores are
    differentiable in q, k and weights.
    """
    packed = cu_seqlens_q is not None
    if packed:
        q, k, weights = q[None], k[None], weights[None]
    start, count = visible_span(q.shape[0], q.shape[1], k.shape[1], cmp_ratio, cu_seqlens_q, cu_seqlens_k, q_offset, q.device)
    dtype = compute_dtype(q, k, weights)
    k = k.to(dtype)

    def one_chunk(q: Tensor, weights: Tensor, start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        scores = index_scores(q.to(dtype), k, weights.to(dtype))
        return select_topk(document_view(scores, start) if packed else scores, count, topk)

    chunk = chunk_length(q.shape[0] * q.shape[2] * k.shape[1])
    indices, scores = map_query_chunks(one_chunk, chunk, q, weights, start, count)
    return (indices[0], scores[0]) if packed else (indices, scores)


def selected_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """The scores that ``lightning_indexer`` returned with ``indices``, from the indices alone: what its backward pass differentiates.

    Cheaper than the dense form where S3 > K; -inf (and no gradient) at index -1.
    """
    packed = cu_seqlens_q is not None
    if packed:
        q, k, weights, indices = q[None], k[None], weights[None], indices[None]
    start, _ = visible_span(q.shape[0], q.shape[1], k.shape[1], 1, cu_seqlens_q, cu_seqlens_k, None, q.device)
    dtype = compute_dtype(q, k, weights)
    k = k.to(dtype)

    def one_chunk(q: Tensor, weights: Tensor, indices: Tensor, start: Tensor) -> tuple[Tensor]:
        valid = indices >= 0
        scores = index_scores(q.to(dtype), rows_at(k, indices, start, valid), weights.to(dtype))
        return (torch.where(valid, scores, -torch.inf),)

    chunk = chunk_length(q.shape[0] * indices.shape[-1] * max(q.shape[2:]))
    (scores,) = map_query_chunks(one_chunk, chunk, q, weights, indices, start)
    return scores[0] if packed else scores


def rows_at(x: Tensor, indices: Tensor, start: Tensor, valid: Tensor) -> Tensor:
    """x [B, S3, D] at row start + index for every valid slot of indices [B, S, K] -> [B, S, K, D]; other slots read a row of zeros."""
    batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
    return F.pad(x, (0, 0, 0, 1))[batch, torch.where(valid, indices + start[..., None], x.shape[1])]


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """I [B, S, S3] of q [B, S, H, Di], weights [B, S, H] and k [B, S3, Di] (one list of keys) or [B, S, S3, Di] (a list a query)."""
    products = torch.einsum("bshd,bkd->bshk" if k.dim() == 3 else "bshd,bskd->bshk", q, k)
    return torch.einsum("bshk,bsh->bsk", torch.relu(products), weights)


def select_topk(scores: Tensor, count: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The order rule, on scores [B, S, S3] whose first ``count`` [B, S] columns are visible. A stable sort keeps ties in index order."""
    columns = torch.arange(scores.shape[-1], device=scores.device)
    masked = scores.masked_fill(columns >= count[..., None], -torch.inf)
    order = masked.detach().sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    missing = topk - order.shape[-1]
    values = F.pad(masked.gather(-1, order), (0, missing), value=-torch.inf)
    filled = torch.arange(topk, device=scores.device) < count[..., None]
    return torch.where(filled, F.pad(order, (0, missing)), -1).to(torch.int32), values


def visible_span(
    batch: int,
    num_queries: int,
    num_keys: int,
    cmp_ratio: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_offset: int | Tensor | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Rows of k that a query may see, int64 [B, S]: ``start`` (first row of its document; 0 in BSND) and ``count`` (visible blocks).

    Tokens past the last document of a pack (padding) see nothing.
    """
    offset = 0 if q_offset is None else q_offset
    queries = torch.arange(num_queries, device=device)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        position = queries[None] + (offset[:, None] if isinstance(offset, Tensor) else offset)
        count = ((position + 1) // cmp_ratio).clamp(0, num_keys).expand(batch, num_queries)
        return torch.zeros_like(count), count
    cu_q, cu_k = cu_seqlens_q.long(), cu_seqlens_k.long()
    document = torch.searchsorted(cu_q[1:].contiguous(), queries, right=True)  # == number of documents for padding
    if isinstance(offset, Tensor):
        offset = F.pad(offset, (0, 1))[document]
    length = F.pad(cu_k.diff(), (0, 1))[document]
    position = queries - cu_q[document] + offset
    count = torch.minimum(((position + 1) // cmp_ratio).clamp(min=0), length)
    return cu_k[document][None], count[None]


def document_view(scores: Tensor, start: Tensor) -> Tensor:
    """Columns of [B, S, S3] counted from each row's own document: column j is ``start + j`` (past the end: any column, never visible)."""
    columns = torch.arange(scores.shape[-1], device=scores.device)
    return scores.gather(-1, (start[..., None] + columns).clamp(max=max(scores.shape[-1] - 1, 0)))


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def chunk_length(elements_per_query: int) -> int:
    return max(1, CHUNK_ELEMENTS // max(1, elements_per_query))


def map_query_chunks(function: Callable[..., tuple[Tensor, ...]], chunk: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """``function`` over pieces of ``chunk`` queries (axis 1 of each tensor), results joined; pieces are recomputed in the backward pass."""
    num_queries = next(x for x in tensors if x is not None).shape[1]
    if num_queries <= chunk:
        return function(*tensors)
    parts = []
    for first in range(0, num_queries, chunk):
        piece = [None if x is None else x[:, first : first + chunk] for x in tensors]
        parts.append(checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False))
    return tuple(torch.cat(column, dim=1) for column in zip(*parts))
