"""Fused backward for sm_90 in Gluon: a task is one query and 64 of its heads; a program works through many, four warpgroups, tiles of 64.

    warpgroup 0   S = q K^T, P;         left half of dq   (two 64 x 128 fp32 accumulators at D = 512)
    warpgroup 1   delta once a task; dP = dO K^T, dZ;     right half of dq
    warpgroup 2   dKV = dZ^T q + P^T dO, in chunks [64 keys, 64 channels]
    warpgroup 3   copies q, dO and the keys with cp.async

There is room for one tile of keys. It is kept in parts of D / 4 channels: S and dP begin with the part that has arrived, and a part is
loaded anew as soon as its dq is done, while warpgroup 2 still works. q and dO are in such parts too, so those of the next task load while
the last dKV of this one is made. Why tiles of 64: products of 32 keys read their other operand from shared memory twice as often, and
shared memory was what the kernel waited for.

dKV leaves from the registers of the product: 16 bytes a thread. A thread's channels lie 8 apart, so rows are written in an order of their
own (lanes_in_order), which bwd_cast.py undoes in the end. Two forms:
    fast            vector additions into fp32 [keys, D], whole lines of 128 bytes. Not bit-stable.
    deterministic   16-bit partial rows [groups of heads, queries, slots, D], 64 bytes at a time, no atomics; then owner_sum.py
dq leaves from registers too in the fast form (store_part). The deterministic form stages it in the keys' tile: it gains nothing from whole
lines and dq from registers, both take shuffles, and is 3 % slower with them.

Shared memory at D = 512, 209 KB: q 64, dO 64, keys 64, P and dZ 8 each.

Barriers, one a part where a list is named:
    q_full, do_full, k_full    128 arrivals: each producer thread's own cp.async group
    q_empty              3 arrivals, when each consumer has read that part of q and dO for the last time in a task
    k_empty              1 arrival, from the warpgroup whose dq it belongs to. All parts are also read for S and dP, but that warpgroup's dq
                         needs dZ, which needs both.
    p_full, z_full       by warpgroup 0 / 1
    p_empty, z_empty     2 arrivals: the other of the two warpgroups, and warpgroup 2
Fences and keys that do not count: as in fwd.py.

Registers: ptxas waits for every single product of the whole kernel as soon as one warpgroup has too few for its own. What warpgroup 2
has is just enough for one chunk; the barrier between a chunk's stores and the next one's products keeps the two apart.
tests/test_gluon_code.py sees it in the machine code.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from sparse_attn.shared_kv.hopper.bwd_copy import BN, load_order, part_of, producer, task_of
from sparse_attn.shared_kv.hopper.core import copy_layout_for, head_pointers, new_barrier, store_heads, tile_keys


@gluon.jit
def load_out(ptrs, on, N: gl.constexpr):
    if N % 64 == 0:
        return gl.load(ptrs)
    else:
        return gl.load(ptrs, mask=on, other=0.0)


@gluon.jit
def product_sum(o, do_s, full, phase, at, layout: gl.constexpr):
    mbarrier.wait(full, phase)
    return gl.sum(o.to(gl.float32) * do_s.index(at).load(layout).to(gl.float32), 1)


@gluon.jit
def row_delta(out, do_s, do_full, phase, row, group, z, N: gl.constexpr, D: gl.constexpr):
    """delta = sum over D of dO * out, of 64 heads: out is on its way while dO arrives."""
    PART: gl.constexpr = part_of(D)
    layout: gl.constexpr = copy_layout_for(PART)
    ptrs, on = head_pointers(out, row, group, 0, N, D, PART)
    if D // PART == 4:
        o0 = load_out(ptrs, on, N)
        o2 = load_out(ptrs + 2 * PART, on, N)
        o1 = load_out(ptrs + PART, on, N)
        o3 = load_out(ptrs + 3 * PART, on, N)
        total = product_sum(o0, do_s, do_full[0], phase, z, layout) + product_sum(o2, do_s, do_full[2], phase, z + 2, layout)
        total += product_sum(o1, do_s, do_full[1], phase, z + 1, layout)
        return total + product_sum(o3, do_s, do_full[3], phase, z + 3, layout)
    else:
        o0 = load_out(ptrs, on, N)
        o1 = load_out(ptrs + PART, on, N)
        return product_sum(o0, do_s, do_full[0], phase, z, layout) + product_sum(o1, do_s, do_full[1], phase, z + 1, layout)


@gluon.constexpr_function
def turned(PART, step):
    """A product's layout [64, PART] after `step` exchanges between the 4 lanes of a row and a thread's registers: after two, a thread holds 8
    channels side by side and the lanes 32 of them, 64 bytes. Each is one transposition, for which Triton shuffles; both at once would go
    through shared memory."""
    low = [[0, 1], [0, 8], [0, 16]]
    lanes = [[0, 2], [0, 4]]
    if step >= 1:
        low[1], lanes[0] = lanes[0], low[1]
    if step >= 2:
        low[2], lanes[1] = lanes[1], low[2]
    high = [[0, 1 << i] for i in range(5, PART.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*low, *high, [8, 0]], lane_bases=[*lanes, [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]], block_bases=[],
        shape=[64, PART],
    )


@gluon.jit
def store_part(x, value, row, group, j: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """Part j of the channels of 64 heads from a product's accumulator to x [rows, N, D]."""
    PART: gl.constexpr = part_of(D)
    layout: gl.constexpr = turned(PART, 2)
    value = gl.convert_layout(gl.convert_layout(value.to(x.dtype.element_ty), turned(PART, 0)), turned(PART, 1))
    value = gl.convert_layout(value, layout)
    h = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
    ptrs = x + (row.to(gl.int64) * N + group * 64) * D + j * PART + h[:, None] * D + d[None, :]
    if N % 64 == 0:
        gl.store(ptrs, value)
    else:
        gl.store(ptrs, value, mask=(group * 64 + h < N)[:, None])


@gluon.jit
def dq_consumer(
    X: gl.constexpr, dq, vec, out, indices, places, used, row0, count, tasks, K, zero, scale, a_s, k_s, p_s, z_s,
    a_full, q_empty, k_full, k_empty, p_full, p_empty, z_full, z_empty,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Warpgroup X, 0 or 1. a_s holds q or dO, a_full says when; vec [rows, N] is the LSE, which 0 reads, or delta, which 1 writes."""
    PART: gl.constexpr = part_of(D)
    PARTS: gl.constexpr = D // PART
    OWN: gl.constexpr = PARTS // 2
    dtype: gl.constexpr = dq.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
    s_zero = gl.zeros([64, BN], gl.float32, layout=s_layout)
    phase = 0
    q_phase = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        local, group, num_tiles, ranges = task_of(task, row0, count, places, used, N, COMPRESSED)
        row = row0 + local
        first_slot = row.to(gl.int64) * K
        h = group * 64 + gl.arange(0, 64, layout=s_rows)
        if X == 0:
            # a padded head gets an LSE of +inf, so P = 0
            v = gl.load(vec + row.to(gl.int64) * N + h, mask=h < N, other=float("inf")) * 1.4426950408889634
        else:
            v = gl.convert_layout(row_delta(out, a_s, a_full, q_phase, row, group, task * zero, N, D), s_rows)
            gl.store(vec + row.to(gl.int64) * N + h, v, mask=h < N)
        acc0 = gl.zeros([64, PART], gl.float32, layout=dq_layout)
        acc1 = gl.zeros([64, PART], gl.float32, layout=dq_layout)
        for i in range(num_tiles):
            z = i * zero
            if X == 0:
                _, valid = tile_keys(indices, first_slot, i, n, ranges, COMPRESSED == 2, BN)
            s = s_zero
            for j in gl.static_range(PARTS):
                mbarrier.wait(k_full[load_order(j, PARTS)], phase)
                mbarrier.wait(a_full[load_order(j, PARTS)], q_phase)
                fence_async_shared()
                at = z + load_order(j, PARTS)
                s = warpgroup_mma(a_s.index(at), k_s.index(at).permute((1, 0)), s, use_acc=j > 0, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            if X == 0:
                p = gl.exp2(s * (scale * 1.4426950408889634) - v[:, None])
                p = gl.where(valid[None, :], p, 0.0)
                mbarrier.wait(p_empty, phase ^ 1)
                p_s.store(p.to(dtype))
                fence_async_shared()
                mbarrier.arrive(p_full, count=1)
                mbarrier.wait(z_full, phase)
            else:
                dz = (s - v[:, None]) * scale
                mbarrier.wait(p_full, phase)
                dz = p_s.load(s_layout).to(gl.float32) * dz
                mbarrier.arrive(p_empty, count=1)
                mbarrier.wait(z_empty, phase ^ 1)
                z_s.store(dz.to(dtype))
                fence_async_shared()
                mbarrier.arrive(z_full, count=1)
            more = (i + 1 < num_tiles) | (not PARTIAL)  # the last tile's parts: PARTIAL stages dq in them
            acc0 = warpgroup_mma(z_s, k_s.index(z + OWN * X), acc0, is_async=True)
            if OWN == 2:
                acc1 = warpgroup_mma(z_s, k_s.index(z + 2 * X + 1), acc1, is_async=True)
                acc0, acc1 = warpgroup_mma_wait(1, deps=[acc0, acc1])
                mbarrier.arrive(k_empty[2 * X], count=1, pred=more)
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            else:
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
            mbarrier.arrive(k_empty[OWN * X + OWN - 1], count=1, pred=more)
            if X == 0:
                mbarrier.arrive(z_empty, count=1)
            phase = phase ^ 1
        for j in gl.static_range(PARTS):
            mbarrier.arrive(q_empty[j], count=1)
        if PARTIAL:
            # Staged in this warpgroup's parts of the last tile, which are given back only then: nobody else reads them any more
            z = num_tiles * zero
            k_s.index(z + OWN * X).store(acc0.to(dtype))
            store_heads(dq, k_s.index(z + OWN * X), row, group, OWN * X * PART, N, D, PART)
            mbarrier.arrive(k_empty[OWN * X], count=1)
            if OWN == 2:
                k_s.index(z + 2 * X + 1).store(acc1.to(dtype))
                store_heads(dq, k_s.index(z + 2 * X + 1), row, group, (2 * X + 1) * PART, N, D, PART)
                mbarrier.arrive(k_empty[2 * X + 1], count=1)
        else:
            store_part(dq, acc0, row, group, OWN * X, N, D)
            if OWN == 2:
                store_part(dq, acc1, row, group, 2 * X + 1, N, D)
        q_phase = q_phase ^ 1


@gluon.jit
def issue_chunk(c: gl.constexpr, z, q_s, do_s, p_t, z_t, v_zero, D: gl.constexpr):
    """dKV of a tile's 64 keys in channels 64 c to 64 c + 63; issued and not waited for."""
    part: gl.constexpr = c * 64 // part_of(D)
    start: gl.constexpr = c * 64 % part_of(D)
    v = warpgroup_mma(z_t, q_s.index(z + part).slice(start, 64, dim=1), v_zero, use_acc=False, is_async=True)
    v = warpgroup_mma(p_t, do_s.index(z + part).slice(start, 64, dim=1), v, is_async=True)
    return v


@gluon.constexpr_function
def row_layout(GROUP):
    """Registers in the order of the channels: a product's own layout has the second row between them."""
    high = [[0, 16], [0, 32]] if GROUP == 4 else [[0, 4], [0, 32]]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *high, [8, 0]], lane_bases=[[0, GROUP], [0, 2 * GROUP], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 64],
    )


@gluon.constexpr_function
def line_layout():
    """row_layout(4) with 8 lanes a row in place of 4, so that an addition is whole lines: a row's bit of the lane for one of the registers."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [4, 0], [0, 32], [8, 0]], lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [0, 16]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 64],
    )


@gluon.jit
def lanes_in_order(v, GROUP: gl.constexpr):
    """[keys, 64 channels] with a thread's channels side by side, GROUP of them 16 bytes: channel (r, j, lane, e) goes to (r, lane, j, e)."""
    v = v.reshape([64, 16 // GROUP, GROUP // 2, 4, 2]).permute((0, 1, 3, 2, 4))
    return gl.convert_layout(v.reshape([64, 64]), row_layout(GROUP))


@gluon.jit
def dkv_consumer(
    dori, dcmp, indices, places, used, row0, count, tasks, K, ori_slots, cmp_slots, zero, q_s, do_s, p_s, z_s, q_full, do_full, q_empty,
    p_full, p_empty, z_full, z_empty,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Warpgroup 2: additions to dori and dcmp, or rows of them."""
    PARTS: gl.constexpr = D // part_of(D)
    CHUNKS: gl.constexpr = D // 64
    GROUP: gl.constexpr = 8 if PARTIAL else 4
    dtype: gl.constexpr = dori.dtype.element_ty
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    t_layout: gl.constexpr = gl.DotOperandLayout(0, v_layout, 2)
    v_zero = gl.zeros([BN, 64], gl.float32, layout=v_layout)
    out_layout: gl.constexpr = row_layout(GROUP) if PARTIAL else line_layout()
    n = gl.arange(0, BN, layout=gl.SliceLayout(1, out_layout))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, out_layout))
    phase = 0
    q_phase = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        local, group, num_tiles, ranges = task_of(task, row0, count, places, used, N, COMPRESSED)
        first_slot = (row0 + local).to(gl.int64) * K
        part = group.to(gl.int64) * count + local
        for j in gl.static_range(PARTS):
            mbarrier.wait(q_full[j], q_phase)
            mbarrier.wait(do_full[j], q_phase)
        for i in range(num_tiles):
            z = i * zero
            key, valid = tile_keys(indices, first_slot, i, n, ranges, COMPRESSED == 2, BN)
            ori_tiles = ranges[0]
            target = dori if i < ori_tiles else dcmp
            if PARTIAL:
                first = part * ori_slots + i * BN if i < ori_tiles else part * cmp_slots + (i - ori_tiles) * BN
                ptrs = target + first * D + (n[:, None] * D + d[None, :])
            else:
                ptrs = target + key.to(gl.int64)[:, None] * D + d[None, :]
            mbarrier.wait(p_full, phase)
            mbarrier.wait(z_full, phase)
            p_t = p_s.permute((1, 0))
            z_t = z_s.permute((1, 0)).load(t_layout)  # once for all chunks: one operand less to read again and again
            mbarrier.arrive(z_empty, count=1)
            fence_async_shared()
            for c in gl.static_range(CHUNKS):
                v = warpgroup_mma_wait(0, deps=[issue_chunk(c, z, q_s, do_s, p_t, z_t, v_zero, D)])
                if c == CHUNKS - 1:
                    mbarrier.arrive(p_empty, count=1)
                if (c + 1) * 64 % part_of(D) == 0:
                    mbarrier.arrive(q_empty[c * 64 // part_of(D)], count=1, pred=i + 1 == num_tiles)
                if PARTIAL:
                    gl.store(ptrs + c * 64, lanes_in_order(v.to(dtype), GROUP), mask=valid[:, None])
                    gl.thread_barrier()
                else:
                    lines = gl.convert_layout(lanes_in_order(v, GROUP), out_layout)
                    gl.atomic_add(ptrs + c * 64, lines, mask=valid[:, None], sem="relaxed")
            phase = phase ^ 1
        q_phase = q_phase ^ 1


@gluon.jit
def new_barriers(count: gl.constexpr, PARTS: gl.constexpr):
    if PARTS == 4:
        return new_barrier(count), new_barrier(count), new_barrier(count), new_barrier(count)
    else:
        return new_barrier(count), new_barrier(count)


@gluon.jit(do_not_specialize=["row0", "count", "tasks", "K", "ori_slots", "cmp_slots", "zero", "scale"])
def hopper_bwd_kernel(
    q, ori_kv, cmp_kv, indices, places, used, do, out, lse, delta, dq, dori, dcmp, row0, count, tasks, K, ori_slots, cmp_slots, zero, scale,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Queries row0 to row0 + count - 1. PARTIAL: dori [groups, count, ori_slots, D] and dcmp [groups, count, cmp_slots, D]. Writes delta."""
    PART: gl.constexpr = part_of(D)
    PARTS: gl.constexpr = D // PART
    dtype: gl.constexpr = q.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, PART], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BN], dtype)
    q_s = gl.allocate_shared_memory(dtype, [PARTS, 64, PART], layout)
    do_s = gl.allocate_shared_memory(dtype, [PARTS, 64, PART], layout)
    k_s = gl.allocate_shared_memory(dtype, [PARTS, BN, PART], layout)
    p_s = gl.allocate_shared_memory(dtype, [64, BN], p_layout)
    z_s = gl.allocate_shared_memory(dtype, [64, BN], p_layout)
    q_full = new_barriers(128, PARTS)
    do_full = new_barriers(128, PARTS)
    q_empty = new_barriers(3, PARTS)
    k_full = new_barriers(128, PARTS)
    k_empty = new_barriers(1, PARTS)
    p_full = new_barrier(1)
    p_empty = new_barrier(2)
    z_full = new_barrier(1)
    z_empty = new_barrier(2)
    gl.warp_specialize(
        [
            (dq_consumer, (
                0, dq, lse, out, indices, places, used, row0, count, tasks, K, zero, scale, q_s, k_s, p_s, z_s,
                q_full, q_empty, k_full, k_empty, p_full, p_empty, z_full, z_empty, N, D, COMPRESSED, PARTIAL,
            )),
            (dq_consumer, (
                1, dq, delta, out, indices, places, used, row0, count, tasks, K, zero, scale, do_s, k_s, p_s, z_s,
                do_full, q_empty, k_full, k_empty, p_full, p_empty, z_full, z_empty, N, D, COMPRESSED, PARTIAL,
            )),
            (dkv_consumer, (
                dori, dcmp, indices, places, used, row0, count, tasks, K, ori_slots, cmp_slots, zero, q_s, do_s, p_s, z_s,
                q_full, do_full, q_empty, p_full, p_empty, z_full, z_empty, N, D, COMPRESSED, PARTIAL,
            )),
            (producer, (
                q, do, out, ori_kv, cmp_kv, indices, places, used, row0, count, tasks, K, zero, q_s, do_s, k_s,
                q_full, do_full, q_empty, k_full, k_empty, N, D, COMPRESSED,
            )),
        ],
        [4, 4, 4],
        [192, 80, 48],
    )  # fmt: skip
