"""Shapes and inputs of the sparse attention and of the compressor, shared by tests and benches.

Letters as in `reference.sparse_attn`. Inputs are drawn on the CPU in fp32 and then moved and cast, so a seed means the
same numbers on every device and in every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference.sparse_attn import compressed_cu_seqlens


@dataclass(frozen=True)
class AttentionCase:
    """One call of sparse_attn_shared_kv. A pack where docs_q is set (lengths of its documents), else B, S and S2."""

    name: str
    mode: str  # "swa", "cfa" or "scfa"
    N: int = 3
    D: int = 16
    B: int = 2
    S: int = 13
    S2: int | None = None  # None: S
    docs_q: tuple[int, ...] | None = None
    docs_ori: tuple[int, ...] | None = None  # None: as docs_q, and cu_seqlens_ori is not passed
    K: int = 5
    cmp_ratio: int = 4
    window: int | None = 6
    sinks: str = "finite"  # "finite", "none" or "extreme" (finite, -inf, +inf in turn)
    q_offset: int | tuple[int, ...] | None = None  # a tuple becomes an int32 tensor
    softmax_scale: float | None = None
    indices: str = "mixed"  # "mixed" (see `mixed_indices`) or "topk" (distinct, descending score, -1 tail)

    @property
    def packed(self) -> bool:
        return self.docs_q is not None

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Original keys of every sequence or document."""
        if self.docs_q is not None:
            return self.docs_q if self.docs_ori is None else self.docs_ori
        return (self.S if self.S2 is None else self.S2,) * self.B

    @property
    def query_lengths(self) -> tuple[int, ...]:
        return self.docs_q if self.docs_q is not None else (self.S,) * self.B


ATTENTION_CASES = (
    AttentionCase("swa", "swa"),
    AttentionCase("swa_none_window", "swa", window=None, sinks="none"),
    AttentionCase("swa_wide_window", "swa", window=128, S=7, S2=11),
    AttentionCase("swa_window_1", "swa", window=1, N=1),
    AttentionCase("swa_offset_past_end", "swa", S=5, S2=9, q_offset=7),
    AttentionCase("swa_offset_negative", "swa", S=9, S2=9, q_offset=-4, sinks="none"),
    AttentionCase("swa_pack", "swa", docs_q=(5, 0, 8, 1), sinks="extreme"),
    AttentionCase("cfa", "cfa", S=11, S2=11),  # 11 = 2 * 4 + 3: a remainder that is not compressed
    AttentionCase("cfa_ratio_1", "cfa", cmp_ratio=1, S=6),
    AttentionCase("cfa_short", "cfa", S=3, cmp_ratio=4),  # no compressed entry at all
    AttentionCase("cfa_offset_tensor", "cfa", S=6, S2=18, q_offset=(12, 3), window=5),
    AttentionCase("cfa_pack", "cfa", docs_q=(9, 0, 3, 6), cmp_ratio=2),
    AttentionCase("cfa_pack_longer_keys", "cfa", docs_q=(3, 0, 4), docs_ori=(7, 2, 9), cmp_ratio=2, sinks="extreme"),
    AttentionCase("scfa", "scfa", S=15, S2=15),
    AttentionCase("scfa_no_sinks", "scfa", sinks="none", K=9),
    AttentionCase("scfa_no_window_none", "scfa", window=None, cmp_ratio=3),
    AttentionCase("scfa_extreme_sinks", "scfa", N=4, sinks="extreme", softmax_scale=0.4),
    AttentionCase("scfa_many_slots", "scfa", K=23, cmp_ratio=4),  # more slots than entries
    AttentionCase("scfa_offset", "scfa", S=6, S2=19, q_offset=10),
    AttentionCase("scfa_offset_invisible", "scfa", S=8, S2=12, q_offset=-5, sinks="none", cmp_ratio=2),
    AttentionCase("scfa_topk", "scfa", S=21, cmp_ratio=2, indices="topk"),
    AttentionCase("scfa_pack", "scfa", docs_q=(9, 0, 14, 2)),
    AttentionCase("scfa_pack_longer_keys", "scfa", docs_q=(4, 0, 5), docs_ori=(9, 3, 17), sinks="none", window=4),
    AttentionCase("scfa_pack_offset", "scfa", docs_q=(4, 0, 5), docs_ori=(9, 3, 17), q_offset=(2, 1, 12), cmp_ratio=3),
)


def cu_seqlens_of(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """[G + 1] int32 offsets of documents of these lengths."""
    return torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).to(device, torch.int32)


def query_positions(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor]:
    """Position t of every query, and the original keys and compressed entries of its sequence or document: [B, S] or [T]."""
    positions = [torch.empty(0, dtype=torch.int64)]
    for g, (queries, keys) in enumerate(zip(case.query_lengths, case.key_lengths)):
        offset = case.q_offset[g] if isinstance(case.q_offset, tuple) else case.q_offset
        positions.append(torch.arange(queries) + (keys - queries if offset is None else offset))
    position = torch.cat(positions)
    length = torch.tensor(case.key_lengths, dtype=torch.int64).repeat_interleave(torch.tensor(case.query_lengths, dtype=torch.int64))
    if not case.packed:
        position, length = position.view(case.B, case.S), length.view(case.B, case.S)
    return position, length, length // case.cmp_ratio


def mixed_indices(position: Tensor, entries: Tensor, K: int, cmp_ratio: int, generator: torch.Generator) -> Tensor:
    """[..., K] int32 slots of every kind in any order: half of them visible where a query sees any (drawn with repetition, so
    duplicates occur), the rest -1, not yet visible, one past the end, far out of range on either side."""
    shape = (*position.shape, K)
    visible = torch.minimum((position + 1).div(cmp_ratio, rounding_mode="floor"), entries).clamp_min(0)[..., None].expand(shape)
    entries = entries[..., None].expand(shape)
    draw = torch.rand(shape, generator=generator)
    seen = (draw * visible).long()
    unseen = visible + (draw * (entries - visible)).long()  # is one past the end where nothing is hidden
    kind = torch.randint(0, 10, shape, generator=generator)
    far = torch.where(draw < 0.5, 2**31 - 1, -(2**31))
    index = torch.where(kind < 5, torch.where(visible > 0, seen, -1), -1)
    index = torch.where(kind == 6, unseen, index)
    index = torch.where(kind == 7, entries, index)
    index = torch.where(kind == 8, far, index)
    return torch.where(kind == 9, -2, index).to(torch.int32)


def topk_indices(position: Tensor, entries: Tensor, K: int, cmp_ratio: int, generator: torch.Generator, chunk: int = 1024) -> Tensor:
    """[..., K] int32 distinct visible entries by descending random score, then -1: what an indexer hands over."""
    visible = torch.minimum((position + 1).div(cmp_ratio, rounding_mode="floor"), entries).clamp_min(0).reshape(-1)
    most = int(entries.max()) if entries.numel() else 0
    result = torch.full((visible.numel(), K), -1, dtype=torch.int32)
    for begin in range(0, visible.numel(), chunk):
        limit = visible[begin : begin + chunk, None]
        score = torch.rand((limit.shape[0], most), generator=generator)
        score = score.masked_fill(torch.arange(most) >= limit, -1.0)
        value, entry = score.topk(min(K, most), dim=1)
        result[begin : begin + chunk, : min(K, most)] = torch.where(value >= 0, entry, -1).to(torch.int32)
    return result.view(*position.shape, K)


def attention_inputs(
    case: AttentionCase, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Keyword arguments of sparse_attn_shared_kv. Sinks are fp32 (fp64 with dtype fp64, for gradient checks)."""
    generator = torch.Generator().manual_seed(seed)
    lengths, entries = case.key_lengths, [n // case.cmp_ratio for n in case.key_lengths]
    packed = case.packed
    queries = (sum(case.query_lengths),) if packed else (case.B, case.S)

    def rows(per_sequence: Sequence[int], one: int) -> tuple[int, ...]:
        return (sum(per_sequence),) if packed else (case.B, one)

    S2 = case.S if case.S2 is None else case.S2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    inputs: dict[str, Any] = {"q": normal(*queries, case.N, case.D), "ori_kv": normal(*rows(lengths, S2), case.D), "window": case.window}
    if case.mode != "swa":
        inputs |= {"cmp_kv": normal(*rows(entries, S2 // case.cmp_ratio), case.D), "cmp_ratio": case.cmp_ratio}
    if case.mode == "scfa":
        make = mixed_indices if case.indices == "mixed" else topk_indices
        position, _, existing = query_positions(case)
        inputs["cmp_indices"] = make(position, existing, case.K, case.cmp_ratio, generator).to(device)
    if case.sinks != "none":
        sinks = torch.randn(case.N, generator=generator)
        if case.sinks == "extreme":
            head = torch.arange(case.N) % 3
            sinks = torch.where(head == 1, -torch.inf, torch.where(head == 2, torch.inf, sinks))
        inputs["sinks"] = sinks.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    if case.softmax_scale is not None:
        inputs["softmax_scale"] = case.softmax_scale
    if packed:
        inputs["cu_seqlens_q"] = cu_seqlens_of(case.query_lengths, device)
        if case.docs_ori is not None:
            inputs["cu_seqlens_ori"] = cu_seqlens_of(case.docs_ori, device)
            if case.mode != "swa":
                inputs["cu_seqlens_cmp"] = compressed_cu_seqlens(inputs["cu_seqlens_ori"], case.cmp_ratio)
    if isinstance(case.q_offset, tuple):
        inputs["q_offset"] = torch.tensor(case.q_offset, dtype=torch.int32, device=device)
    elif case.q_offset is not None:
        inputs["q_offset"] = case.q_offset
    return inputs


def valid_pairs(case: AttentionCase, cmp_indices: Tensor | None = None) -> int:
    """(query, key) pairs that count: the `pairs` of the FLOPs convention, 4 (forward) or 10 (backward) * pairs * N * D."""
    position, length, entries = query_positions(case)
    low = torch.zeros_like(position) if case.window is None else (position - case.window + 1).clamp_min(0)
    pairs = int((torch.minimum(position + 1, length) - low).clamp_min(0).sum())
    if case.mode == "swa":
        return pairs
    visible = torch.minimum((position + 1).div(case.cmp_ratio, rounding_mode="floor"), entries).clamp_min(0)
    if case.mode == "cfa":
        return pairs + int(visible.sum())
    if cmp_indices is None:
        raise ValueError("cmp_indices is needed to count the pairs of a case with mode 'scfa'")
    index = cmp_indices.cpu()
    return pairs + int(((index >= 0) & (index < visible[..., None])).sum())


@dataclass(frozen=True)
class CompressCase:
    """One call of compress_kv. A pack where docs is set, else B and S."""

    name: str
    ratio: int
    overlap: bool
    D: int = 6
    B: int = 2
    S: int = 13
    docs: tuple[int, ...] | None = None


COMPRESS_CASES = (
    CompressCase("plain", 4, False),
    CompressCase("plain_ratio_1", 1, False, S=5),
    CompressCase("plain_short", 8, False, S=7),
    CompressCase("plain_pack", 4, False, docs=(9, 0, 3, 8)),
    CompressCase("overlap", 4, True),
    CompressCase("overlap_ratio_1", 1, True, S=5),
    CompressCase("overlap_one_window", 4, True, S=6),
    CompressCase("overlap_short", 8, True, S=7),
    CompressCase("overlap_pack", 2, True, docs=(5, 0, 1, 6, 3)),
    CompressCase("overlap_pack_short", 4, True, docs=(3, 0, 2)),
)


def compress_inputs(
    case: CompressCase, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Keyword arguments of compress_kv. The bias is fp32 (fp64 with dtype fp64, for gradient checks)."""
    generator = torch.Generator().manual_seed(seed)
    channels = case.D * (2 if case.overlap else 1)
    tokens = (case.B, case.S) if case.docs is None else (sum(case.docs),)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    inputs: dict[str, Any] = {
        "kv": normal(*tokens, channels).to(device, dtype),
        "gate": (2 * normal(*tokens, channels)).to(device, dtype),
        "position_bias": normal(case.ratio, channels).to(device, torch.float64 if dtype == torch.float64 else torch.float32),
        "ratio": case.ratio,
        "overlap": case.overlap,
    }
    if case.docs is not None:
        inputs["cu_seqlens"] = cu_seqlens_of(case.docs, device)
    return inputs
