"""Gradients of the scores on selected slots, the backward of the indexer and the second half of its loss.

Of dI on the slots of a query: dS' = dI 1[S > 0] with S = k q^T, dq = w (dS'^T k), dw = rowsum(q (dS'^T k)), dk[slot] += dS' (w q).
dw comes out of the product that dq needs anyway, so that no second sum over slots is held (192 registers against 254). In bf16 dS' is
rounded, an error of 1e-3. A slot counts where its index is in range and its dI is not 0; no other row of k is read.

The rows of dk are summed by atomics in fp32, or deterministically: on a GPU by atomics in whole numbers (`indexer/fixed_point.py`), on Ascend
in a fixed order, where every program writes its rows in the order of their slots, which are sorted, and each key sums those that are its own.
"""

from collections.abc import Iterable, Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from indexer.core import ASCEND, product, visible_of_row
from indexer.fixed_point import MAX_SLOTS, add_units, bounds_spec, make_scales, sum_specs, words_of
from kernel_runtime.device import grid_size, on_npu
from kernel_runtime.launch import TRITON_DTYPE, Spec

BLOCK_HEADS = 64
PARTIAL_BYTES = 1 << 30  # of the rows of dk that wait for their owners, on Ascend


@triton.jit
def weighted_piece(q_rows, place, w, some, first: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """w q: C channels of every head, from `first` on."""
    c = first + tl.arange(0, C)
    piece = tl.load(q_rows + place + c[None, :], mask=some[:, None] & (c < D)[None, :], other=0.0)
    return (piece.to(tl.float32) * w[:, None]).to(q_rows.dtype.element_ty)


@triton.jit
def add_piece(
    out, place, on, ds, piece, peak, scale, stride, first: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BS: tl.constexpr,
    ATOMIC: tl.constexpr, FIXED: tl.constexpr, SHRINK: tl.constexpr,
):  # fmt: skip
    """dS' (w q) of C channels, to the rows of dk at `place` or into rows of their own."""
    c = first + tl.arange(0, C)
    part = product(ds, piece, tl.zeros([BS, C], tl.float32))
    if SHRINK:
        part *= peak
    mask = on[:, None] & (c < D)[None, :]
    if FIXED:
        add_units(out, place, first, on, part, scale, stride, C, BS, piece.dtype == tl.float32)
    elif ATOMIC:
        tl.atomic_add(out + place[:, None] * D + c[None, :], part, mask=mask, sem="relaxed")
    else:
        tl.store(out + place[:, None] * D + c[None, :], part.to(out.dtype.element_ty), mask=mask)


@triton.jit
def kl_terms(x, u, on, mass, counts, total, log_total, MARGINAL: tl.constexpr):
    """Of slots or blocks with scores x, less the row's largest, and the teacher u: the summands of the row's KL, and dI; `on`: which are valid.
    total and its logarithm are the softmax's, mass is the teacher's; counts: whether it is more than 0."""
    p = tl.where(u == mass, 1.0, u / tl.where(counts, mass, 1.0))  # exactly 1 on a single slot; a GPU's division is not
    terms = tl.where(p > 0.0, p * (tl.log(tl.where(p > 0.0, p, 1.0)) - tl.where(on, x, 0.0) + log_total), 0.0)
    predicted = tl.exp(x) / total
    if MARGINAL:
        gradient = mass * predicted - u
    else:
        gradient = predicted - p
    return terms, tl.where(on, tl.where(counts, gradient, 0.0), 0.0)


@triton.jit
def gradients_of_query(
    q, k, weights, indices, dscores, span, dq, dk, owners, scales, dweights, row, local, h0, S, S3, stride,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, P: tl.constexpr, TABLE: tl.constexpr,
    ATOMIC: tl.constexpr, FIXED: tl.constexpr, SHRINK: tl.constexpr, BS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    LOSS: tl.constexpr = False, teacher=None, loss=None, counted=None, rows=0, q_offset=0, MARGINAL: tl.constexpr = False, R: tl.constexpr = 1,
):  # fmt: skip
    """HB heads of query `row`, the `local`-th of a piece. dk is the sum [B, S3, D] (ATOMIC), in fp32 or, FIXED, in rows of `stride` words
    of `indexer.fixed_point`; or rows of their own, [queries, K, D], whose keys go into owners [queries, K], -1 where a row adds to none.
    Offsets within a query's slots, a batch entry's keys and a piece's rows fit 32 bits.

    LOSS: dscores holds the scores; dI is made of them and the teacher where it is needed, and the row's KL goes into loss and counted.
    """
    batch = row // S
    start = 0
    if TABLE:
        start = tl.load(span + row)
    first = batch * S3 + start
    length = S3 - start
    slot = tl.arange(0, P)
    listed = tl.load(indices + row * K + slot, mask=slot < K, other=-1)
    if LOSS:
        _, length = visible_of_row(span, row, (row % S).to(tl.int32), rows, S3, q_offset, R, TABLE)
        valid = (slot < K) & (listed >= 0) & (listed < length)
        x = tl.load(dscores + row * K + slot, mask=valid, other=float("-inf"))
        u = tl.load(teacher + row * K + slot, mask=valid, other=0.0)
        mass = tl.sum(u, 0)
        row_counts = mass > 0.0
        top = tl.where(row_counts, tl.max(x, 0), 0.0)
        total = tl.sum(tl.exp(x - top), 0)
        total = tl.where(total > 0.0, total, 1.0)
        terms, every = kl_terms(x - top, u, valid, mass, row_counts, total, tl.log(total), MARGINAL)
        value = tl.sum(terms, 0)
        if MARGINAL:
            value *= mass
        if tl.program_id(1) == 0:
            tl.store(loss + row, tl.where(row_counts, value, 0.0))
            tl.store(counted + row, row_counts.to(tl.int32))
        counts = tl.where(row_counts, valid, False)
    else:
        every = tl.load(dscores + row * K + slot, mask=(slot < K) & (listed >= 0) & (listed < length), other=0.0).to(tl.float32)
        counts = every != 0.0
    used = tl.max(tl.where(counts, slot + 1, 0), 0)
    spare = tl.max(tl.where(counts, listed, 0), 0)  # a row that is read anyway, in place of those of slots that do not count
    peak = 1.0
    if SHRINK:  # dI is held between -1 and 1, so that fp16 neither overflows nor loses small gradients
        peak = tl.maximum(tl.max(tl.abs(every), 0), 1.1754943508222875e-38)  # 2^-126: the reciprocal of less may be infinite
        shrink = 1.0 / peak
    if not ATOMIC:
        owner = tl.where(counts, listed + first.to(tl.int32), -1)
        tl.store(owners + local.to(tl.int64) * K + slot, owner.to(owners.dtype.element_ty), mask=slot < K)

    head = (h0 + tl.program_id(1)) * HB + tl.arange(0, HB)
    d = tl.arange(0, DP)
    some = head < H
    C: tl.constexpr = DP // PARTS
    q_rows = q + row * H * D
    place = head[:, None] * D
    q_t = tl.trans(tl.load(q_rows + place + d[None, :], mask=some[:, None] & (d < D)[None, :], other=0.0))
    w = tl.load(weights + row * H + head, mask=some, other=0.0).to(tl.float32)
    piece0 = weighted_piece(q_rows, place, w, some, 0, D, C)
    if PARTS >= 2:
        piece1 = weighted_piece(q_rows, place, w, some, C, D, C)
    if PARTS == 4:
        piece2 = weighted_piece(q_rows, place, w, some, 2 * C, D, C)
        piece3 = weighted_piece(q_rows, place, w, some, 3 * C, D, C)
    k_rows = k + first * D
    out = dk
    if FIXED:
        out += first * stride
    elif ATOMIC:
        out += first * D
    else:
        out += local.to(tl.int64) * K * D
    sums = tl.zeros([HB, DP], tl.float32)
    n = tl.arange(0, BS)
    for j in tl.range(0, used, BS, num_stages=STAGES):
        index = tl.load(indices + row * K + j + n, mask=j + n < K, other=-1)
        # with no mask that waits for the index; the gradient of a slot that does not count may be anything
        grad = tl.load(dscores + row * K + j + n, mask=j + n < K, other=0.0).to(tl.float32)
        on = (index >= 0) & (index < length)
        if LOSS:
            goal = tl.load(teacher + row * K + j + n, mask=j + n < K, other=0.0)
            _terms, grad = kl_terms(grad - top, goal, on, mass, row_counts, total, 0.0, MARGINAL)
        else:
            on = on & (grad != 0.0)
            grad = tl.where(on, grad, 0.0)
        if SHRINK:
            grad *= shrink
        index = tl.where(on, index, spare)
        if ATOMIC:
            here = index
        else:
            here = j + n
        if ASCEND:  # its older compiler takes no gather without a mask
            block = tl.load(k_rows + index[:, None] * D + d[None, :], mask=on[:, None] & (d < D)[None, :], other=0.0)
        elif D == DP:
            block = tl.load(k_rows + index[:, None] * D + d[None, :])
        else:
            block = tl.load(k_rows + index[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        s = product(block, q_t, tl.zeros([BS, HB], tl.float32))
        ds = tl.where(s > 0.0, grad[:, None], 0.0).to(block.dtype)
        scale = 1.0
        if FIXED:
            scale = tl.load(scales + first + index)
        add_piece(out, here, on, ds, piece0, peak, scale, stride, 0, D, C, BS, ATOMIC, FIXED, SHRINK)
        if PARTS >= 2:
            add_piece(out, here, on, ds, piece1, peak, scale, stride, C, D, C, BS, ATOMIC, FIXED, SHRINK)
        if PARTS == 4:
            add_piece(out, here, on, ds, piece2, peak, scale, stride, 2 * C, D, C, BS, ATOMIC, FIXED, SHRINK)
            add_piece(out, here, on, ds, piece3, peak, scale, stride, 3 * C, D, C, BS, ATOMIC, FIXED, SHRINK)
        sums = product(tl.trans(ds), block, sums)
    if SHRINK:
        sums *= peak
    again = tl.load(q_rows + place + d[None, :], mask=(head < H)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    tl.store(dweights + row * H + head, tl.sum(again * sums, 1), mask=head < H)
    tl.store(dq + row * H * D + place + d[None, :], (sums * w[:, None]).to(dq.dtype.element_ty), mask=(head < H)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["r0", "h0", "S", "S3", "stride"])
def gradients_kernel(
    q, k, weights, indices, dscores, span, dq, dk, owners, scales, dweights, r0, h0, S, S3, stride,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, P: tl.constexpr, TABLE: tl.constexpr,
    ATOMIC: tl.constexpr, FIXED: tl.constexpr, SHRINK: tl.constexpr, BS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program a query and block of heads."""
    row = (r0 + tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # later queries hold more slots and go first
    local = tl.num_programs(0) - 1 - tl.program_id(0)
    gradients_of_query(
        q, k, weights, indices, dscores, span, dq, dk, owners, scales, dweights, row, local, h0, S, S3, stride,
        H, HB, D, DP, K, P, TABLE, ATOMIC, FIXED, SHRINK, BS, PARTS, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["r0", "h0", "S", "S3", "stride", "tasks"])
def gradients_ascend_kernel(
    q, k, weights, indices, dscores, span, dq, dk, owners, scales, dweights, r0, h0, S, S3, stride, tasks,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, P: tl.constexpr, TABLE: tl.constexpr,
    ATOMIC: tl.constexpr, FIXED: tl.constexpr, SHRINK: tl.constexpr, BS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program works through queries; the grid's second size is 1. Partial rows alone: Ascend would add element by element."""
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        local = tasks - 1 - task
        gradients_of_query(
            q, k, weights, indices, dscores, span, dq, dk, owners, scales, dweights, (r0 + local).to(tl.int64), local, h0, S, S3,
            stride,
            H, HB, D, DP, K, P, TABLE, ATOMIC, FIXED, SHRINK, BS, PARTS, STAGES,
        )  # fmt: skip


@triton.jit
def sum_of_owner(partial, order, offsets, dk, s, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr):
    """dk[s] += the partial rows in the list of key s, in the order of the list."""
    begin = tl.load(offsets + s)
    end = tl.load(offsets + s + 1)
    d = tl.arange(0, DP)
    n = tl.arange(0, BR)
    total = tl.zeros([BR, DP], tl.float32)
    for j in tl.range(begin, end, BR, num_stages=3):  # loads that feed no product are pipelined only where a loop says so
        place = tl.load(order + j + n, mask=j + n < end, other=0)
        rows = tl.load(partial + place[:, None] * D + d[None, :], mask=(j + n < end)[:, None] & (d < D)[None, :], other=0.0)
        total += rows.to(tl.float32)
    out = dk + s.to(tl.int64) * D + d
    tl.store(out, tl.load(out, mask=d < D, other=0.0) + tl.sum(total, 0), mask=d < D)


@triton.jit(do_not_specialize=["tasks"])
def owner_sum_ascend_kernel(partial, order, offsets, dk, tasks, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr):
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        sum_of_owner(partial, order, offsets, dk, tasks - 1 - task, D, DP, BR)


@cache
def gradients_spec(
    dtype: torch.dtype, weights_dtype: torch.dtype, heads: int, dim: int, topk: int, table: bool, deterministic: bool, npu: bool = False
) -> Spec:
    """deterministic: dk in whole numbers on a GPU, in rows of their own on Ascend."""
    name = TRITON_DTYPE[dtype]
    padded = max(16, triton.next_power_of_2(dim))
    wide = dtype == torch.float32 or npu
    parts = 1 if padded < 128 else 2 if wide else 4  # small pieces need few registers, and little shared memory to be turned in
    return Spec(
        gradients_ascend_kernel if npu else gradients_kernel,
        types={
            "q": f"*{name}", "k": f"*{name}", "weights": f"*{TRITON_DTYPE[weights_dtype]}", "indices": "*i32", "dscores": "*fp32",
            "span": "*i32", "dq": f"*{name}", "dk": f"*{name}" if npu else "*i64" if deterministic else "*fp32",
            "owners": "*i32", "scales": "*fp32", "dweights": "*fp32",
            **dict.fromkeys(("r0", "h0", "S", "S3", "stride"), "i32"), **({"tasks": "i32"} if npu else {}),
        },
        consts={
            "H": heads, "HB": max(16, min(BLOCK_HEADS, triton.next_power_of_2(heads))), "D": dim, "DP": padded, "K": topk,
            "P": max(16, triton.next_power_of_2(topk)), "TABLE": table, "ATOMIC": not npu, "FIXED": deterministic and not npu,
            "SHRINK": dtype == torch.float16,
            "BS": 32 if dtype == torch.float32 else 64, "PARTS": parts, "STAGES": 2 if npu else 1,
        },
        num_warps=4,
        # three programs on a multiprocessor instead of two, for a few registers that are spilled outside the loop
        options={"maxnreg": 168},
        targets=("ascend",) if npu else ("cuda", "hip"),
    )  # fmt: skip


@cache
def owner_sum_spec(dtype: torch.dtype, dim: int) -> Spec:
    types = {"partial": f"*{TRITON_DTYPE[dtype]}", "order": "*i64", "offsets": "*i64", "dk": "*fp32", "tasks": "i32"}
    consts = {"D": dim, "DP": max(16, triton.next_power_of_2(dim)), "BR": 32}
    return Spec(owner_sum_ascend_kernel, types=types, consts=consts, targets=("ascend",))


def gradient_specs(
    dtype: torch.dtype, weights_dtypes: Iterable[torch.dtype], heads: int, dim: int, topk: int, table: bool
) -> Iterator[Spec]:
    """All that `slot_gradients` can launch."""
    for weights in weights_dtypes:
        for deterministic, npu in ((False, False), (True, False), (True, True)):
            yield gradients_spec(dtype, weights, heads, dim, topk, table, deterministic, npu)
        yield bounds_spec(dtype, weights, heads, dim, topk, table)
    yield from sum_specs(dtype, dim)
    yield owner_sum_spec(dtype, dim)


def slot_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    dscores: torch.Tensor,
    span: torch.Tensor | None,
    deterministic: bool,
    npu: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq in the dtype of q, dk and dweights in fp32. Contiguous inputs; dscores fp32 like indices [.., K]; span as of `visible_table`.

    On an NPU the sum is always the deterministic one. npu: see `on_npu`.
    """
    npu = on_npu(q.device, npu)
    heads, dim = q.shape[-2:]
    topk = indices.shape[-1]
    batch, queries = (1, q.shape[0]) if q.dim() == 3 else q.shape[:2]
    keys, rows = k.shape[-2], batch * queries
    dq = torch.empty_like(q)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    dweights = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    if not rows or not topk or not keys:
        return dq.zero_(), dk, dweights.zero_()
    spec = gradients_spec(q.dtype, weights.dtype, heads, dim, topk, span is not None, deterministic or npu, npu)
    blocks = triton.cdiv(heads, spec.consts["HB"])
    every = batch * keys
    tensors = (q, k, weights, indices, dscores, indices if span is None else span, dq)
    if npu:
        _sum_by_owners(spec, tensors, dk, dweights, blocks, rows)
    elif deterministic:
        length = max(1, min(rows, MAX_SLOTS // (topk * blocks)))
        for r0 in range(0, rows, length):  # all at once but for half a million queries
            some = min(length, rows - r0)
            words = torch.zeros(every, words_of(q.dtype, dim), dtype=torch.int64, device=q.device)
            scales = make_scales(q, weights, indices, dscores, span, r0, some, queries, keys, every)
            spec.launch((some, blocks), *tensors, words, indices, scales, dweights, r0, 0, queries, keys, words.shape[1])
            sum_specs(q.dtype, dim)[1].launch((every,), words, scales, dk)
    else:
        spec.launch((rows, blocks), *tensors, dk, indices, dweights, dweights, 0, 0, queries, keys, dim)
    return dq, dk, dweights


def _sum_by_owners(
    spec: Spec, tensors: tuple[torch.Tensor, ...], dk: torch.Tensor, dweights: torch.Tensor, blocks: int, rows: int
) -> None:
    """The form for Ascend: a launch for each block of heads and piece of queries, whose rows of dk take PARTIAL_BYTES at most."""
    q, k, _, indices = tensors[:4]
    dim, topk, keys = q.shape[-1], indices.shape[-1], k.shape[-2]
    every = dk.numel() // dim
    length = min(rows, max(1, PARTIAL_BYTES // (topk * dim * q.element_size())))
    partial = torch.empty(length * topk, dim, dtype=q.dtype, device=q.device)
    owners = torch.empty(length * topk, dtype=torch.int32, device=q.device)
    bounds = torch.arange(every + 1, dtype=torch.int32, device=q.device)
    for r0 in range(0, rows, length):
        some = min(length, rows - r0)
        for h0 in range(blocks):  # whose rows have the same keys
            sizes = (r0, h0, q.shape[-3], keys, dim, some)
            spec.launch((grid_size(q.device, some, True), 1), *tensors, partial, owners, dweights, dweights, *sizes)
            if h0 == 0:
                lists, order = owners[: some * topk].sort(stable=True)
                ends = torch.searchsorted(lists, bounds)
            grid = (grid_size(q.device, every, True, vector=True),)
            owner_sum_spec(q.dtype, dim).launch(grid, partial, order, ends, dk, every)
