"""Which rows of ori_kv and cmp_kv every query may see: the one kernel that knows about batches, packs, offsets and ratios.

places [rows, 4] int32 holds for every query, as rows of the flat arrays,
    0, 1    begin and end of its window in ori_kv
    2, 3    begin of its sequence's or document's entries in cmp_kv, and the end of those that are visible to it
Ranges of successive queries never go back: begins and ends are non-decreasing over the rows, also from document to document, which the
backward uses to find the queries of a key by bisection. A query after the last document sees nothing and stands at the very end.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import Spec

BLOCK = 128
FAR = 1 << 30  # beyond every key: the kernel's windows are no longer, and a position may be as far off on either side of the keys

# how the position of a document's first query is found
RIGHT_ALIGNED, NUMBER, TENSOR = 0, 1, 2


@triton.jit(do_not_specialize=["rows", "rows_ori", "rows_cmp", "S", "S2", "S3", "offset", "window", "ratio", "documents", "steps"])
def places_kernel(
    places, cu_q, cu_ori, cu_cmp, offsets, rows, rows_ori, rows_cmp, S, S2, S3, offset, window, ratio, documents, steps,
    PACKED: tl.constexpr, OFFSET: tl.constexpr, COMPRESSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    if PACKED:
        g = tl.zeros([BLOCK], tl.int32)  # number of documents that end at or before the row: empty documents hold none
        high = tl.zeros([BLOCK], tl.int32) + documents
        for _ in range(steps):
            middle = (g + high) // 2
            searching = g < high
            ends_before = tl.load(cu_q + tl.minimum(middle, documents - 1) + 1) <= row
            g = tl.where(searching & ends_before, middle + 1, g)
            high = tl.where(searching & ~ends_before, middle, high)
        inside = real & (g < documents)
        g = tl.where(inside, g, 0)
        q_start = tl.load(cu_q + g)
        ori_start = tl.load(cu_ori + g)
        ori_length = tl.load(cu_ori + g + 1) - ori_start
        if OFFSET == 0:
            first = ori_length - (tl.load(cu_q + g + 1) - q_start)
        elif OFFSET == 2:
            first = tl.load(offsets + g)
        else:
            first = offset
        t = row - q_start + first
        if COMPRESSED:
            cmp_start = tl.load(cu_cmp + g)
            cmp_length = tl.load(cu_cmp + g + 1) - cmp_start
    else:
        b = tl.where(real, row, 0) // S
        inside = real
        ori_start = b * S2
        ori_length = S2
        if OFFSET == 2:
            first = tl.load(offsets + b)
        else:
            first = offset
        t = row - b * S + first
        cmp_start = b * S3
        cmp_length = S3
    low = tl.minimum(tl.maximum(t - window + 1, 0), ori_length)
    high = tl.minimum(tl.maximum(t + 1, 0), ori_length)
    tl.store(places + row * 4, tl.where(inside, ori_start + low, rows_ori), mask=real)
    tl.store(places + row * 4 + 1, tl.where(inside, ori_start + high, rows_ori), mask=real)
    if COMPRESSED:
        # clamped first: a division rounds towards 0, so -1 // ratio would be taken for 0 and -ratio for -1
        visible = tl.minimum(tl.maximum(t + 1, 0) // ratio, cmp_length)
        tl.store(places + row * 4 + 2, tl.where(inside, cmp_start, rows_cmp), mask=real)
        tl.store(places + row * 4 + 3, tl.where(inside, cmp_start + visible, rows_cmp), mask=real)


_NUMBERS = ("rows", "rows_ori", "rows_cmp", "S", "S2", "S3", "offset", "window", "ratio", "documents", "steps")


@cache
def places_spec(packed: bool, offset: int, compressed: bool) -> Spec:
    return Spec(
        places_kernel,
        types={**dict.fromkeys(("places", "cu_q", "cu_ori", "cu_cmp", "offsets"), "*i32"), **dict.fromkeys(_NUMBERS, "i32")},
        consts={"PACKED": packed, "OFFSET": offset, "COMPRESSED": compressed, "BLOCK": BLOCK},
    )


def specs() -> Iterator[Spec]:
    """What a model launches: one sequence a row or packed documents, right aligned, with compressed entries or without."""
    for compressed in (False, True):
        yield places_spec(False, NUMBER, compressed)
        yield places_spec(True, RIGHT_ALIGNED, compressed)


def within_int32(first: int, S: int, window: int | None) -> tuple[int, int]:
    """Position of the first of S queries and a window through which they see the same keys, such that int32 holds position - window."""
    if window is None:
        first, window = min(first, FAR - S), FAR
    elif window > FAR:  # lower both, as far as all positions stay beyond the keys
        first, window = max(min(first, FAR - S), first - (window - FAR)), FAR
    return max(first, -FAR), window


def places_of(
    q: torch.Tensor, ori_kv: torch.Tensor, cmp_kv: torch.Tensor | None, cu_q: torch.Tensor | None, cu_ori: torch.Tensor | None,
    cu_cmp: torch.Tensor | None, q_offsets: torch.Tensor | None, q_offset: int | None, cmp_ratio: int, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """places [rows, 4] int32 of the op's arguments; rows are those of q with its leading dimensions joined."""
    packed = cu_q is not None
    S, S2, S3 = q.shape[-3], ori_kv.shape[-2], 0 if cmp_kv is None else cmp_kv.shape[-2]
    batch = 1 if packed else q.shape[0]
    rows = batch * S
    places = torch.empty((rows, 4), dtype=torch.int32, device=q.device)
    if not rows:
        return places
    if cu_q is not None and cu_q.shape[0] == 1:  # no document at all: as one that is empty
        cu_q, cu_ori = torch.zeros(2, dtype=torch.int32, device=q.device), None
        cu_cmp, q_offsets = (None if x is None else cu_q for x in (cu_cmp, q_offsets))
    how = TENSOR if q_offsets is not None else NUMBER if q_offset is not None or not packed else RIGHT_ALIGNED
    documents = 0 if cu_q is None else cu_q.shape[0] - 1
    cuts = [places if x is None else x.contiguous() for x in (cu_q, cu_q if cu_ori is None else cu_ori, cu_cmp, q_offsets)]
    first, window = within_int32(S2 - S if q_offset is None else q_offset, S, window)
    places_spec(packed, how, cmp_kv is not None).launch(
        (triton.cdiv(rows, BLOCK),), places, *cuts, rows, batch * S2, batch * S3, S, S2, S3, first, window, min(max(cmp_ratio, 1), 2 * FAR - 1),
        documents, documents.bit_length(),
    )  # fmt: skip
    return places
