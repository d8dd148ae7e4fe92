"""KL loss that trains the lightning indexer on the main attention's own weights: the specification in plain PyTorch.

Shape letters as in ``reference.indexer``, and
    N  heads of the main attention        D  channels of the main attention (one tensor is key and value)
    z  = softmax_scale * q[t, n] . cmp_kv[s]     logits of the main attention on the compressed blocks

Formulas (source: DeepSeek-V3.2 technical report, "continued pre-training" - dense warm-up and sparse stage; derived by hand below)
    slots of query t: its valid selected blocks; all visible blocks when ``indices`` is None
    teacher, a mean over heads:   u[t, s] = mean_n exp(z[t, n, s] - lse[t, n])      lse of window + compressed + sink
                    "compressed": u[t, s] = mean_n softmax over the row's own slots of z[t, n, :]
    Z = sum_s u[t, s],  p = u / Z
    "joint", "compressed":  L_t = KL(p || softmax(I))     = sum_s p (log p - log softmax(I))
    "marginal":             L_t = Z * KL(p || softmax(I))
    loss = coefficient * sum_t L_t / denominator
Gradients, by d(logsumexp I)/dI = softmax(I):
    dI = softmax(I) - p   ("marginal": Z * softmax(I) - u)
    dw[h] = sum_s dI[s] relu(S[h, s]),  dS[h, s] = dI[s] w[h] 1[S > 0],  dq = dS k,  dk = dS^T q      with S = q . k
p log p is 0 at p = 0. A row without a valid slot, or with Z = 0, has loss 0 and zero gradients and does not count as valid. The teacher's
side (q, cmp_kv, lse, teacher) and the denominator are constants.

Arithmetic is fp64 when an index input is fp64 and fp32 otherwise. Memory: one chunk of queries at a time, recomputed in the backward pass.
"""

import torch
from torch import Tensor

from reference.indexer import chunk_length, compute_dtype, document_view, index_scores, map_query_chunks, rows_at, visible_span


def indexer_kl_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor | None,
    *,
    teacher: Tensor | None = None,
    q: Tensor | None = None,
    cmp_kv: Tensor | None = None,
    lse: Tensor | None = None,
    softmax_scale: float | None = None,
    target: str = "joint",
    cmp_ratio: int = 4,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    reduction: str = "sum",
    denominator: int | float | Tensor | None = None,
    coefficient: float = 1.0,
) -> Tensor:
    """Scalar loss, differentiable in q_index, k_index and weights alone.

    q_index [B, S, H, Di], k_index [B, S3, Di], weights [B, S, H], indices int32 [B, S, K] or None (all visible blocks); either
    teacher [B, S, K] (u above) or q [B, S, N, D], cmp_kv [B, S3, D] and lse [B, S, N] (natural log; not used by "compressed").
    In TND the axes B, S are one axis T, and S3 is T3. ``denominator`` defaults to 1 ("sum") or to the number of valid rows, at least 1
    ("mean").
    """
    rows, valid = indexer_kl_rows(
        q_index, k_index, weights, indices, teacher=teacher, q=q, cmp_kv=cmp_kv, lse=lse, softmax_scale=softmax_scale, target=target,
        cmp_ratio=cmp_ratio, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, q_offset=q_offset,
    )  # fmt: skip
    if denominator is None:
        denominator = valid.sum().clamp(min=1) if reduction == "mean" else 1
    elif isinstance(denominator, Tensor):
        denominator = denominator.detach().to(rows.dtype)  # an fp64 count does not make the loss fp64
    return coefficient * rows.sum() / denominator


def indexer_kl_rows(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor | None,
    *,
    teacher: Tensor | None = None,
    q: Tensor | None = None,
    cmp_kv: Tensor | None = None,
    lse: Tensor | None = None,
    softmax_scale: float | None = None,
    target: str = "joint",
    cmp_ratio: int = 4,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    q_offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """L_t and whether the row is valid (bool), both [B, S] or [T]; arguments as ``indexer_kl_loss``."""
    packed = cu_seqlens_q is not None
    by_query = [q_index, weights, indices, teacher, q, lse]
    if packed:
        by_query = [None if x is None else x[None] for x in by_query]
        k_index, cmp_kv = k_index[None], None if cmp_kv is None else cmp_kv[None]
    batch = 1 if packed else q_index.shape[0]
    num_queries, heads, dim = q_index.shape[-3:]
    num_keys = k_index.shape[1]
    span = visible_span(batch, num_queries, num_keys, cmp_ratio, cu_seqlens_q, cu_seqlens_k, q_offset, q_index.device)
    dtype = compute_dtype(q_index, k_index, weights)
    k_index = k_index.to(dtype)
    main_keys = k_index if cmp_kv is None else cmp_kv.detach().to(dtype)  # not read with a given teacher
    if softmax_scale is None:
        softmax_scale = 1.0 if q is None else q.shape[-1] ** -0.5

    def one_chunk(q_index, weights, indices, teacher, q, lse, start, count) -> tuple[Tensor, Tensor]:
        if indices is None:
            valid = torch.arange(num_keys, device=start.device) < count[..., None]
            scores = index_scores(q_index.to(dtype), k_index, weights.to(dtype))
            scores = document_view(scores, start) if packed else scores
        else:
            valid = (indices >= 0) & (indices < count[..., None])
            scores = index_scores(q_index.to(dtype), rows_at(k_index, indices, start, valid), weights.to(dtype))
        with torch.no_grad():
            if teacher is not None:
                mean = torch.where(valid, teacher.to(dtype), 0)
            else:
                if indices is None:
                    z = torch.einsum("bsnd,bkd->bsnk", q.to(dtype), main_keys)
                    if packed:
                        z = document_view(z.flatten(1, 2), start.repeat_interleave(z.shape[2], 1)).view_as(z)
                else:
                    z = torch.einsum("bsnd,bskd->bsnk", q.to(dtype), rows_at(main_keys, indices, start, valid))
                mean = teacher_mean(softmax_scale * z, valid, None if target == "compressed" else lse.to(dtype))
        return kl_of_rows(scores, mean, valid, target)

    slots = num_keys if indices is None else indices.shape[-1]
    widest = max(heads, dim, *(() if q is None else q.shape[-2:]))
    rows, counted = map_query_chunks(one_chunk, chunk_length(batch * slots * widest), *by_query, *span)
    return (rows[0], counted[0]) if packed else (rows, counted)


def teacher_mean(z: Tensor, valid: Tensor, lse: Tensor | None) -> Tensor:
    """u [B, S, K] of logits z [B, S, N, K]: mean over heads of exp(z - lse), or of the softmax over the valid slots when lse is None.

    A head with lse = -inf saw nothing and gives 0, as does one with lse = +inf (a sink of +inf).
    """
    slots = valid[:, :, None]
    if lse is None:
        probability = _log_softmax(z, slots).exp()
    else:
        probability = torch.where(lse[..., None] > -torch.inf, (z - lse[..., None]).exp(), 0)
    return torch.where(slots, probability, 0).mean(2)


def kl_of_rows(scores: Tensor, mean: Tensor, valid: Tensor, target: str) -> tuple[Tensor, Tensor]:
    """L_t [B, S] of scores I and teacher u [B, S, K] (0 at slots that are not valid), and whether the row counts."""
    mass = mean.sum(-1)
    counted = mass > 0
    p = mean / torch.where(counted, mass, 1)[..., None]
    log_q = torch.where(valid, _log_softmax(scores, valid), 0)
    rows = (torch.xlogy(p, p) - p * log_q).sum(-1)
    if target == "marginal":
        rows = mass * rows
    return torch.where(counted, rows, 0), counted


def _log_softmax(x: Tensor, valid: Tensor) -> Tensor:
    """log softmax over the valid entries of the last axis; -inf at the others, finite where a row has none."""
    masked = torch.where(valid, x, -torch.inf)
    return torch.log_softmax(torch.where(valid.any(-1, keepdim=True), masked, 0), -1)
