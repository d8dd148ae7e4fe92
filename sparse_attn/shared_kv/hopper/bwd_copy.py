"""Tasks, copies and the producer of the fused backward for sm_90 (bwd_kernel.py): what is loaded in which order, in parts of the channels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from sparse_attn.shared_kv.hopper.core import copy_heads, copy_layout_for, load_ranges, tile_pointers

BN = gl.constexpr(64)  # keys of a tile


@gluon.constexpr_function
def part_of(D):
    """Channels of a part: a quarter of them, but no less than a row of the swizzle, 64."""
    return max(64, D // 4)


@gluon.constexpr_function
def load_order(i, PARTS):
    """Left and right parts in turn: the two warpgroups that hold dq free them side by side."""
    return (i % 2) * (PARTS // 2) + i // 2


@gluon.jit
def task_of(task, row0, count, places, used, N: gl.constexpr, COMPRESSED: gl.constexpr):
    """Query (counted from row0) and group of heads of a task, its tiles (at least one), its ranges (core.py)."""
    GROUPS: gl.constexpr = (N + 63) // 64
    local = count - 1 - task // GROUPS  # long rows first
    ori_begin, ori_count, cmp_begin, cmp_count, slots = load_ranges(places, used, row0 + local, COMPRESSED)
    ori_tiles = gl.cdiv(ori_count, BN)
    num_tiles = gl.maximum(ori_tiles + gl.cdiv(slots, BN), 1)
    return local, task % GROUPS, num_tiles, (ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots)


@gluon.jit
def copy_tile(
    i, ori_kv, cmp_kv, indices, first_slot, zero, ranges, k_s, k_full, k_empty, phase, D: gl.constexpr, SELECTED: gl.constexpr
):  # fmt: skip
    """The keys of tile i, part after part as they are given back."""
    PART: gl.constexpr = part_of(D)
    PARTS: gl.constexpr = D // PART
    layout: gl.constexpr = copy_layout_for(PART)
    n = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
    ptrs, valid = tile_pointers(ori_kv, cmp_kv, indices, first_slot, i, n, d, ranges, D, SELECTED, BN)
    for j in gl.static_range(PARTS):
        mbarrier.wait(k_empty[load_order(j, PARTS)], phase)
        target = k_s.index(i * zero + load_order(j, PARTS))
        async_copy.async_copy_global_to_shared(target, ptrs + load_order(j, PARTS) * PART, mask=valid)
        async_copy.mbarrier_arrive(k_full[load_order(j, PARTS)], increment_count=False)


@gluon.jit
def producer(
    q, do, out, ori_kv, cmp_kv, indices, places, used, row0, count, tasks, K, zero, q_s, do_s, k_s, q_full, do_full, q_empty, k_full, k_empty,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr,
):  # fmt: skip
    """Warpgroup 3: q, dO and the keys of all tasks. What a query that sees nothing (past the last document of a pack) has in q and dO counts for
    nothing: its output is copied in their place, which is zeros."""
    SELECTED: gl.constexpr = COMPRESSED == 2
    PART: gl.constexpr = part_of(D)
    PARTS: gl.constexpr = D // PART
    phase = 1  # the first wait on an "empty" barrier must pass at once
    q_phase = 1
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        local, group, num_tiles, ranges = task_of(task, row0, count, places, used, N, COMPRESSED)
        row = row0 + local
        first_slot = row.to(gl.int64) * K
        # The first keys need not wait for warpgroup 2, which is the last to leave a task
        copy_tile(0, ori_kv, cmp_kv, indices, first_slot, zero, ranges, k_s, k_full, k_empty, phase, D, SELECTED)
        phase = phase ^ 1
        z = task * zero
        sees = ranges[2] + ranges[5] > 0
        q_or_zeros = gl.where(sees, q, out)
        do_or_zeros = gl.where(sees, do, out)
        for j in gl.static_range(PARTS):
            mbarrier.wait(q_empty[j], q_phase)
            copy_heads(do_or_zeros, row, group, j * PART, do_s, z + j, do_full[j], N, D, PART)
            copy_heads(q_or_zeros, row, group, j * PART, q_s, z + j, q_full[j], N, D, PART)
        q_phase = q_phase ^ 1
        for i in range(1, num_tiles):
            copy_tile(i, ori_kv, cmp_kv, indices, first_slot, zero, ranges, k_s, k_full, k_empty, phase, D, SELECTED)
            phase = phase ^ 1
