"""Fused backward for sm_90 in Gluon: a task is one query and 64 of its heads; a program works through many, four warpgroups, tiles of 32.

    warpgroup 0   S = q K^T, P;         left half of dq   (two 64 x 128 fp32 accumulators at D = 512)
    warpgroup 1   dP = dO K^T, dZ;      right half of dq
    warpgroup 2   dKV^T = q^T dZ + dO^T P, in chunks [64 channels, 32 keys]; q and dO are transposed A operands straight from shared
                  memory; the next chunk is issued before the last one is written out
    warpgroup 3   gathers q, dO, then the keys with cp.async: a ring of two tiles of two halves [32 keys, D / 2 channels]

S and dP of the next tile are issued before dq of this one, so the tensor cores have work while P and dZ are made. On the last tile that
look-ahead runs on stale keys (the wait is predicated off) and its result is dropped.

dKV leaves in one of two forms:
    fast            vector additions into fp32 [keys, D] (red.v4, 256-byte segments). Not bit-stable.
    deterministic   16-bit partial rows [groups of heads, queries, slots, D], no atomics; then owner_sum.py

Shared memory at D = 512, 210 or 216 KB: q 64, dO 64, keys 64, P and dZ double buffered 16, layout change of a dKV chunk 2 or 8.

With LOOP (see bwd.py) the grid is as large as the device, and the first keys of the next task arrive while the last one is finished. dq is staged in
the keys' ring, the left half of D in the left halves of both tiles, so q and dO can be filled again as soon as warpgroup 2 has read them.

Barriers. b is the tile's parity; half tile i is D half i // 2, tile i % 2 of the ring.
    q_full[2], do_full[2], k_full[4]   128 arrivals: each producer thread's own cp.async group
    q_empty              3 arrivals, when each consumer has read q and dO for the last time in a task
    k_empty[4]           1 arrival, from the warpgroup whose half of dq it is. Both halves are also read for S and dP, but that warpgroup's
                         dq needs dZ, which needs both.
    p_full[2], z_full[2]       by warpgroup 0 / 1
    p_empty[2], z_empty[2]     2 arrivals: the other of the two warpgroups, and warpgroup 2
Fences and keys that do not count: as in fwd.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from sparse_attn.shared_kv.hopper.core import copy_layout_for, load_ranges, new_barrier, tile_keys
from sparse_attn.shared_kv.hopper.fwd import copy_heads, store_heads


@gluon.jit
def task_of(task, row0, count, places, used, N: gl.constexpr, COMPRESSED: gl.constexpr, BN: gl.constexpr):
    """Query (counted from row0) and group of heads of a task, its pairs of tiles (at least one) and its ranges."""
    GROUPS: gl.constexpr = (N + 63) // 64
    local = count - 1 - task // GROUPS  # long rows first
    ori_begin, ori_count, cmp_begin, cmp_count, slots = load_ranges(places, used, row0 + local, COMPRESSED)
    ori_tiles = gl.cdiv(ori_count, BN)
    num_pairs = gl.maximum(gl.cdiv(ori_tiles + gl.cdiv(slots, BN), 2), 1)
    return local, task % GROUPS, num_pairs, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots


@gluon.jit
def copy_pair(
    i, ori_kv, cmp_kv, indices, first_slot, zero, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots, k_s, k_full, k_empty, phase,
    D: gl.constexpr, SELECTED: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    DH: gl.constexpr = D // 2
    layout: gl.constexpr = copy_layout_for(DH)
    n = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, DH, layout=gl.SliceLayout(0, layout))
    for b in gl.static_range(2):
        z = (2 * i + b) * zero
        key, valid = tile_keys(indices, first_slot, 2 * i + b, n, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots, SELECTED, BN)
        keys = ori_kv if 2 * i + b < ori_tiles else cmp_kv
        ptrs = keys + key.to(gl.int64)[:, None] * D + d[None, :]
        for half in gl.static_range(2):
            mbarrier.wait(k_empty[2 * half + b], phase)
            async_copy.async_copy_global_to_shared(k_s.index(z + 2 * half + b), ptrs + half * DH, mask=valid[:, None])
            async_copy.mbarrier_arrive(k_full[2 * half + b], increment_count=False)


@gluon.jit
def producer(
    q, do, ori_kv, cmp_kv, indices, places, used, row0, count, tasks, K, zero, q_s, do_s, k_s, q_full, do_full, q_empty, k_full, k_empty,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, BN: gl.constexpr, LOOP: gl.constexpr,
):  # fmt: skip
    SELECTED: gl.constexpr = COMPRESSED == 2
    phase = 1  # the first wait on an "empty" barrier must pass at once
    q_phase = 1
    for task in range(gl.program_id(0), tasks if LOOP else gl.program_id(0) + 1, gl.num_programs(0) if LOOP else 1):
        local, group, num_pairs, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots = task_of(
            task, row0, count, places, used, N, COMPRESSED, BN
        )
        row = row0 + local
        first_slot = row.to(gl.int64) * K
        # The first keys need not wait for warpgroup 2, which is the last to leave a task
        copy_pair(
            0, ori_kv, cmp_kv, indices, first_slot, zero, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots, k_s, k_full, k_empty,
            phase, D, SELECTED, BN,
        )  # fmt: skip
        phase = phase ^ 1
        mbarrier.wait(q_empty, q_phase)
        copy_heads(q, row, group, q_s, q_full, zero, N, D)
        copy_heads(do, row, group, do_s, do_full, zero, N, D)
        q_phase = q_phase ^ 1
        for i in range(1, num_pairs):
            copy_pair(
                i, ori_kv, cmp_kv, indices, first_slot, zero, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots, k_s, k_full,
                k_empty, phase, D, SELECTED, BN,
            )  # fmt: skip
            phase = phase ^ 1


@gluon.jit
def dq_consumer(
    X: gl.constexpr, dq, vec, indices, places, used, row0, count, tasks, K, zero, scale, a_s, k_s, staging, p_s, z_s,
    a_full, q_empty, k_full, k_empty, p_full, p_empty, z_full, z_empty,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, BN: gl.constexpr, LOOP: gl.constexpr,
):  # fmt: skip
    # X = 0: S, P and the left half of dq (a_s = q, vec = lse).
    # X = 1: dP, dZ and the right half of dq (a_s = dO, vec = delta).
    DQ: gl.constexpr = D // 4
    dtype: gl.constexpr = dq.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    # Two accumulators: with 512 threads ptxas compiles under 128 registers and rejects one m64n256.
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
    s_zero = gl.zeros([64, BN], gl.float32, layout=s_layout)
    phase = 0
    q_phase = 0
    for task in range(gl.program_id(0), tasks if LOOP else gl.program_id(0) + 1, gl.num_programs(0) if LOOP else 1):
        local, group, num_pairs, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots = task_of(
            task, row0, count, places, used, N, COMPRESSED, BN
        )
        row = row0 + local
        first_slot = row.to(gl.int64) * K
        h = group * 64 + gl.arange(0, 64, layout=s_rows)
        if X == 0:
            # a padded head gets an LSE of +inf, so P = 0
            v = gl.load(vec + row.to(gl.int64) * N + h, mask=h < N, other=float("inf")) * 1.4426950408889634
        else:
            v = gl.load(vec + row.to(gl.int64) * N + h, mask=h < N, other=0.0)
        acc0 = gl.zeros([64, DQ], gl.float32, layout=dq_layout)
        acc1 = gl.zeros([64, DQ], gl.float32, layout=dq_layout)
        z = task * zero
        mbarrier.wait(a_full[0], q_phase)
        mbarrier.wait(a_full[1], q_phase)
        mbarrier.wait(k_full[0], phase)
        mbarrier.wait(k_full[2], phase)
        fence_async_shared()
        s = warpgroup_mma(a_s.index(z), k_s.index(z).permute((1, 0)), s_zero, use_acc=False, is_async=True)
        s = warpgroup_mma(a_s.index(z + 1), k_s.index(z + 2).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        for i in range(num_pairs):
            more_pairs = i + 1 < num_pairs
            for b in gl.static_range(2):
                # Opaque zero, as in the forward. The loop is unrolled by two (static phases), so z depends on b too.
                z = (2 * i + b) * zero
                if b == 0:
                    next_phase = phase
                    more = num_pairs > 0
                else:
                    next_phase = phase ^ 1
                    more = more_pairs
                if X == 0:
                    _, valid = tile_keys(
                        indices,
                        first_slot,
                        2 * i + b,
                        n,
                        ori_tiles,
                        ori_begin,
                        ori_count,
                        cmp_begin,
                        cmp_count,
                        slots,
                        COMPRESSED == 2,
                        BN,
                    )
                    p = gl.exp2(s * (scale * 1.4426950408889634) - v[:, None])
                    p = gl.where(valid[None, :], p, 0.0)
                    mbarrier.wait(p_empty[b], phase ^ 1)
                    p_s[b].store(p.to(dtype))
                    fence_async_shared()
                    mbarrier.arrive(p_full[b], count=1)
                mbarrier.wait(k_full[1 - b], next_phase, pred=more)
                mbarrier.wait(k_full[3 - b], next_phase, pred=more)
                fence_async_shared()
                s_next = warpgroup_mma(a_s.index(z), k_s.index(z + 1 - b).permute((1, 0)), s_zero, use_acc=False, is_async=True)
                s_next = warpgroup_mma(a_s.index(z + 1), k_s.index(z + 3 - b).permute((1, 0)), s_next, is_async=True)
                if X == 0:
                    mbarrier.wait(z_full[b], phase)
                else:
                    mbarrier.wait(p_full[b], phase)
                    p = p_s[b].load(s_layout).to(gl.float32)
                    mbarrier.arrive(p_empty[b], count=1)
                    dz = p * (s - v[:, None]) * scale
                    mbarrier.wait(z_empty[b], phase ^ 1)
                    z_s[b].store(dz.to(dtype))
                    fence_async_shared()
                    mbarrier.arrive(z_full[b], count=1)
                acc0_next = warpgroup_mma(z_s[b], k_s.index(z + 2 * X + b).slice(0, DQ, dim=1), acc0, is_async=True)
                acc1_next = warpgroup_mma(z_s[b], k_s.index(z + 2 * X + b).slice(DQ, DQ, dim=1), acc1, is_async=True)
                s, acc0, acc1 = warpgroup_mma_wait(0, deps=[s_next, acc0_next, acc1_next])
                if more_pairs:
                    mbarrier.arrive(k_empty[2 * X + b], count=1)
                if X == 0:
                    mbarrier.arrive(z_empty[b], count=1)
            phase = phase ^ 1
        mbarrier.arrive(q_empty, count=1)
        # Stage dq in this warpgroup's halves of the last two tiles and only then give them back. The other warpgroup has read them for all
        # but its look-ahead, whose result is dropped.
        staged = staging.index(num_pairs * zero + X)
        staged.slice(0, DQ, dim=1).store(acc0.to(dtype))
        staged.slice(DQ, DQ, dim=1).store(acc1.to(dtype))
        store_heads(dq, staged, row, group, X, N, D)
        mbarrier.arrive(k_empty[2 * X], count=1)
        mbarrier.arrive(k_empty[2 * X + 1], count=1)
        q_phase = q_phase ^ 1


@gluon.jit
def issue_chunk(c: gl.constexpr, z, q_s, do_s, p_b, z_b, v_zero, D: gl.constexpr):
    # dKV^T of 64 channels; one half of D holds D / 128 chunks
    half: gl.constexpr = c // (D // 128)
    start: gl.constexpr = (c % (D // 128)) * 64
    v = warpgroup_mma(q_s.index(z + half).slice(start, 64, dim=1).permute((1, 0)), z_b, v_zero, use_acc=False, is_async=True)
    v = warpgroup_mma(do_s.index(z + half).slice(start, 64, dim=1).permute((1, 0)), p_b, v, is_async=True)
    return v


@gluon.jit
def dkv_consumer(
    dori, dcmp, indices, places, used, row0, count, tasks, K, ori_slots, cmp_slots, zero, q_s, do_s, p_s, z_s, q_full, do_full, q_empty,
    p_full, p_empty, z_full, z_empty,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, BN: gl.constexpr, PARTIAL: gl.constexpr, LOOP: gl.constexpr,
):  # fmt: skip
    CHUNKS: gl.constexpr = D // 64
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    v_zero = gl.zeros([64, BN], gl.float32, layout=v_layout)
    # 16 bytes a thread and whole segments a key: 256 B of fp32 (the atomics get 1.13x faster than from the layout of the product, which
    # gives 32 B), 128 B of 16-bit rows.
    if PARTIAL:
        out_layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    else:
        out_layout: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    d = gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, out_layout))
    phase = 0
    q_phase = 0
    for task in range(gl.program_id(0), tasks if LOOP else gl.program_id(0) + 1, gl.num_programs(0) if LOOP else 1):
        local, group, num_pairs, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots = task_of(
            task, row0, count, places, used, N, COMPRESSED, BN
        )
        first_slot = (row0 + local).to(gl.int64) * K
        part = group.to(gl.int64) * count + local
        for half in gl.static_range(2):
            mbarrier.wait(q_full[half], q_phase)
        for half in gl.static_range(2):
            mbarrier.wait(do_full[half], q_phase)
        for i in range(num_pairs):
            for b in gl.static_range(2):
                tile = 2 * i + b
                z = tile * zero
                key, valid = tile_keys(
                    indices, first_slot, tile, n, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots, COMPRESSED == 2, BN
                )
                target = dori if tile < ori_tiles else dcmp
                if PARTIAL:
                    first = part * ori_slots + tile * BN if tile < ori_tiles else part * cmp_slots + (tile - ori_tiles) * BN
                    ptrs = target + (first + n)[None, :] * D + d[:, None]
                else:
                    ptrs = target + key.to(gl.int64)[None, :] * D + d[:, None]
                mbarrier.wait(p_full[b], phase)
                mbarrier.wait(z_full[b], phase)
                fence_async_shared()
                current = issue_chunk(0, z, q_s, do_s, p_s[b], z_s[b], v_zero, D)
                for c in gl.static_range(CHUNKS):
                    if c < CHUNKS - 1:
                        upcoming = issue_chunk(c + 1, z, q_s, do_s, p_s[b], z_s[b], v_zero, D)
                        v = warpgroup_mma_wait(2, deps=[current])  # two products a chunk: those of `upcoming` may run on
                        current = upcoming
                    else:
                        v = warpgroup_mma_wait(0, deps=[current])
                        mbarrier.arrive(p_empty[b], count=1)
                        mbarrier.arrive(z_empty[b], count=1)
                        if (b == 1) & (i + 1 == num_pairs):
                            mbarrier.arrive(q_empty, count=1)
                    if PARTIAL:
                        gl.store(ptrs + c * 64, gl.convert_layout(v.to(dori.dtype.element_ty), out_layout), mask=valid[None, :])
                    else:
                        gl.atomic_add(ptrs + c * 64, gl.convert_layout(v, out_layout), mask=valid[None, :], sem="relaxed")
            phase = phase ^ 1
        q_phase = q_phase ^ 1


@gluon.jit(do_not_specialize=["row0", "count", "tasks", "K", "ori_slots", "cmp_slots", "zero", "scale"])
def hopper_bwd_kernel(
    q, ori_kv, cmp_kv, indices, places, used, do, lse, delta, dq, dori, dcmp, row0, count, tasks, K, ori_slots, cmp_slots, zero, scale,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, BN: gl.constexpr, PARTIAL: gl.constexpr, LOOP: gl.constexpr,
):  # fmt: skip
    """Queries row0 to row0 + count - 1. PARTIAL: dori [groups, count, ori_slots, D] and dcmp [groups, count, cmp_slots, D]."""
    DH: gl.constexpr = D // 2
    dtype: gl.constexpr = q.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DH], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DH], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BN], dtype)
    q_s = gl.allocate_shared_memory(dtype, [2, 64, DH], a_layout)
    do_s = gl.allocate_shared_memory(dtype, [2, 64, DH], a_layout)
    k_s = gl.allocate_shared_memory(dtype, [4, BN, DH], k_layout)
    staging = k_s._reinterpret(dtype, [2, 64, DH], a_layout)
    p_s = (gl.allocate_shared_memory(dtype, [64, BN], p_layout), gl.allocate_shared_memory(dtype, [64, BN], p_layout))
    z_s = (gl.allocate_shared_memory(dtype, [64, BN], p_layout), gl.allocate_shared_memory(dtype, [64, BN], p_layout))
    q_full = (new_barrier(128), new_barrier(128))
    do_full = (new_barrier(128), new_barrier(128))
    q_empty = new_barrier(3)
    k_full = (new_barrier(128), new_barrier(128), new_barrier(128), new_barrier(128))
    k_empty = (new_barrier(1), new_barrier(1), new_barrier(1), new_barrier(1))
    p_full = (new_barrier(1), new_barrier(1))
    p_empty = (new_barrier(2), new_barrier(2))
    z_full = (new_barrier(1), new_barrier(1))
    z_empty = (new_barrier(2), new_barrier(2))
    # Register split: 16 warps start at 128 each. [192, 80, 48] for warpgroups 1, 2, 3 leaves 192 to warpgroup 0: the two that hold dq need
    # it (184 instead of 192 costs 20 % by spills).
    gl.warp_specialize(
        [
            (dq_consumer, (
                0, dq, lse, indices, places, used, row0, count, tasks, K, zero, scale, q_s, k_s, staging, p_s, z_s,
                q_full, q_empty, k_full, k_empty, p_full, p_empty, z_full, z_empty, N, D, COMPRESSED, BN, LOOP,
            )),
            (dq_consumer, (
                1, dq, delta, indices, places, used, row0, count, tasks, K, zero, scale, do_s, k_s, staging, p_s, z_s,
                do_full, q_empty, k_full, k_empty, p_full, p_empty, z_full, z_empty, N, D, COMPRESSED, BN, LOOP,
            )),
            (dkv_consumer, (
                dori, dcmp, indices, places, used, row0, count, tasks, K, ori_slots, cmp_slots, zero, q_s, do_s, p_s, z_s,
                q_full, do_full, q_empty, p_full, p_empty, z_full, z_empty, N, D, COMPRESSED, BN, PARTIAL, LOOP,
            )),
            (producer, (
                q, do, ori_kv, cmp_kv, indices, places, used, row0, count, tasks, K, zero, q_s, do_s, k_s,
                q_full, do_full, q_empty, k_full, k_empty, N, D, COMPRESSED, BN, LOOP,
            )),
        ],
        [4, 4, 4],
        [192, 80, 48],
    )  # fmt: skip
