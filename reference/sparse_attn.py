"""Sparse attention with one shared key/value head, in plain PyTorch: the specification of `sparse_attn.shared_kv`.

Legend
    B   batch                      N   query heads
    S   queries of a sequence      D   channels of a head; the one KV head has as many
    T   queries of a pack          K   selected compressed entries of a query
    S2  original keys (T2 packed)  S3  compressed entries, S2 // cmp_ratio (T3 packed)
    G   documents of a pack        C   queries of a chunk

Three modes: original keys in a sliding window alone (SWA); window and every causal compressed entry (CFA); window and
the compressed entries that `cmp_indices` selects (SCFA).

Formulas (multi-query attention with K = V and attention sinks, as in DeepSeek-V4), for query i at position
t = q_offset + i, scale = D ** -0.5 unless given:
    window      original key p is seen iff  t - window < p <= t  and it exists
    compressed  entry j is seen iff         j < (t + 1) // cmp_ratio  and it exists (and, in SCFA, once per slot holding j)
    z_j  = scale * q . kv_j
    LSE  = log(exp(sink) + sum_j exp(z_j))
    out  = sum_j exp(z_j - LSE) * kv_j
    u[t, slot] = mean over heads of exp(z - LSE) on the selected slots           (`return_cmp_probs`)
A query that sees nothing has out = 0 and LSE = sink (or -inf). sink = -inf is no sink; sink = +inf takes all the mass:
out = 0 with zero gradients. A query that gets no mass to its keys never produces NaN, in either direction.

The maths is done in fp64 for fp64 inputs and in fp32 otherwise; the gradient of kv is therefore summed over queries in
that precision and rounded once. Queries are processed in chunks, so the forward holds C * (window + K) rows of kv and no
[S, S2] or [S, S * K] array. Autograd keeps the rows of all chunks; checkpoint the call where that is too much.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

# Elements of the largest temporary of a chunk (128 MiB in fp32).
_CHUNK_ELEMENTS = 1 << 25


def compressed_cu_seqlens(cu_seqlens: Tensor, ratio: int) -> Tensor:
    """[G + 1] int32 offsets of the compressed entries: a document of n tokens has n // ratio, its remainder has none."""
    entries = torch.div((cu_seqlens[1:] - cu_seqlens[:-1]).long(), ratio, rounding_mode="floor")  # a ratio may be above any int32
    return F.pad(entries.cumsum(0), (1, 0)).to(torch.int32)


def lse_without_sink(lse: Tensor, sinks: Tensor) -> Tensor:
    """LSE over the keys alone, lse + log1p(-exp(sink - lse)); -inf where the sink is all there is. lse [..., N], sinks [N]."""
    only_sink = lse <= sinks  # NaN stays NaN
    share = torch.where(only_sink, -math.inf, sinks - lse).exp()
    return torch.where(only_sink, -math.inf, lse + torch.log1p(-share))


def lse_with_sink(lse: Tensor, sinks: Tensor) -> Tensor:
    """The inverse of `lse_without_sink`: log(exp(lse) + exp(sink))."""
    return torch.logaddexp(lse, sinks.expand_as(lse))


def _packed_rows(cu_seqlens: Tensor, rows: int) -> Tensor:
    """[rows] document of every row of a pack; G for rows after the last document."""
    row = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)


def _start_and_length(cu_seqlens: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
    """First row and length, int64, of the documents named in `document`; document G is empty."""
    cu = cu_seqlens.long()
    start, length = F.pad(cu[:-1], (0, 1)), F.pad(cu[1:] - cu[:-1], (0, 1))
    return start[document], length[document]


def _window_rows(position: Tensor, start: Tensor, length: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """[B, C, window] rows of ori_kv and whether they exist."""
    key = position[..., None] + torch.arange(1 - window, 1, device=position.device)
    return start[..., None] + key, (key >= 0) & (key < length[..., None])


def _gather(kv: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
    """kv [B, R, D], rows [B, C, k] -> [B, C, k, D], zero where not seen: those read a zero row put behind kv, so that
    neither a wrong address nor the content of a row that is not seen can reach the result."""
    B, R, D = kv.shape
    batch = torch.arange(B, device=kv.device)[:, None, None] * R
    rows = torch.where(seen, rows + batch, B * R)
    return F.pad(kv.reshape(B * R, D), (0, 0, 0, 1)).index_select(0, rows.reshape(-1)).view(*rows.shape, D)


def _logits(q: Tensor, keys: Tensor) -> Tensor:
    """q [B, C, N, D]; keys [B, C, k, D] of each query or [B, k, D] common to all -> [B, C, N, k]."""
    return torch.einsum("bcnd,bckd->bcnk" if keys.dim() == 4 else "bcnd,bkd->bcnk", q, keys)


def _weighted(weight: Tensor, keys: Tensor) -> Tensor:
    return torch.einsum("bcnk,bckd->bcnd" if keys.dim() == 4 else "bcnk,bkd->bcnd", weight, keys)


def sparse_attn_shared_kv(
    q: Tensor,
    ori_kv: Tensor,
    cmp_kv: Tensor | None = None,
    cmp_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    cmp_ratio: int | None = None,
    window: int | None = 128,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_ori: Tensor | None = None,
    cu_seqlens_cmp: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    return_lse: bool = False,
    return_cmp_probs: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of q [B, S, N, D] over ori_kv [B, S2, D] and cmp_kv [B, S3, D], or packed: [T, N, D], [T2, D], [T3, D].

    cmp_indices [B, S, K] or [T, K] int32, from 0 in every batch or document; sinks [N]; cu_seqlens_* [G + 1] int32;
    q_offset an int, an int32 tensor [B] or [G], or None for right alignment; window None for all causal keys.
    Returns out as q, then lse [B, S, N] or [T, N] fp32, then cmp_probs [B, S, K] or [T, K] fp32, as asked for; only out
    carries gradients. See the module's formulas.
    """
    packed = cu_seqlens_q is not None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # A pack is handled as a batch of one whose queries know where their document's keys start and how many there are.
    q4 = (q[None] if packed else q).to(dtype)
    ori = (ori_kv[None] if packed else ori_kv).to(dtype)
    cmp = None if cmp_kv is None else (cmp_kv[None] if packed else cmp_kv).to(dtype)
    indices = None if cmp_indices is None else (cmp_indices[None] if packed else cmp_indices).long()
    B, S, N, D = q4.shape
    device = q.device
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    ratio = cmp_ratio or 0  # used with cmp_kv alone, where a forgotten one divides by zero

    offset: int | Tensor
    if cu_seqlens_q is not None:
        cu_ori = cu_seqlens_q if cu_seqlens_ori is None else cu_seqlens_ori
        document = _packed_rows(cu_seqlens_q, S)
        inside = (document < cu_seqlens_q.shape[0] - 1)[:, None, None]  # what the rows after the last document hold counts for nothing
        q4 = torch.where(inside, q4, 0.0)
        q_start, q_length = _start_and_length(cu_seqlens_q, document)
        ori_start, ori_length = _start_and_length(cu_ori, document)
        index = torch.arange(S, device=device) - q_start
        if q_offset is None:
            offset = ori_length - q_length
        elif isinstance(q_offset, Tensor):
            offset = F.pad(q_offset.long(), (0, 1))[document]
        else:
            offset = q_offset
        position, ori_start, ori_length = (index + offset)[None], ori_start[None], ori_length[None]
        if cmp is not None:
            cu_cmp = compressed_cu_seqlens(cu_ori, ratio) if cu_seqlens_cmp is None else cu_seqlens_cmp
            cmp_start, cmp_length = (x[None] for x in _start_and_length(cu_cmp, document))
    else:
        offset = ori.shape[1] - S if q_offset is None else q_offset
        if isinstance(offset, Tensor):
            offset = offset.long()[:, None]
        position = (torch.arange(S, device=device) + offset).expand(B, S)
        ori_start, ori_length = torch.zeros_like(position), torch.full_like(position, ori.shape[1])
        if cmp is not None:
            cmp_start, cmp_length = torch.zeros_like(position), torch.full_like(position, cmp.shape[1])

    if sinks is not None:
        sinks = sinks.to(dtype)
        all_in_sink = sinks == math.inf
        finite_sinks = torch.where(all_in_sink, 0.0, sinks)  # such a head sees no key below; any finite sink does

    # Past ori_kv's length a window reaches every key: then one product with all rows replaces a gather of each.
    gathered = window if window is not None and window < ori.shape[1] else 0
    slots = gathered + (0 if indices is None else indices.shape[-1])
    dense = (0 if gathered else ori.shape[1]) + (cmp.shape[1] if cmp is not None and indices is None else 0)
    chunk = max(1, _CHUNK_ELEMENTS // max(1, B * (slots * max(N, D) + dense * N)))

    outs, lses, probs = [], [], []
    for begin in range(0, max(S, 1), chunk):
        part = slice(begin, min(begin + chunk, S))
        qc, t = q4[:, part], position[:, part]
        start, length = ori_start[:, part], ori_length[:, part]
        if gathered:
            rows, seen = _window_rows(t, start, length, gathered)
            sources = [(_gather(ori, rows, seen), seen)]
        else:
            key = torch.arange(ori.shape[1], device=device) - start[..., None]
            seen = (key >= 0) & (key < length[..., None]) & (key <= t[..., None])
            if window is not None:
                seen = seen & (key > t[..., None] - window)
            sources = [(ori, seen)]
        if cmp is not None:
            start, length = cmp_start[:, part, None], cmp_length[:, part, None]
            visible = torch.minimum(torch.div(t[..., None] + 1, ratio, rounding_mode="floor"), length)
            entry = torch.arange(cmp.shape[1], device=device) - start if indices is None else indices[:, part]
            seen = (entry >= 0) & (entry < visible)
            sources.append((cmp if indices is None else _gather(cmp, start + entry, seen), seen))

        # Column 0 is the sink: a key without a value. Without sinks its weight is exp(-inf) = 0.
        sink_column = finite_sinks if sinks is not None else torch.full((N,), -math.inf, dtype=dtype, device=device)
        columns = [sink_column.expand(B, qc.shape[1], N)[..., None]]
        for keys, seen in sources:
            seen = seen[:, :, None] if sinks is None else seen[:, :, None] & ~all_in_sink[:, None]
            columns.append((_logits(qc, keys) * scale).masked_fill(~seen, -math.inf))
        z = torch.cat(columns, -1)
        # The shift cancels in out and lse, so no gradient passes through it; a row of -inf needs a finite one.
        shift = z.detach().amax(-1, keepdim=True)
        shift = torch.where(shift == -math.inf, 0.0, shift)
        weight = (z - shift).exp()
        mass = weight.sum(-1, keepdim=True)
        p = weight / torch.where(mass == 0, 1.0, mass)
        p_of_source = p[..., 1:].split([c.shape[-1] for c in columns[1:]], -1)
        outs.append(torch.stack([_weighted(ps, keys) for ps, (keys, _) in zip(p_of_source, sources)]).sum(0))
        if return_lse:
            lse = (mass.detach().log() + shift)[..., 0]
            lses.append(lse if sinks is None else torch.where(all_in_sink, math.inf, lse))
        if return_cmp_probs:
            probs.append(p_of_source[1].detach().mean(2))

    out = torch.cat(outs, 1).to(q.dtype)
    results = [torch.where(inside, out, 0.0) if packed else out]  # nor does their gradient of out
    if return_lse:
        results.append(torch.cat(lses, 1))
    if return_cmp_probs:
        results.append(torch.cat(probs, 1))
    results = [x[0] for x in results] if packed else results
    return results[0] if len(results) == 1 else tuple(results)
