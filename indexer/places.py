"""Where the rows of dk that programs wrote wait for the keys that sum them: those of a key together, in the order of their slots.

A counting sort of the slots by key that never moves them. `rank_kernel` walks over chunks of queries and counts, for every slot, the slots
of its chunk before it that have the same key; `add_chunks_kernel` and `offsets_kernel` turn the counts into places. A slot's row belongs to
offsets[key] + table[chunk, key] + rank. Everything is exact in whole numbers, so that the sums have one order. Imports Triton.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import Spec

CHUNK, MAX_CHUNKS = 16, 1024  # queries of a chunk, or as many as give no more chunks than that
SLOT_BITS = tl.constexpr(12)  # of a word of the table: the slot that counted last; the rest is the count
GPU_TARGETS = ("cuda", "hip")


@triton.jit(do_not_specialize=["r0", "S", "S3", "rows", "keys", "size"])
def rank_kernel(
    indices, dscores, span, ranks, table, r0, S, S3, rows, keys, size, K: tl.constexpr, P: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """ranks [rows, K] of the queries from r0 on, -1 in slots without a gradient; table [chunks, keys], zeros before: (count, a slot)."""
    chunk = tl.program_id(0)
    slot = tl.arange(0, P)
    counts = table + chunk.to(tl.int64) * keys
    for r in range(tl.minimum(size, rows - chunk * size)):
        local = (chunk * size + r).to(tl.int64)
        row = r0 + local
        start = 0
        if TABLE:
            start = tl.load(span + row)
        listed = tl.load(indices + row * K + slot, mask=slot < K, other=-1)
        grad = tl.load(dscores + row * K + slot, mask=(slot < K) & (listed >= 0) & (listed < S3 - start), other=0.0)
        on = grad != 0.0
        key = listed + ((row // S) * S3 + start).to(tl.int32)
        before = tl.load(counts + key, mask=on, other=0) >> SLOT_BITS
        tl.debug_barrier()  # all have read before one writes
        tl.store(counts + key, ((before + 1) << SLOT_BITS) | slot, mask=on)
        tl.debug_barrier()
        last = tl.load(counts + key, mask=on, other=0)
        if tl.max((on & ((last & 4095) != slot)).to(tl.int32), 0) > 0:  # another slot of this query has the key, too: one by one
            number = before
            for d in range(K):
                same = (on & (listed == tl.load(indices + row * K + d))).to(tl.int32)
                same = same * tl.where(tl.load(dscores + row * K + d) != 0.0, 1, 0)
                number += same
                before += tl.where(slot > d, same, 0)
            tl.debug_barrier()
            tl.store(counts + key, number << SLOT_BITS, mask=on)
            tl.debug_barrier()
        tl.store(ranks + local * K + slot, tl.where(on, before, -1), mask=slot < K)


@triton.jit(do_not_specialize=["chunks", "keys"])
def add_chunks_kernel(table, totals, chunks, keys, BK: tl.constexpr, BC: tl.constexpr):
    """table[chunk, key] = slots of the chunks before; totals[key] = slots of all."""
    key = tl.program_id(0) * BK + tl.arange(0, BK)
    c = tl.arange(0, BC)
    total = tl.zeros([BK], tl.int32)
    for j in range(0, chunks, BC):
        at = table + (j + c)[:, None].to(tl.int64) * keys + key[None, :]
        on = ((j + c) < chunks)[:, None] & (key < keys)[None, :]
        n = tl.load(at, mask=on, other=0) >> SLOT_BITS
        tl.store(at, tl.cumsum(n, 0) - n + total[None, :], mask=on)
        total += tl.sum(n, 0)
    tl.store(totals + key, total, mask=key < keys)


@triton.jit(do_not_specialize=["keys"])
def offsets_kernel(totals, offsets, keys, B: tl.constexpr):
    """offsets [keys + 1]: sums of totals, by one program."""
    k = tl.arange(0, B)
    total = 0
    for j in range(0, keys, B):
        n = tl.load(totals + j + k, mask=j + k < keys, other=0)
        tl.store(offsets + j + k, tl.cumsum(n, 0) - n + total, mask=j + k < keys)
        total += tl.sum(n, 0)
    tl.store(offsets + keys, total)


@triton.jit
def sum_rows_kernel(partial, offsets, dk, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr):
    """dk[key] += the rows of key program_id(0), in their order."""
    s = tl.program_id(0)
    begin = tl.load(offsets + s)
    end = tl.load(offsets + s + 1)
    d = tl.arange(0, DP)
    n = tl.arange(0, BR)
    total = tl.zeros([BR, DP], tl.float32)
    for j in tl.range(begin, end, BR, num_stages=3):  # loads that feed no product are pipelined only where a loop says so
        mask = (j + n < end)[:, None] & (d < D)[None, :]
        total += tl.load(partial + (j + n)[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    out = dk + s.to(tl.int64) * D + d
    tl.store(out, tl.load(out, mask=d < D, other=0.0) + tl.sum(total, 0), mask=d < D)


@cache
def rank_spec(slots: int, table: bool) -> Spec:
    names = ("r0", "S", "S3", "rows", "keys", "size")
    size = max(16, triton.next_power_of_2(slots))
    return Spec(
        rank_kernel,
        types={"indices": "*i32", "dscores": "*fp32", "span": "*i32", "ranks": "*i32", "table": "*i32"} | dict.fromkeys(names, "i32"),
        consts={"K": slots, "P": size, "TABLE": table},
        num_warps=min(16, max(4, size // 128)),
        targets=GPU_TARGETS,
    )


@cache
def place_specs() -> tuple[Spec, Spec]:
    """Of `add_chunks_kernel` and `offsets_kernel`."""
    add = Spec(
        add_chunks_kernel,
        types={"table": "*i32", "totals": "*i32", "chunks": "i32", "keys": "i32"},
        consts={"BK": 32, "BC": 64},
        targets=GPU_TARGETS,
    )
    types = {"totals": "*i32", "offsets": "*i32", "keys": "i32"}
    return add, Spec(offsets_kernel, types=types, consts={"B": 4096}, num_warps=8, targets=GPU_TARGETS)


@cache
def sum_rows_spec(name: str, dim: int) -> Spec:
    """name: Triton's, of the rows' dtype."""
    return Spec(
        sum_rows_kernel,
        types={"partial": f"*{name}", "offsets": "*i32", "dk": "*fp32"},
        consts={"D": dim, "DP": max(16, triton.next_power_of_2(dim)), "BR": 32},
        targets=GPU_TARGETS,
    )


def chunk_size(rows: int) -> int:
    return max(CHUNK, triton.cdiv(rows, MAX_CHUNKS))


def places(
    indices: torch.Tensor, dscores: torch.Tensor, span: torch.Tensor | None, ranks: torch.Tensor, r0: int, rows: int, queries: int,
    keys: int, all_keys: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(table, offsets) of `rows` queries from r0 on, and ranks filled; keys: of a batch entry, all_keys: of all."""
    size = chunk_size(rows)
    chunks = triton.cdiv(rows, size)
    table = torch.zeros(chunks, all_keys, dtype=torch.int32, device=indices.device)
    totals = torch.empty(all_keys, dtype=torch.int32, device=indices.device)
    offsets = torch.empty(all_keys + 1, dtype=torch.int32, device=indices.device)
    add, scan = place_specs()
    pointers = (indices, dscores, indices if span is None else span, ranks, table)
    rank_spec(indices.shape[-1], span is not None).launch((chunks,), *pointers, r0, queries, keys, rows, all_keys, size)
    add.launch((triton.cdiv(all_keys, add.consts["BK"]),), table, totals, chunks, all_keys)
    scan.launch((1,), totals, offsets, all_keys)
    return table, offsets
