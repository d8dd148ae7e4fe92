"""Scores of the lightning indexer for sm_90, in Gluon: the scores of `indexer.lightning.fwd.scores_kernel`, written to the same places.

As there, keys are the rows of the product and queries x heads its columns, here 256 of them (4 queries of 64 heads), so that a head sum stays
within a few threads. A program is a multiprocessor's for the whole launch and goes through tasks, one for each such tile of queries, the
longest first:

    two consumers    a warpgroup each, every second tile of 64 keys of all tasks: one product of 64 x 256, then ReLU, weights and sums while
                     the other one's product runs. 128 registers of the product and 64 of weights a thread
    key producer     two warps: tiles of keys through a ring of STAGES, across tasks, so that the next task's keys come during this one's
    query producer   two warps: queries and weights of the next task into the other one of two buffers

Against the portable kernel keys are read half as often, and no product waits for the beginning of a program.

Barriers. k_full[s]: 64 arrivals, of each producer thread's own copies; k_empty[s]: 1. STAGES is even, so that a slot of the ring is always the same
consumer's and its barriers are waited for by one warpgroup alone. q_full[b]: 64; q_empty[b]: 2, of both consumers, which go through every
task, even through one that has no tile for them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from indexer.core import causal
from kernel_runtime.device import device_properties
from kernel_runtime.launch import TRITON_DTYPE, Spec

COLUMNS = 256  # queries x heads of a tile
BLOCK_KEYS = 64
STAGES = 4
ANY_NAN = gl.constexpr(tl.PropagateNan.ALL)


@gluon.constexpr_function
def copy_layout(D, warps):
    across = min(32, D // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def new_barrier(count: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=count)
    return bar


@gluon.jit
def task_of(task, span, b0, i0, n, S, S3, rows, q_offset, batches, NQ: gl.constexpr, R: gl.constexpr, TABLE: gl.constexpr, W: gl.constexpr):
    """Batch entry (of the chunk), first query (of the chunk), keys [low, high) of a task."""
    tiles = gl.cdiv(n, NQ)
    entry = task % batches
    tile = (tiles - 1 - task // batches) * NQ
    if TABLE:
        local = tile + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [W], [0]))
        on = (local < n) & (local < tile + NQ)
        row = (b0 + entry).to(gl.int64) * S + i0 + local
        start = gl.load(span + row, mask=on, other=0)
        count = gl.load(span + rows + row, mask=on, other=0)
        low = gl.min(gl.where(count > 0, start, S3), 0)
        high = gl.max(gl.where(count > 0, start + count, 0), 0)
        low = gl.minimum(low, high)
    else:
        low = 0
        high = causal(i0 + gl.minimum(tile + NQ, n) - 1, S3, q_offset, R)
    return entry, tile, low, high


@gluon.jit
def copy_k(
    k, span, k_s, k_full, k_empty, b0, i0, n, S, S3, rows, q_offset, batches, tasks,
    D: gl.constexpr, R: gl.constexpr, TABLE: gl.constexpr, NQ: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = copy_layout(D, 2)
    key = gl.arange(0, BK, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    stage = 0
    phase = 1
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        entry, _tile, low, high = task_of(task, span, b0, i0, n, S, S3, rows, q_offset, batches, NQ, R, TABLE, 2)
        k_rows = k + (b0 + entry).to(gl.int64) * S3 * D
        for j in range(low, high, BK):
            for x in gl.static_range(STAGES):
                mbarrier.wait(k_empty[x], phase, pred=stage == x)
            async_copy.async_copy_global_to_shared(k_s.index(stage), k_rows + (j + key)[:, None] * D + d[None, :], mask=(j + key < high)[:, None])
            for x in gl.static_range(STAGES):
                if stage == x:
                    async_copy.mbarrier_arrive(k_full[x], increment_count=False)
            phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def copy_q(
    q, weights, span, q_s, w_s, q_full, q_empty, b0, i0, n, S, S3, rows, q_offset, batches, tasks,
    H: gl.constexpr, D: gl.constexpr, R: gl.constexpr, TABLE: gl.constexpr, NQ: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = copy_layout(D, 2)
    column = gl.arange(0, NQ * H, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    flat = gl.arange(0, NQ * H, layout=gl.BlockedLayout([4], [32], [2], [0]))
    turn = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        entry, tile, _low, _high = task_of(task, span, b0, i0, n, S, S3, rows, q_offset, batches, NQ, R, TABLE, 2)
        first = ((b0 + entry).to(gl.int64) * S + i0 + tile) * H
        left = (n - tile) * H
        phase = ((turn >> 1) & 1) ^ 1
        mbarrier.wait(q_empty[0], phase, pred=(turn & 1) == 0)
        mbarrier.wait(q_empty[1], phase, pred=(turn & 1) == 1)
        async_copy.async_copy_global_to_shared(q_s.index(turn & 1), q + first * D + column[:, None] * D + d[None, :], mask=(column < left)[:, None])
        async_copy.async_copy_global_to_shared(w_s.index(turn & 1), weights + first + flat, mask=flat < left)
        if (turn & 1) == 0:
            async_copy.mbarrier_arrive(q_full[0], increment_count=False)
        else:
            async_copy.mbarrier_arrive(q_full[1], increment_count=False)
        turn += 1  # a compiled loop has no enumerate  # noqa: SIM113


@gluon.jit
def consumer(
    X: gl.constexpr, span, scores, q_s, w_s, k_s, q_full, q_empty, k_full, k_empty, b0, i0, n, S, S3, rows, q_offset, batches, tasks,
    H: gl.constexpr, R: gl.constexpr, TABLE: gl.constexpr, NQ: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = NQ * H
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    zero = gl.zeros([BK, N], gl.float32, layout=s_layout)
    probe = gl.sum(gl.reshape(zero, [BK, NQ, H]), 2)  # for its layout alone
    query = gl.arange(0, NQ, layout=gl.SliceLayout(0, probe.type.layout))
    key = gl.arange(0, BK, layout=gl.SliceLayout(1, probe.type.layout))
    stage = X
    phase = 0
    turn = 0
    before = 0  # tiles of the tasks before
    task = gl.program_id(0)
    while task < tasks:  # in a for loop, Triton's constant propagation takes `before` for 0
        entry, tile, low, high = task_of(task, span, b0, i0, n, S, S3, rows, q_offset, batches, NQ, R, TABLE, 4)
        out = scores + (entry * n + tile).to(gl.int64) * S3
        tiles = gl.cdiv(high - low, BK)
        mbarrier.wait(q_full[0], (turn >> 1) & 1, pred=(turn & 1) == 0)
        mbarrier.wait(q_full[1], (turn >> 1) & 1, pred=(turn & 1) == 1)
        fence_async_shared()
        w = w_s.index(turn & 1).load(gl.SliceLayout(0, s_layout)).to(gl.float32)
        q_t = q_s.index(turn & 1).permute((1, 0))
        local = tile + query
        if TABLE:
            row = (b0 + entry).to(gl.int64) * S + i0 + local
            start = gl.load(span + row, mask=local < n, other=0)
            count = gl.load(span + rows + row, mask=local < n, other=0)
        else:
            start = local * 0
            count = gl.where(local < n, causal(i0 + local, S3, q_offset, R), 0)
        for t in range((before & 1) ^ X, tiles, 2):
            for x in gl.static_range(X, STAGES, 2):
                mbarrier.wait(k_full[x], phase, pred=stage == x)
            fence_async_shared()
            s = warpgroup_mma(k_s.index(stage), q_t, zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            for x in gl.static_range(X, STAGES, 2):
                if stage == x:
                    mbarrier.arrive(k_empty[x], count=1)
            phase = gl.where(stage >= STAGES - 2, phase ^ 1, phase)
            stage = gl.where(stage >= STAGES - 2, X, stage + 2)
            s = gl.maximum(s, 0.0, propagate_nan=ANY_NAN) * w[None, :]
            total = gl.sum(gl.reshape(s, [BK, NQ, H]), 2)
            place = low + t * BK + key
            at = place[:, None] - start[None, :]
            gl.store(out + (query * S3)[None, :] + at, total, mask=(at >= 0) & (at < count[None, :]))
        if (turn & 1) == 0:
            mbarrier.arrive(q_empty[0], count=1)
        else:
            mbarrier.arrive(q_empty[1], count=1)
        task += gl.num_programs(0)
        before += tiles
        turn += 1


@gluon.jit
def new_ring(count: gl.constexpr, STAGES: gl.constexpr):
    if STAGES == 4:
        return (new_barrier(count), new_barrier(count), new_barrier(count), new_barrier(count))
    else:
        return (new_barrier(count), new_barrier(count), new_barrier(count), new_barrier(count), new_barrier(count), new_barrier(count))


@gluon.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset", "batches", "tasks"])
def hopper_scores_kernel(
    q, k, weights, span, scores, b0, i0, n, S, S3, rows, q_offset, batches, tasks,
    H: gl.constexpr, D: gl.constexpr, R: gl.constexpr, TABLE: gl.constexpr, NQ: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q.dtype.element_ty
    q_s = gl.allocate_shared_memory(dtype, [2, NQ * H, D], gl.NVMMASharedLayout.get_default_for([NQ * H, D], dtype))
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BK, D], gl.NVMMASharedLayout.get_default_for([BK, D], dtype))
    w_s = gl.allocate_shared_memory(weights.dtype.element_ty, [2, NQ * H], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = (new_barrier(64), new_barrier(64))
    q_empty = (new_barrier(2), new_barrier(2))
    k_full = new_ring(64, STAGES)
    k_empty = new_ring(1, STAGES)
    gl.warp_specialize(
        [
            (consumer, (
                0, span, scores, q_s, w_s, k_s, q_full, q_empty, k_full, k_empty, b0, i0, n, S, S3, rows, q_offset, batches, tasks,
                H, R, TABLE, NQ, BK, STAGES,
            )),
            (consumer, (
                1, span, scores, q_s, w_s, k_s, q_full, q_empty, k_full, k_empty, b0, i0, n, S, S3, rows, q_offset, batches, tasks,
                H, R, TABLE, NQ, BK, STAGES,
            )),
            (copy_k, (
                k, span, k_s, k_full, k_empty, b0, i0, n, S, S3, rows, q_offset, batches, tasks, D, R, TABLE, NQ, BK, STAGES,
            )),
            (copy_q, (
                q, weights, span, q_s, w_s, q_full, q_empty, b0, i0, n, S, S3, rows, q_offset, batches, tasks, H, D, R, TABLE, NQ,
            )),
        ],
        [4, 2, 2],
        [232, 40, 40],
    )  # fmt: skip


@cache
def hopper_scores_spec(dtype: torch.dtype, weights_dtype: torch.dtype, heads: int, dim: int, cmp_ratio: int, table: bool) -> Spec:
    pointer = f"*{TRITON_DTYPE[dtype]}"
    sizes = ("b0", "i0", "n", "S", "S3", "rows", "q_offset", "batches", "tasks")
    return Spec(
        hopper_scores_kernel,
        types={"q": pointer, "k": pointer, "weights": f"*{TRITON_DTYPE[weights_dtype]}", "span": "*i32", "scores": "*fp32"}
        | dict.fromkeys(sizes, "i32"),
        consts={"H": heads, "D": dim, "R": cmp_ratio, "TABLE": table, "NQ": COLUMNS // heads, "BK": BLOCK_KEYS, "STAGES": STAGES},
        targets=("cuda",),
        arch=90,
    )


def scores_launch(spec: Spec, device: torch.device, n: int, batches: int) -> tuple[tuple[int], int]:
    """Grid and tasks for n queries of each of so many batch entries."""
    tasks = triton.cdiv(n, spec.consts["NQ"]) * batches
    return (min(tasks, device_properties(device).cube_cores),), tasks
