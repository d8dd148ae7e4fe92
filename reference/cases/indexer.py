"""Shapes and inputs of the indexer family, shared by tests and benches.

Shape letters as in ``reference.indexer`` and ``reference.indexer_loss``. Inputs carry what random numbers never show: key rows of zeros and
repeated key rows (exact ties, at zero and elsewhere), queries without any positive weight (all scores <= 0), queries of zero weights (every
score is an exact zero), index lists with -1 holes, indices out of range, not yet visible or repeated, rows without any index, teacher rows
of mass 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.indexer import compute_dtype, visible_span


@dataclass(frozen=True)
class IndexerCase:
    name: str
    batch: int = 1
    seq: int = 0  # S; ignored with documents
    documents: tuple[int, ...] | None = None  # query lengths of a pack: layout TND
    heads: int = 4  # H
    head_dim: int = 16  # Di
    topk: int = 8  # K
    cmp_ratio: int = 4
    q_offset: int | None = None
    keys: int | None = None  # S3, or keys of every document; default: what queries at q_offset .. can see
    padding: int = 0  # tokens of a pack past its last document
    attn_heads: int = 3  # N
    attn_dim: int = 32  # D

    @property
    def packed(self) -> bool:
        return self.documents is not None

    @property
    def rows(self) -> int:
        return sum(self.documents) + self.padding if self.documents is not None else self.batch * self.seq

    def keys_of(self, queries: int) -> int:
        return self.keys if self.keys is not None else (queries + (self.q_offset or 0)) // self.cmp_ratio


# tiny shapes: every layout, length and rule; for tests on a CPU and in the interpreter
SMALL = (
    IndexerCase("plain", batch=2, seq=37),
    IndexerCase("topk_over_keys", batch=1, seq=21, topk=16, heads=3),
    IndexerCase("offset", batch=1, seq=11, q_offset=30, topk=4),
    IndexerCase("offset_past_keys", batch=1, seq=5, q_offset=64, keys=7, topk=5),
    IndexerCase("ratio_1", batch=1, seq=13, cmp_ratio=1, topk=6, heads=1),
    IndexerCase("one_slot", batch=1, seq=33, topk=1, heads=5, head_dim=8),
    IndexerCase("packed", documents=(13, 0, 3, 22), topk=5),
    IndexerCase("packed_padded", documents=(9, 18), padding=4, topk=3, q_offset=5),
    IndexerCase("nothing_visible", batch=2, seq=3, topk=4, keys=2),
)

# model shapes for a GPU: DeepSeek-V4 Flash
FLASH: dict = dict(heads=64, head_dim=128, topk=512, cmp_ratio=4, attn_heads=64, attn_dim=512)


def cu_seqlens(lengths: tuple[int, ...] | list[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32, device=device)


def layout(case: IndexerCase, device: torch.device | str = "cpu") -> dict:
    """Keyword arguments cmp_ratio, q_offset and, for a pack, cu_seqlens_q and cu_seqlens_k."""
    kwargs: dict = dict(cmp_ratio=case.cmp_ratio, q_offset=case.q_offset)
    if case.documents is not None:
        kwargs["cu_seqlens_q"] = cu_seqlens(case.documents, device)
        kwargs["cu_seqlens_k"] = cu_seqlens([case.keys_of(n) for n in case.documents], device)
    return kwargs


def _lead(case: IndexerCase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Leading sizes of the queries' and the keys' tensors."""
    if case.documents is not None:
        return (case.rows,), (sum(case.keys_of(n) for n in case.documents),)
    return (case.batch, case.seq), (case.batch, case.keys_of(case.seq))


def make_indexer(
    case: IndexerCase,
    dtype: torch.dtype = torch.float32,
    *,
    weights_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    ties: bool = True,
) -> dict[str, Tensor]:
    """q, k, weights; ``ties`` plants zero and repeated key rows, and every fifth query gets no positive weight, every seventh only
    zeros."""
    generator = torch.Generator(device=device).manual_seed(seed)
    queries, keys = _lead(case)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    q, k = normal(*queries, case.heads, case.head_dim), normal(*keys, case.head_dim)
    weights = normal(*queries, case.heads) * (case.heads * case.head_dim) ** -0.5
    if ties:
        k[..., 2::5, :] = 0
        k[..., 1::4, :] = k[..., 0::4, :][..., : k[..., 1::4, :].shape[-2], :]
        weights[..., 3::5, :] = -weights[..., 3::5, :].abs()
        weights[..., 6::7, :] = 0
    return dict(q=q.to(dtype), k=k.to(dtype), weights=weights.to(weights_dtype or torch.promote_types(dtype, torch.float32)))


def make_indices(case: IndexerCase, *, device: torch.device | str = "cpu", seed: int = 1) -> Tensor:
    """Index lists [.., K] int32 as no selection gives them: holes, repeats, out of range, not yet visible; every ninth row is all -1."""
    generator = torch.Generator(device=device).manual_seed(seed)
    queries, keys = _lead(case)
    bound = max(2, keys[-1])
    indices = torch.randint(0, bound, (*queries, case.topk), generator=generator, device=device)
    chance = torch.rand(indices.shape, generator=generator, device=device)
    indices = torch.where(chance < 0.15, -1, torch.where(chance > 0.95, indices + bound, indices))
    indices[..., 8::9, :] = -1
    return indices.to(torch.int32)


def make_attention(
    case: IndexerCase, dtype: torch.dtype = torch.float32, *, device: torch.device | str = "cpu", seed: int = 2
) -> dict[str, Tensor]:
    """q, cmp_kv and an lse that belongs to them: log-sum-exp over the visible blocks and a random rest (window and sink).

    Every sixth query has a sink of +inf in its head 0 (lse = +inf); a row that sees no block keeps the rest alone.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    queries, keys = _lead(case)
    options: dict = dict(generator=generator, device=device, dtype=torch.float32)
    q = torch.randn(*queries, case.attn_heads, case.attn_dim, **options).to(dtype)
    cmp_kv = torch.randn(*keys, case.attn_dim, **options).to(dtype)
    rest = torch.randn(*queries, case.attn_heads, **options) + 1
    wide = compute_dtype(q)
    chunk = max(1, 2**24 // max(1, case.attn_heads * keys[-1]))
    packs = layout(case, device)
    start, count = visible_span(
        1 if case.packed else case.batch, queries[-1], keys[-1], case.cmp_ratio, packs.get("cu_seqlens_q"), packs.get("cu_seqlens_k"),
        case.q_offset, q.device,
    )  # fmt: skip
    start, count = start.reshape(queries), count.reshape(queries)
    columns = torch.arange(keys[-1], device=device)
    seen = []
    for first in range(0, queries[-1], chunk):
        part = slice(first, first + chunk)
        z = torch.einsum("tnd,kd->tnk" if case.packed else "bsnd,bkd->bsnk", q[..., part, :, :].to(wide), cmp_kv.to(wide))
        low, high = start[..., part, None, None], (start + count)[..., part, None, None]
        seen.append(torch.logsumexp((case.attn_dim**-0.5 * z).masked_fill((columns < low) | (columns >= high), -torch.inf), -1))
    lse = torch.logaddexp(torch.cat(seen, -2), rest.to(wide)) if seen else rest.to(wide)
    lse[..., 5::6, 0] = torch.inf
    return dict(q=q, cmp_kv=cmp_kv, lse=lse)


def make_teacher(case: IndexerCase, *, device: torch.device | str = "cpu", seed: int = 3, slots: int | None = None) -> Tensor:
    """Teacher [.., K] fp32 as ``return_cmp_probs`` gives it: mass below 1, some slots exactly 0, every eighth row of mass 0."""
    generator = torch.Generator(device=device).manual_seed(seed)
    queries, _ = _lead(case)
    u = torch.rand(*queries, slots or case.topk, generator=generator, device=device) ** 4 / (slots or case.topk)
    u[..., 1::4] = 0
    u[..., 7::8, :] = 0
    return u
