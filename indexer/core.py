"""Device functions that the kernels of both ops share, and the table of visible blocks. Imports Triton.

A row is a query: row = batch * S + i in BSND, the token itself in TND (batch 0). Rows of k are counted from the first one of the batch.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.kernels import dot
from kernel_runtime.launch import ON_ASCEND, Spec

BLOCK_SPAN = 256
product = dot  # of every kernel here
ASCEND = tl.constexpr(ON_ASCEND)


@triton.jit
def relu(x):
    """max(x, 0). A NaN stays one, as in reference/indexer.py; on Ascend, where that would cost a comparison, it is what the hardware makes of it."""
    if ASCEND:
        return tl.maximum(x, 0.0)
    else:
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def causal(i, S3, q_offset, R: tl.constexpr):
    """Visible blocks of query `i`. Clipped at 0 first: integer division rounds towards 0 here and down in Python."""
    return tl.minimum(tl.maximum(i + q_offset + 1, 0) // R, S3)


@triton.jit
def visible(span, row, i, on, rows, S3, q_offset, R: tl.constexpr, TABLE: tl.constexpr):
    """First row of k and number of visible blocks of queries `i` (rows `row`); 0 blocks where `on` is false."""
    if TABLE:
        start = tl.load(span + row, mask=on, other=0)
        count = tl.load(span + rows + row, mask=on, other=0)
    else:
        start = i * 0
        count = tl.where(on, causal(i, S3, q_offset, R), 0)
    return start, count


@triton.jit
def visible_of_row(span, row, i, rows, S3, q_offset, R: tl.constexpr, TABLE: tl.constexpr):
    """`visible` of one query that exists: Ascend takes a masked load for a vector, which then has to reach the scalar unit."""
    if TABLE:
        start = tl.load(span + row)
        count = tl.load(span + rows + row)
    else:
        start = i * 0
        count = causal(i, S3, q_offset, R)
    return start, count


@triton.jit(do_not_specialize=["rows", "S", "S3", "documents", "steps", "q_offset"])
def span_kernel(
    cu_seqlens_q, cu_seqlens_k, q_offsets, span, rows, S, S3, documents, steps, q_offset,
    R: tl.constexpr, PACKED: tl.constexpr, OFFSETS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """span[0] = first row of k, span[1] = visible blocks of every row: packed documents, or an offset for every batch entry."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    on = row < rows
    if PACKED:
        # the last document that starts at or before the row: the largest d in 0..documents with cu_seqlens_q[d] <= row
        low = row * 0
        high = low + documents
        for _ in range(steps):
            middle = (low + high + 1) // 2
            right = tl.load(cu_seqlens_q + middle, mask=on, other=0) <= row
            low = tl.where(right, middle, low)
            high = tl.where(right, high, middle - 1)
        inside = on & (low < documents)  # otherwise padding behind the last document
        first = tl.load(cu_seqlens_q + low, mask=inside, other=0)
        start = tl.load(cu_seqlens_k + low, mask=inside, other=0)
        length = tl.load(cu_seqlens_k + low + 1, mask=inside, other=0) - start
        length = tl.minimum(length, S3 - start)
        position = row - first
    else:
        low = row // S
        inside = on
        start = row * 0
        length = start + S3
        position = row - low * S
    if OFFSETS:
        position += tl.load(q_offsets + low, mask=inside, other=0)
    else:
        position += q_offset
    count = tl.where(inside, tl.minimum(tl.maximum(position + 1, 0) // R, length), 0)
    tl.store(span + row, start, mask=on)
    tl.store(span + rows + row, tl.maximum(count, 0), mask=on)


@cache
def span_spec(cmp_ratio: int, packed: bool, offsets: bool) -> Spec:
    names = ("rows", "S", "S3", "documents", "steps", "q_offset")
    return Spec(
        span_kernel,
        types=dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "q_offsets", "span"), "*i32") | dict.fromkeys(names, "i32"),
        consts={"R": cmp_ratio, "PACKED": packed, "OFFSETS": offsets, "BR": BLOCK_SPAN},
    )


def visible_table(
    batch: int,
    num_queries: int,
    num_keys: int,
    cmp_ratio: int,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    q_offset: int,
    q_offsets: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """[2, B * S] int32 for `visible`, or None where the kernels compute it (BSND with one offset)."""
    packed = cu_seqlens_q is not None
    if not packed and q_offsets is None:
        return None
    rows = batch * num_queries
    span = torch.empty(2, rows, dtype=torch.int32, device=device)
    if rows:
        documents = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else 0
        pointers = [span if x is None else x.contiguous() for x in (cu_seqlens_q, cu_seqlens_k, q_offsets)]
        spec = span_spec(cmp_ratio, packed, q_offsets is not None)
        sizes = (rows, num_queries, num_keys, documents, documents.bit_length(), q_offset)
        spec.launch((triton.cdiv(rows, BLOCK_SPAN),), *pointers, span, *sizes)
    return span
