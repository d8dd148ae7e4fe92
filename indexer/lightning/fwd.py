"""Lightning indexer forward: scores, then the selection, in chunks of queries."""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from indexer import hopper
from indexer.core import causal, product, relu, visible, visible_table
from indexer.lightning.ascend.scores import scores_ascend_spec
from indexer.lightning.ascend.topk import RESIDENT, order_ascend_spec, select_ascend_spec
from indexer.lightning.filter import room_for, selection
from indexer.lightning.topk import group_size, order_spec, row_lengths
from kernel_runtime.device import grid_size, on_npu
from kernel_runtime.launch import TRITON_DTYPE, Spec

COLUMNS = 128  # queries x heads of a tile
BLOCK_KEYS = 64
SCORE_BUFFER = 1 << 26  # fp32 elements of the score buffer: 256 MiB


@triton.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset"])
def scores_kernel(
    q, k, weights, span, scores, b0, i0, n, S, S3, rows, q_offset,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr,
    NQ: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """scores [batches, n, S3] of n queries from i0 on; only visible blocks are written, counted from the query's own document.

    Keys are the rows of the product and NQ queries x HB heads its columns, so that a thread holds whole runs of a head sum; queries and
    weights stay in place while the keys stream past. Later queries see more and go first.
    """
    batch = b0 + tl.program_id(1)
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * NQ
    local = tile + tl.arange(0, NQ)
    on = local < n
    if TABLE:
        start, count = visible(span, batch.to(tl.int64) * S + i0 + local, i0 + local, on, rows, S3, q_offset, R, TABLE)
        low = tl.min(tl.where(count > 0, start, S3), 0)
        high = tl.max(tl.where(count > 0, start + count, 0), 0)
    else:
        count = tl.where(on, causal(i0 + local, S3, q_offset, R), 0)
        low = 0
        high = causal(i0 + tl.minimum(tile + NQ, n) - 1, S3, q_offset, R)

    column = tl.arange(0, NQ * HB)
    head = column % HB
    owner = tile + column // HB
    d = tl.arange(0, DP)
    token = batch.to(tl.int64) * S + i0 + tile
    q_tile = q + token * H * D + (column // HB * H + head)[:, None] * D + d[None, :]
    w_tile = weights + token * H + column // HB * H + head
    q_mask = (owner < n)[:, None] & (d < D)[None, :]
    if HB >= H:
        q_t = tl.trans(tl.load(q_tile, mask=q_mask & (head < H)[:, None], other=0.0))
        w = tl.load(w_tile, mask=(owner < n) & (head < H), other=0.0).to(tl.float32)

    out = scores + (tl.program_id(1) * n + tile).to(tl.int64) * S3
    k_rows = k + batch.to(tl.int64) * S3 * D
    keys = tl.arange(0, BK)
    for j in tl.range(low, high, BK, num_stages=STAGES):
        s = j + keys
        # offsets fit 32 bits: the keys of one batch entry have fewer than 2^31 channels
        block = tl.load(k_rows + s[:, None] * D + d[None, :], mask=(s < S3)[:, None] & (d < D)[None, :], other=0.0)
        if HB >= H:
            products = product(block, q_t, tl.zeros([BK, NQ * HB], tl.float32))
            total = tl.sum(tl.reshape(relu(products) * w[None, :], [BK, NQ, HB]), 2)
        else:
            total = tl.zeros([BK, NQ], tl.float32)
            for h in range(0, H, HB):
                more = (head < H - h) & (owner < n)
                q_t = tl.trans(tl.load(q_tile + h * D, mask=q_mask & more[:, None], other=0.0))
                w = tl.load(w_tile + h, mask=more, other=0.0).to(tl.float32)
                products = product(block, q_t, tl.zeros([BK, NQ * HB], tl.float32))
                total += tl.sum(tl.reshape(relu(products) * w[None, :], [BK, NQ, HB]), 2)
        if TABLE:
            place = s[:, None] - start[None, :]
            shown = (place >= 0) & (place < count[None, :])
        else:
            place = s[:, None]
            shown = place < count[None, :]
        tl.store(out + tl.arange(0, NQ)[None, :] * S3 + place, total, mask=shown)


@cache
def scores_spec(dtype: torch.dtype, weights_dtype: torch.dtype, heads: int, dim: int, cmp_ratio: int, table: bool) -> Spec:
    pointer = f"*{TRITON_DTYPE[dtype]}"
    block = min(triton.next_power_of_2(heads), COLUMNS)
    sizes = ("b0", "i0", "n", "S", "S3", "rows", "q_offset")
    return Spec(
        scores_kernel,
        types={"q": pointer, "k": pointer, "weights": f"*{TRITON_DTYPE[weights_dtype]}", "span": "*i32", "scores": "*fp32"}
        | dict.fromkeys(sizes, "i32"),
        consts={
            "H": heads, "HB": block, "D": dim, "DP": max(16, triton.next_power_of_2(dim)), "R": cmp_ratio, "TABLE": table,
            "NQ": COLUMNS // block, "BK": BLOCK_KEYS, "STAGES": 2,
        },
        num_warps=4,
        targets=("cuda", "hip"),
    )  # fmt: skip


def launch_scores(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, span: torch.Tensor, scores: torch.Tensor, cmp_ratio: int, table: bool,
    batches: int, b0: int, i0: int, n: int, *sizes: int,
) -> None:  # fmt: skip
    """scores [batches, n, S3] of n queries from i0 on of the batch entries from b0 on. sizes: S, S3, rows, q_offset. On sm_90 by the kernel of
    `indexer.hopper`, where it takes the call. Contiguous tensors."""
    options = (q.dtype, weights.dtype, *q.shape[-2:], cmp_ratio, table)
    if hopper.takes(q, k, weights):
        from indexer.hopper.scores import hopper_scores_spec, scores_launch

        spec = hopper_scores_spec(*options)
        grid, tasks = scores_launch(spec, q.device, n, batches)
        spec.launch(grid, q, k, weights, span, scores, b0, i0, n, *sizes, batches, tasks)
        return
    spec = scores_spec(*options)
    spec.launch((triton.cdiv(n, spec.consts["NQ"]), batches), q, k, weights, span, scores, b0, i0, n, *sizes)


def score_specs(
    dtype: torch.dtype, weights_dtype: torch.dtype, heads: int, dim: int, cmp_ratio: int, table: bool
) -> Iterator[Spec]:
    """Of all that `launch_scores` can launch."""
    yield scores_spec(dtype, weights_dtype, heads, dim, cmp_ratio, table)
    if hopper.has_gluon() and hopper.covers(dtype, heads, dim):
        from indexer.hopper.scores import hopper_scores_spec

        yield hopper_scores_spec(dtype, weights_dtype, heads, dim, cmp_ratio, table)


def query_chunks(batch: int, queries: int, keys: int, asked: int, buffers: int = 1) -> tuple[int, int]:
    """(batch entries, queries) of a chunk: whole sequences where they fit, otherwise a part of one. buffers: that share SCORE_BUFFER."""
    rows = asked or max(1, SCORE_BUFFER // buffers // max(1, keys))
    return (min(batch, rows // queries), queries) if rows >= queries else (1, rows)


def chunks_of(batch: int, queries: int, batches: int, length: int) -> Iterator[tuple[int, int, int, int]]:
    """(first batch entry, entries, first query, queries) of every chunk."""
    for b0 in range(0, batch, batches):
        for i0 in range(0, queries, length):
            yield b0, min(batches, batch - b0), i0, min(length, queries - i0)


def lightning_indexer_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    q_offsets: torch.Tensor | None,
    topk: int,
    cmp_ratio: int,
    q_offset: int,
    sorted: bool,
    query_chunk: int,
    npu: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """indices and scores of the op lightning_indexer_fwd. npu: see `on_npu`."""
    q, k, weights = q.contiguous(), k.contiguous(), weights.contiguous()
    heads, dim = q.shape[-2:]
    batch, queries = (1, q.shape[0]) if q.dim() == 3 else q.shape[:2]
    keys, rows = k.shape[-2], batch * queries
    indices = torch.empty(*weights.shape[:-1], topk, dtype=torch.int32, device=q.device)
    values = torch.empty(indices.shape, dtype=torch.float32, device=q.device)
    if not rows:
        return indices, values
    span = visible_table(batch, queries, keys, cmp_ratio, cu_seqlens_q, cu_seqlens_k, q_offset, q_offsets, q.device)
    table = span is not None
    span = indices if span is None else span  # a pointer that is not read
    batches, length = query_chunks(batch, queries, keys, query_chunk)
    buffer = torch.empty(max(1, batches * length * keys), dtype=torch.float32, device=q.device)
    if on_npu(q.device, npu):
        winners = torch.empty(batches * length * topk, dtype=torch.int32, device=q.device)
        best = torch.empty(winners.shape, dtype=torch.float32, device=q.device)
        score_npu = scores_ascend_spec(q.dtype, weights.dtype, heads, dim, cmp_ratio, table)
        select_npu = select_ascend_spec(topk, cmp_ratio, table, keys <= RESIDENT)
        order_npu = order_ascend_spec(topk, cmp_ratio, table, sorted)
        for b0, some, i0, n in chunks_of(batch, queries, batches, length):
            sizes = (b0, i0, n, queries, keys, rows, q_offset, some * n)
            vector_grid = (grid_size(q.device, some * n, True, vector=True),)
            score_npu.launch((grid_size(q.device, some * n, True),), q, k, weights, span, buffer, *sizes)
            select_npu.launch(vector_grid, buffer, span, winners, best, *sizes)
            order_npu.launch(vector_grid, buffer, span, winners, best, indices, values, *sizes)
        return indices, values
    group = group_size(topk)
    fewest = min(topk, group) if sorted else topk
    plan = [(*lengths, selection(topk, cmp_ratio, table, lengths[1], sorted)) for lengths in row_lengths(fewest, keys)]
    room = room_for(topk)
    filtered = any(len(steps) > 1 for *_, steps in plan)
    winners = torch.empty(batches * length * room, dtype=torch.int32, device=q.device) if filtered else indices

    order = order_spec(topk, cmp_ratio, table, sorted)
    for b0, some, i0, n in chunks_of(batch, queries, batches, length):
        sizes = (n, queries, keys, rows, q_offset)
        if table or q_offset + i0 + n >= cmp_ratio:  # somebody sees a block
            launch_scores(q, k, weights, span, buffer, cmp_ratio, table, some, b0, i0, *sizes)
        for above, most, steps in plan:
            first, last = (0, n) if table else rows_between(above, most if most < keys else None, q_offset + i0, n, cmp_ratio)
            if first >= last:
                continue
            for step in steps:
                step.launch((last - first, some), buffer, span, winners, indices, b0, i0, first, *sizes, room, above, most)
        order.launch((n, some, triton.cdiv(topk, group)), buffer, span, indices, values, b0, i0, *sizes)
    return indices, values


def rows_between(above: int, upto: int | None, offset: int, n: int, cmp_ratio: int) -> tuple[int, int]:
    """Range of the n queries from position `offset` on that see more than `above` and at most `upto` blocks (None: no limit)."""
    first = (above + 1) * cmp_ratio - 1 - offset
    last = n if upto is None else (upto + 1) * cmp_ratio - 1 - offset
    return max(0, first), min(n, last)
