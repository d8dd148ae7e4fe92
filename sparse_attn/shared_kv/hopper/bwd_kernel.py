"""Fused backward for sm_90 in Gluon: one program a query and 64 of its heads, four warpgroups, key tiles of 32.

    warpgroup 0   S = q K^T, P;         left half of dq   (two 64 x 128 fp32 accumulators at D = 512)
    warpgroup 1   delta, dP = dO K^T, dZ;   right half of dq
    warpgroup 2   dKV^T = q^T dZ + dO^T P, in chunks [64 channels, 32 keys]; q and dO are transposed A operands straight from shared
                  memory; the next chunk is issued before the last one is written out
    warpgroup 3   gathers q, dO, then the keys with cp.async: a ring of two tiles of two halves [32 keys, D / 2 channels]

S and dP of the next tile are issued before dq of this one, so the tensor cores have work while P and dZ are made. On the last tile that
look-ahead runs on stale keys (the wait is predicated off) and its result is dropped.

dKV leaves in one of two forms:
    fast            vector additions into fp32 [keys, D] (red.v4, 256-byte segments). Not bit-stable.
    deterministic   16-bit partial rows [groups of heads, queries, slots, D], no atomics; then owner_sum.py

Shared memory at D = 512, 210 or 216 KB: q 64, dO 64, keys 64, P and dZ double buffered 16, layout change of a dKV chunk 2 or 8.

Barriers. b is the tile's parity; half tile i is tile i // 2 of the ring, D half i % 2.
    q_full[2], do_full[2], k_full[4]   128 arrivals: each producer thread's own cp.async group
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
from sparse_attn.shared_kv.hopper.fwd import copy_heads, load_heads, store_heads


@gluon.jit
def producer(
    q, do, ori_kv, cmp_kv, indices, first_slot, row, group, zero, num_tiles, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots,
    q_s, do_s, k_s, q_full, do_full, k_full, k_empty, N: gl.constexpr, D: gl.constexpr, SELECTED: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    DH: gl.constexpr = D // 2
    layout: gl.constexpr = copy_layout_for(DH)
    n = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, DH, layout=gl.SliceLayout(0, layout))
    copy_heads(q, row, group, q_s, q_full, zero, N, D)
    copy_heads(do, row, group, do_s, do_full, zero, N, D)
    empty_phase = 1  # the first wait on an "empty" barrier must pass at once
    for i in range(num_tiles // 2):
        for b in gl.static_range(2):
            z = (2 * i + b) * zero
            key, valid = tile_keys(
                indices, first_slot, 2 * i + b, n, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots, SELECTED, BN
            )
            keys = ori_kv if 2 * i + b < ori_tiles else cmp_kv
            ptrs = keys + key.to(gl.int64)[:, None] * D + d[None, :]
            for half in gl.static_range(2):
                mbarrier.wait(k_empty[2 * b + half], empty_phase)
                async_copy.async_copy_global_to_shared(k_s.index(z + 2 * b + half), ptrs + half * DH, mask=valid[:, None])
                async_copy.mbarrier_arrive(k_full[2 * b + half], increment_count=False)
        empty_phase = empty_phase ^ 1


@gluon.jit
def dq_consumer(
    X: gl.constexpr, dq, vec, out, indices, first_slot, row, group, zero, num_tiles, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count,
    slots, scale, a_s, k_s, p_s, z_s, a_full, k_full, k_empty, p_full, p_empty, z_full, z_empty,
    N: gl.constexpr, D: gl.constexpr, SELECTED: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    # X = 0: S, P and the left half of dq (a_s = q; vec is read: lse).
    # X = 1: dP, dZ and the right half of dq (a_s = dO; vec is written: delta).
    DQ: gl.constexpr = D // 4
    dtype: gl.constexpr = dq.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    # Two accumulators: with 512 threads ptxas compiles under 128 registers and rejects one m64n256.
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    h = group * 64 + gl.arange(0, 64, layout=s_rows)
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
    if X == 0:
        # a padded head gets an LSE of +inf, so P = 0
        vec = gl.load(vec + row.to(gl.int64) * N + h, mask=h < N, other=float("inf")) * 1.4426950408889634
    else:
        # delta = sum over D of dO * out, while the keys are on their way: registers are free before the accumulators live
        o0 = load_heads(out, row, group, 0, N, D)
        o1 = load_heads(out, row, group, 1, N, D)
        mbarrier.wait(a_full[0], 0)
        delta = gl.sum(o0.to(gl.float32) * a_s.index(zero).load(copy_layout_for(D // 2)).to(gl.float32), 1)
        mbarrier.wait(a_full[1], 0)
        delta += gl.sum(o1.to(gl.float32) * a_s.index(zero + 1).load(copy_layout_for(D // 2)).to(gl.float32), 1)
        delta = gl.convert_layout(delta, s_rows)
        gl.store(vec + row.to(gl.int64) * N + h, delta, mask=h < N)
        vec = delta
    acc0 = gl.zeros([64, DQ], gl.float32, layout=dq_layout)
    acc1 = gl.zeros([64, DQ], gl.float32, layout=dq_layout)
    z = zero
    s_zero = gl.zeros([64, BN], gl.float32, layout=s_layout)
    some = num_tiles > 0
    if X == 0:
        mbarrier.wait(a_full[0], 0)
        mbarrier.wait(a_full[1], 0)
    mbarrier.wait(k_full[0], 0, pred=some)
    mbarrier.wait(k_full[1], 0, pred=some)
    fence_async_shared()
    s = warpgroup_mma(a_s.index(z), k_s.index(z).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    s = warpgroup_mma(a_s.index(z + 1), k_s.index(z + 1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    phase = 0
    for i in range(num_tiles // 2):
        more_pairs = i + 1 < num_tiles // 2
        for b in gl.static_range(2):
            # Opaque zero, as in the forward. The loop is unrolled by two (static phases), so z depends on b too.
            z = (2 * i + b) * zero
            if b == 0:
                next_phase = phase
                more = some
            else:
                next_phase = phase ^ 1
                more = more_pairs
            if X == 0:
                _, valid = tile_keys(
                    indices, first_slot, 2 * i + b, n, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots, SELECTED, BN
                )
                p = gl.exp2(s * (scale * 1.4426950408889634) - vec[:, None])
                p = gl.where(valid[None, :], p, 0.0)
                mbarrier.wait(p_empty[b], phase ^ 1)
                p_s[b].store(p.to(dtype))
                fence_async_shared()
                mbarrier.arrive(p_full[b], count=1)
                mbarrier.wait(k_full[2 - 2 * b], next_phase, pred=more)
                mbarrier.wait(k_full[3 - 2 * b], next_phase, pred=more)
                fence_async_shared()
                s_next = warpgroup_mma(a_s.index(z), k_s.index(z + 2 - 2 * b).permute((1, 0)), s_zero, use_acc=False, is_async=True)
                s_next = warpgroup_mma(a_s.index(z + 1), k_s.index(z + 3 - 2 * b).permute((1, 0)), s_next, is_async=True)
                mbarrier.wait(z_full[b], phase)
                acc0_next = warpgroup_mma(z_s[b], k_s.index(z + 2 * b).slice(0, DQ, dim=1), acc0, is_async=True)
                acc1_next = warpgroup_mma(z_s[b], k_s.index(z + 2 * b).slice(DQ, DQ, dim=1), acc1, is_async=True)
                s, acc0, acc1 = warpgroup_mma_wait(0, deps=[s_next, acc0_next, acc1_next])
                mbarrier.arrive(k_empty[2 * b], count=1)
                mbarrier.arrive(z_empty[b], count=1)
            else:
                mbarrier.wait(k_full[2 - 2 * b], next_phase, pred=more)
                mbarrier.wait(k_full[3 - 2 * b], next_phase, pred=more)
                fence_async_shared()
                s_next = warpgroup_mma(a_s.index(z), k_s.index(z + 2 - 2 * b).permute((1, 0)), s_zero, use_acc=False, is_async=True)
                s_next = warpgroup_mma(a_s.index(z + 1), k_s.index(z + 3 - 2 * b).permute((1, 0)), s_next, is_async=True)
                mbarrier.wait(p_full[b], phase)
                p = p_s[b].load(s_layout).to(gl.float32)
                mbarrier.arrive(p_empty[b], count=1)
                dz = p * (s - vec[:, None]) * scale
                mbarrier.wait(z_empty[b], phase ^ 1)
                z_s[b].store(dz.to(dtype))
                fence_async_shared()
                mbarrier.arrive(z_full[b], count=1)
                acc0_next = warpgroup_mma(z_s[b], k_s.index(z + 2 * b + 1).slice(0, DQ, dim=1), acc0, is_async=True)
                acc1_next = warpgroup_mma(z_s[b], k_s.index(z + 2 * b + 1).slice(DQ, DQ, dim=1), acc1, is_async=True)
                s, acc0, acc1 = warpgroup_mma_wait(0, deps=[s_next, acc0_next, acc1_next])
                mbarrier.arrive(k_empty[2 * b + 1], count=1)
        phase = phase ^ 1
    # Stage dq in the operand's own place, but only once warpgroup 2 has read it for the last dKV chunk.
    z = zero
    if X == 0:
        mbarrier.wait(p_empty[1], phase ^ 1)
    else:
        mbarrier.wait(z_empty[1], phase ^ 1)
    a_s.index(z + X).slice(0, DQ, dim=1).store(acc0.to(dtype))
    a_s.index(z + X).slice(DQ, DQ, dim=1).store(acc1.to(dtype))
    store_heads(dq, a_s.index(z + X), row, group, X, N, D)


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
    dori, dcmp, part_ori, part_cmp, indices, first_slot, zero, num_tiles, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots,
    q_s, do_s, p_s, z_s, q_full, do_full, p_full, p_empty, z_full, z_empty,
    D: gl.constexpr, SELECTED: gl.constexpr, BN: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    # PARTIAL: dori, dcmp are the buffers of partial rows, and part_ori, part_cmp (int64) this query's first rows in them
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
    for half in gl.static_range(2):
        mbarrier.wait(q_full[half], 0)
    for half in gl.static_range(2):
        mbarrier.wait(do_full[half], 0)
    phase = 0
    for i in range(num_tiles // 2):
        for b in gl.static_range(2):
            z = (2 * i + b) * zero
            tile = 2 * i + b
            key, valid = tile_keys(indices, first_slot, tile, n, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots, SELECTED, BN)
            target = dori if tile < ori_tiles else dcmp
            if PARTIAL:
                first = part_ori + tile * BN if tile < ori_tiles else part_cmp + (tile - ori_tiles) * BN
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
                if PARTIAL:
                    gl.store(ptrs + c * 64, gl.convert_layout(v.to(dori.dtype.element_ty), out_layout), mask=valid[None, :])
                else:
                    gl.atomic_add(ptrs + c * 64, gl.convert_layout(v, out_layout), mask=valid[None, :], sem="relaxed")
        phase = phase ^ 1


@gluon.jit(do_not_specialize=["row0", "count", "K", "ori_slots", "cmp_slots", "zero", "scale"])
def hopper_bwd_kernel(
    q, ori_kv, cmp_kv, indices, places, used, out, do, lse, delta, dq, dori, dcmp, row0, count, K, ori_slots, cmp_slots, zero, scale,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, BN: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Queries row0 to row0 + count - 1. PARTIAL: dori [groups, count, ori_slots, D] and dcmp [groups, count, cmp_slots, D]."""
    SELECTED: gl.constexpr = COMPRESSED == 2
    DH: gl.constexpr = D // 2
    GROUPS: gl.constexpr = (N + 63) // 64
    dtype: gl.constexpr = q.dtype.element_ty
    local = count - 1 - gl.program_id(0) // GROUPS  # long rows first
    row = row0 + local
    group = gl.program_id(0) % GROUPS
    first_slot = row.to(gl.int64) * K
    part = group.to(gl.int64) * count + local
    part_ori = part * ori_slots
    part_cmp = part * cmp_slots
    ori_begin, ori_count, cmp_begin, cmp_count, slots = load_ranges(places, used, row, COMPRESSED)
    ori_tiles = gl.cdiv(ori_count, BN)
    num_tiles = gl.cdiv(ori_tiles + gl.cdiv(slots, BN), 2) * 2  # an even number
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DH], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DH], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BN], dtype)
    q_s = gl.allocate_shared_memory(dtype, [2, 64, DH], a_layout)
    do_s = gl.allocate_shared_memory(dtype, [2, 64, DH], a_layout)
    k_s = gl.allocate_shared_memory(dtype, [4, BN, DH], k_layout)
    p_s = (gl.allocate_shared_memory(dtype, [64, BN], p_layout), gl.allocate_shared_memory(dtype, [64, BN], p_layout))
    z_s = (gl.allocate_shared_memory(dtype, [64, BN], p_layout), gl.allocate_shared_memory(dtype, [64, BN], p_layout))
    q_full = (new_barrier(128), new_barrier(128))
    do_full = (new_barrier(128), new_barrier(128))
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
                0, dq, lse, out, indices, first_slot, row, group, zero, num_tiles, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count,
                slots, scale, q_s, k_s, p_s, z_s, q_full, k_full, k_empty, p_full, p_empty, z_full, z_empty, N, D, SELECTED, BN,
            )),
            (dq_consumer, (
                1, dq, delta, out, indices, first_slot, row, group, zero, num_tiles, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count,
                slots, scale, do_s, k_s, p_s, z_s, do_full, k_full, k_empty, p_full, p_empty, z_full, z_empty, N, D, SELECTED, BN,
            )),
            (dkv_consumer, (
                dori, dcmp, part_ori, part_cmp, indices, first_slot, zero, num_tiles, ori_tiles, ori_begin, ori_count, cmp_begin,
                cmp_count, slots, q_s, do_s, p_s, z_s, q_full, do_full, p_full, p_empty, z_full, z_empty, D, SELECTED, BN, PARTIAL,
            )),
            (producer, (
                q, do, ori_kv, cmp_kv, indices, first_slot, row, group, zero, num_tiles, ori_tiles, ori_begin, ori_count, cmp_begin,
                cmp_count, slots, q_s, do_s, k_s, q_full, do_full, k_full, k_empty, N, D, SELECTED, BN,
            )),
        ],
        [4, 4, 4],
        [192, 80, 48],
    )  # fmt: skip
