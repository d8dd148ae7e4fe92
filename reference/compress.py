"""Gated softmax pooling of keys into compressed entries, in plain PyTorch: the specification of `sparse_attn.compress`.

Legend
    B   batch                 D   channels of a compressed entry
    S   tokens of a sequence  C   series a token carries: 2 with overlap, else 1
    T   tokens of a pack      E   entries, S // ratio (T // ratio rows in a pack)
    G   documents of a pack

Formulas (the compressors of DeepSeek-V4), every channel on its own, window e = tokens [e * ratio, (e + 1) * ratio):
    logit[s]   = gate[s] + position_bias[s mod ratio]                                                    [C * D]
    no overlap: entry e = sum_s softmax_s(logit[s]) * kv[s]            over the ratio tokens of window e
    overlap:    the first D channels of a token belong to the entry of the NEXT window, the last D to its own:
                entry e = softmax-weighted sum over the 2 * ratio slots (first D of window e - 1, last D of window e)
The window before a document's first does not exist: its slots get no weight. Tokens of an incomplete last window are not
compressed. The result is before norm and rotary embedding. Softmax in fp64 for fp64 inputs and in fp32 otherwise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from reference.sparse_attn import _packed_rows, _start_and_length, compressed_cu_seqlens


def compress_kv(
    kv: Tensor, gate: Tensor, position_bias: Tensor, ratio: int, *, overlap: bool = False, cu_seqlens: Tensor | None = None
) -> Tensor:
    """kv and gate [B, S, C * D], position_bias [ratio, C * D] -> [B, S // ratio, D] in kv's dtype.

    Packed, with cu_seqlens [G + 1] int32: kv and gate [T, C * D] -> [T // ratio, D]. Each document is compressed on its
    own; the first `compressed_cu_seqlens(cu_seqlens, ratio)[-1]` rows are entries, the rest zero.
    """
    dtype = torch.float64 if kv.dtype == torch.float64 else torch.float32
    kv_w, gate_w, exists, first = _windows(kv.to(dtype), gate.to(dtype), ratio, cu_seqlens)
    logit = gate_w + position_bias.to(dtype)
    if not overlap:
        pooled = (logit.softmax(2) * kv_w).sum(2)
    else:
        D = kv.shape[-1] // 2
        own_logit, own_kv = logit[..., D:], kv_w[..., D:]
        # A first window has no predecessor: the shift by one entry brings in the end of the sequence or the document before,
        # which gets logits of -inf and values of 0.
        last_logit = logit[..., :D].roll(1, 1).masked_fill(first, -math.inf)
        last_kv = kv_w[..., :D].roll(1, 1).masked_fill(first, 0.0)
        # A softmax over both parts without joining them: the common shift cancels, so it carries no gradient.
        shift = torch.maximum(own_logit.detach().amax(2, keepdim=True), last_logit.detach().amax(2, keepdim=True))
        own, last = (own_logit - shift).exp(), (last_logit - shift).exp()
        pooled = ((own * own_kv).sum(2) + (last * last_kv).sum(2)) / (own.sum(2) + last.sum(2))
    if exists is None:
        return pooled.to(kv.dtype)
    return pooled[0].masked_fill(~exists, 0.0).to(kv.dtype)


def _windows(kv: Tensor, gate: Tensor, ratio: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Tokens by window, [B, E, ratio, C * D] each; whether an entry exists [E, 1] (packs alone); whether it has no
    predecessor in its document, broadcast over [B, E, ratio, D]."""
    if cu_seqlens is None:
        E = kv.shape[1] // ratio
        kv, gate = (x[:, : E * ratio].unflatten(1, (E, ratio)) for x in (kv, gate))
        return kv, gate, None, (torch.arange(E, device=kv.device) == 0)[:, None, None]
    T, channels = kv.shape
    E = T // ratio
    cu_cmp = compressed_cu_seqlens(cu_seqlens, ratio)
    document = _packed_rows(cu_cmp, E)
    token_start, _ = _start_and_length(cu_seqlens, document)
    entry_start, _ = _start_and_length(cu_cmp, document)
    entry = torch.arange(E, device=kv.device)
    exists = entry < cu_cmp[-1]
    token = (token_start + (entry - entry_start) * ratio)[:, None] + torch.arange(ratio, device=kv.device)
    token = torch.where(exists[:, None], token, T).reshape(-1)  # row T is a zero row put behind the tokens
    kv, gate = (F.pad(x, (0, 0, 0, 1)).index_select(0, token).view(1, E, ratio, channels) for x in (kv, gate))
    # a row that is no entry takes up no series either: what the last document's last window has in its first counts for nothing
    return kv, gate, exists[:, None], ((entry == entry_start) | ~exists)[:, None, None]
