"""KL loss on selected slots: the indexer's scores and the main attention's mean weight on each slot of a query.

A task is a query; for the teacher a launch takes one block of heads of all. On a GPU a program has one task, on Ascend as many programs as
cores take them in turn (LOOP). Rows of k and cmp_kv are gathered in tiles of slots, which are the rows of the products; heads are the columns,
so that the sum over heads stays within a few threads. A slot that is not valid reads the query's last visible row in place of its own, which
is cheaper than a mask (were it one row for all queries, they would queue for it). What stands at such a slot, or past the last valid one,
where nothing is written, means nothing: `loss_of_row` reads valid slots alone.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from indexer.core import ASCEND, product, relu, visible
from kernel_runtime.device import grid_size
from kernel_runtime.launch import TRITON_DTYPE, Spec

BLOCK_HEADS = 64
ASCEND_HEADS, ASCEND_SLOTS = 32, 32  # of a tile of the teacher there
LOG2E = tl.constexpr(1.4426950408889634)
SIZES = {"S": "i32", "S3": "i32", "rows": "i32", "q_offset": "i32", "tasks": "i32"}
GPU_TARGETS, NPU_TARGETS = ("cuda", "hip"), ("ascend",)


@triton.jit
def used_slots(indices, row, count, K: tl.constexpr, P: tl.constexpr):
    """1 + the last valid slot of a row, 0 where none is."""
    slot = tl.arange(0, P)
    index = tl.load(indices + row * K + slot, mask=slot < K, other=-1)
    return tl.max(tl.where((index >= 0) & (index < count), slot + 1, 0), 0)


@triton.jit
def scores_of_query(
    task, q, k, weights, indices, span, scores, S, S3, rows, q_offset,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    TABLE: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """scores[row, slot] = sum_h w[h] relu(q[h] . k[slot])."""
    number = rows - 1 - task  # later queries hold more slots and go first
    row = number.to(tl.int64)
    batch = (number // S).to(tl.int64)
    start, count = visible(span, row, number % S, number < rows, rows, S3, q_offset, R, TABLE)
    used = used_slots(indices, row, count, K, P)
    keys = k + (batch * S3 + start) * D
    head = tl.arange(0, HB)
    d = tl.arange(0, DP)
    q_tile = q + row * H * D + head[:, None] * D + d[None, :]
    w_tile = weights + row * H + head
    if HB >= H:
        q_t = tl.trans(tl.load(q_tile, mask=(head < H)[:, None] & (d < D)[None, :], other=0.0))
        w = tl.load(w_tile, mask=head < H, other=0.0).to(tl.float32)
    n = tl.arange(0, BS)
    for j in tl.range(0, used, BS, num_stages=STAGES):
        index = tl.load(indices + row * K + j + n, mask=j + n < K, other=-1)
        on = (index >= 0) & (index < count)
        index = tl.where(on, index, count - 1)
        rows_of_keys = keys + index[:, None] * D + d[None, :]  # 32 bits: the keys of one batch entry have fewer than 2^31 channels
        if ASCEND:  # its older compiler takes no gather without a mask
            block = tl.load(rows_of_keys, mask=on[:, None] & (d < D)[None, :], other=0.0)
        elif D == DP:
            block = tl.load(rows_of_keys)
        else:
            block = tl.load(rows_of_keys, mask=(d < D)[None, :], other=0.0)
        if HB >= H:
            products = product(block, q_t, tl.zeros([BS, HB], tl.float32))
            total = tl.sum(relu(products) * w[None, :], 1)
        else:
            total = tl.zeros([BS], tl.float32)
            for h in range(0, H, HB):
                more = head < H - h
                q_t = tl.trans(tl.load(q_tile + h * D, mask=more[:, None] & (d < D)[None, :], other=0.0))
                w = tl.load(w_tile + h, mask=more, other=0.0).to(tl.float32)
                products = product(block, q_t, tl.zeros([BS, HB], tl.float32))
                total += tl.sum(relu(products) * w[None, :], 1)
        tl.store(scores + row * K + j + n, total, mask=j + n < K)


@triton.jit(do_not_specialize=["S", "S3", "rows", "q_offset", "tasks"])
def slot_scores_kernel(
    q, k, weights, indices, span, scores, S, S3, rows, q_offset, tasks,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    TABLE: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    if LOOP:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            scores_of_query(
                task, q, k, weights, indices, span, scores, S, S3, rows, q_offset, H, HB, D, DP, K, P, R, TABLE, BS, STAGES,
            )  # fmt: skip
    else:
        task = tl.program_id(0)
        scores_of_query(task, q, k, weights, indices, span, scores, S, S3, rows, q_offset, H, HB, D, DP, K, P, R, TABLE, BS, STAGES)


@triton.jit
def slot_logits(
    keys, index, on, q_left, q_right, scale, D: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, BS: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """scale * (q . cmp_kv) [BS, HB] of a tile of slots; D channels in SPLIT pieces of at most C."""
    c = tl.arange(0, C)
    tile = keys + index[:, None] * D + c[None, :]
    if ASCEND | (D != C * SPLIT):
        z = product(tl.load(tile, mask=on[:, None] & (c < D)[None, :], other=0.0), q_left, tl.zeros([BS, HB], tl.float32))
        if SPLIT == 2:
            z = product(tl.load(tile + C, mask=on[:, None] & (C + c < D)[None, :], other=0.0), q_right, z)
    else:
        z = product(tl.load(tile), q_left, tl.zeros([BS, HB], tl.float32))
        if SPLIT == 2:
            z = product(tl.load(tile + C), q_right, z)
    return z * scale


@triton.jit
def teacher_of_query(
    task, q, cmp_kv, lse, indices, span, teacher, scale, h0, S, S3, rows, q_offset,
    N: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, TABLE: tl.constexpr, OWN: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """teacher[row, slot] (+)= sum over a block of heads of exp(z - lse) / N; OWN: lse is that of the row's own slots.

    Blocks of heads after the first (h0 > 0) add to what an earlier launch wrote, so that the order of the sum is fixed.
    """
    number = rows - 1 - task
    row = number.to(tl.int64)
    batch = (number // S).to(tl.int64)
    start, count = visible(span, row, number % S, number < rows, rows, S3, q_offset, R, TABLE)
    used = used_slots(indices, row, count, K, P)
    keys = cmp_kv + (batch * S3 + start) * D
    head = h0 * HB + tl.arange(0, HB)
    c = tl.arange(0, C)
    q_tile = q + row * N * D + head[:, None] * D + c[None, :]
    q_left = tl.trans(tl.load(q_tile, mask=(head < N)[:, None] & (c < D)[None, :], other=0.0))
    q_right = q_left
    if SPLIT == 2:
        q_right = tl.trans(tl.load(q_tile + C, mask=(head < N)[:, None] & (C + c < D)[None, :], other=0.0))
    n = tl.arange(0, BS)
    scale2 = scale * LOG2E
    if OWN:
        top = tl.full([HB], float("-inf"), tl.float32)
        mass = tl.zeros([HB], tl.float32)
        for j in tl.range(0, used, BS, num_stages=STAGES):
            index = tl.load(indices + row * K + j + n, mask=j + n < K, other=-1)
            on = (index >= 0) & (index < count)
            z = slot_logits(keys, tl.where(on, index, count - 1), on, q_left, q_right, scale2, D, C, SPLIT, BS, HB)
            z = tl.where(on[:, None], z, float("-inf"))
            higher = tl.maximum(top, tl.max(z, 0))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            mass = mass * tl.exp2(top - shift) + tl.sum(tl.exp2(z - shift[None, :]), 0)
            top = higher
        lse2 = tl.where(mass > 0.0, top + tl.log2(tl.where(mass > 0.0, mass, 1.0)), float("inf"))
    else:
        lse2 = tl.load(lse + row * N + head, mask=head < N, other=float("-inf")) * LOG2E
    # a head that saw nothing has lse = -inf and gives 0, as does one with lse = +inf
    lse2 = tl.where((head < N) & (lse2 > float("-inf")), lse2, float("inf"))
    for j in tl.range(0, used, BS, num_stages=STAGES):
        index = tl.load(indices + row * K + j + n, mask=j + n < K, other=-1)
        on = (index >= 0) & (index < count)
        z = slot_logits(keys, tl.where(on, index, count - 1), on, q_left, q_right, scale2, D, C, SPLIT, BS, HB)
        into = teacher + row * K + j + n
        before = tl.load(into, mask=(j + n < K) & (h0 > 0), other=0.0)
        tl.store(into, before + tl.sum(tl.exp2(z - lse2[None, :]), 1) / N, mask=j + n < K)


@triton.jit(do_not_specialize=["scale", "h0", "S", "S3", "rows", "q_offset", "tasks"])
def slot_teacher_kernel(
    q, cmp_kv, lse, indices, span, teacher, scale, h0, S, S3, rows, q_offset, tasks,
    N: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, TABLE: tl.constexpr, OWN: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    if LOOP:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            teacher_of_query(
                task, q, cmp_kv, lse, indices, span, teacher, scale, h0, S, S3, rows, q_offset,
                N, HB, D, C, SPLIT, K, P, R, TABLE, OWN, BS, STAGES,
            )  # fmt: skip
    else:
        teacher_of_query(
            tl.program_id(0), q, cmp_kv, lse, indices, span, teacher, scale, h0, S, S3, rows, q_offset,
            N, HB, D, C, SPLIT, K, P, R, TABLE, OWN, BS, STAGES,
        )  # fmt: skip


@cache
def slot_scores_spec(
    dtype: torch.dtype, weights_dtype: torch.dtype, heads: int, dim: int, slots: int, cmp_ratio: int, table: bool, npu: bool = False
) -> Spec:
    wide = dtype == torch.float32
    name = TRITON_DTYPE[dtype]
    return Spec(
        slot_scores_kernel,
        types={
            "q": f"*{name}", "k": f"*{name}", "weights": f"*{TRITON_DTYPE[weights_dtype]}", "indices": "*i32", "span": "*i32",
            "scores": "*fp32",
        } | SIZES,
        consts={
            "H": heads, "HB": max(16, min(16 if wide else BLOCK_HEADS, triton.next_power_of_2(heads))), "D": dim,
            "DP": max(16, triton.next_power_of_2(dim)), "K": slots, "P": max(16, triton.next_power_of_2(slots)), "R": cmp_ratio,
            "TABLE": table, "BS": 32 if wide else 64, "STAGES": 2, "LOOP": npu,
        },
        num_warps=4,
        targets=NPU_TARGETS if npu else GPU_TARGETS,
    )  # fmt: skip


@cache
def slot_teacher_spec(
    dtype: torch.dtype, heads: int, dim: int, slots: int, cmp_ratio: int, table: bool, own: bool, npu: bool = False
) -> Spec:
    name = TRITON_DTYPE[dtype]
    wide = dtype == torch.float32
    padded = triton.next_power_of_2(dim)
    # 64 slots a tile and not 128: two programs then fit a multiprocessor, and one loads while the other multiplies
    block, tile = (ASCEND_HEADS, ASCEND_SLOTS) if npu else (BLOCK_HEADS, 64)
    return Spec(
        slot_teacher_kernel,
        types={"q": f"*{name}", "cmp_kv": f"*{name}", "lse": "*fp32", "indices": "*i32", "span": "*i32", "teacher": "*fp32"}
        | {"scale": "fp32", "h0": "i32"}
        | SIZES,
        consts={
            "N": heads, "HB": 16 if wide else max(16, min(block, triton.next_power_of_2(heads))), "D": dim, "C": min(padded, 256),
            "SPLIT": 2 if padded > 256 else 1, "K": slots, "P": max(16, triton.next_power_of_2(slots)), "R": cmp_ratio, "TABLE": table,
            "OWN": own, "BS": 32 if wide else tile, "STAGES": 1, "LOOP": npu,
        },
        num_warps=4,
        targets=NPU_TARGETS if npu else GPU_TARGETS,
    )  # fmt: skip


def slot_scores(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, span: torch.Tensor | None, cmp_ratio: int, q_offset: int,
    scores: torch.Tensor, npu: bool,
) -> None:  # fmt: skip
    """Into scores, fp32 [.., K] like `indices`; contiguous inputs, span as of `visible_table`. npu: the form for Ascend."""
    heads, dim = q.shape[-2:]
    slots = indices.shape[-1]
    rows = indices.numel() // slots
    spec = slot_scores_spec(q.dtype, weights.dtype, heads, dim, slots, cmp_ratio, span is not None, npu)
    tensors = (q, k, weights, indices, indices if span is None else span, scores)
    spec.launch((grid_size(q.device, rows, npu),), *tensors, q.shape[-3], k.shape[-2], rows, q_offset, rows)


def slot_teacher(
    q: torch.Tensor,
    cmp_kv: torch.Tensor,
    lse: torch.Tensor | None,
    indices: torch.Tensor,
    span: torch.Tensor | None,
    scale: float,
    cmp_ratio: int,
    q_offset: int,
    npu: bool,
) -> torch.Tensor:
    """Mean over heads of exp(z - lse), fp32 [.., K] like `indices`; lse None: of the softmax over the row's own slots."""
    heads, dim = q.shape[-2:]
    slots = indices.shape[-1]
    teacher = torch.empty(indices.shape, dtype=torch.float32, device=q.device)
    rows = indices.numel() // slots
    spec = slot_teacher_spec(q.dtype, heads, dim, slots, cmp_ratio, span is not None, lse is None, npu)
    tensors = (q, cmp_kv, teacher if lse is None else lse, indices, indices if span is None else span, teacher)
    for h0 in range(triton.cdiv(heads, spec.consts["HB"])):
        spec.launch((grid_size(q.device, rows, npu),), *tensors, scale, h0, q.shape[-3], cmp_kv.shape[-2], rows, q_offset, rows)
    return teacher
