"""Forward for sm_90 in Gluon, warp-specialised: a task is one query and 64 of its heads; a program works through many, three warpgroups.

    warpgroup 0   S of the even key tiles; left D half of the output  (64 x 256 fp32 accumulator at D = 512)
    warpgroup 1   S of the odd key tiles;  right D half of the output
    warpgroup 2   gathers the keys with cp.async into four half tiles [64 keys, D / 2 channels]

Tiles go in pairs. Each consumer makes P of its own tile and hands it to the other in 16 bits through shared memory, since each owns half
of D but needs every key. The running maximum travels 0 -> 1 -> 0 with P: warpgroup 0 brings it over its tile, warpgroup 1 over the next,
warpgroup 0 then rescales to warpgroup 1's. Row sums stay apart until the end, where the sink joins them. Of
an odd number of tiles the last has no partner: warpgroup 1 has no scores of its own then.

The grid is as large as the device, so that q and the first keys of the next task arrive while the last one is finished: q is free after
the last S, and the output is staged in the last key tile. Without lists, where tasks are short, the output goes through the P tiles and two
more like them, and leaves in the next task: warpgroup 0's under its first products, warpgroup 1's while its first tile is on its way.

Shared memory at D = 512, 210 KB: q 64, four half key tiles 128, two P tiles 16, a few rows of maxima and sums; for CFA 226, the output's 16.

Barriers. Half tile i is tile i // 2 of the pair, D half i % 2.
    q_full[2], k_full[4]   128 arrivals: each producer thread's own cp.async group (increment_count=False)
    q_empty                2 arrivals, after the last S of either consumer
    k_empty[4]             1 arrival, from the warpgroup that owns this D half. The other one reads the half for its S only, and its P
                           (which the owner has waited for) comes after that S: one arrival will do.
    p_full[2], p_empty[2]  P and the maximum of even / odd tiles; full by the maker, empty by the other warpgroup
    sum_full[2]            the two partial row sums, once a task

Order between proxies. cp.async writes through the generic proxy and wgmma reads through the async proxy, so a proxy fence has to lie on
the path from one to the other. It stands behind the wait for the full barrier, in every thread that issues the product; a fence in the
copying thread would have to wait there until the copy has landed (NOTES.md has both measured).

Keys that do not count are not read: cp.async fills their rows with zeros, so no NaN of a foreign row can meet a weight of 0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from sparse_attn.shared_kv.fwd import ALL
from sparse_attn.shared_kv.hopper.core import new_barrier, store_heads, tile_keys
from sparse_attn.shared_kv.hopper.finish import finished, store_through
from sparse_attn.shared_kv.hopper.tasks import gather_tasks, issue_scores, new_copy_barriers, pair_is_whole, scores, task_of


@gluon.constexpr_function
def leaves_late(COMPRESSED):
    """Whether a task's output leaves in the next one. Measured: 5 % less for a task of two pairs, 3 % more for one of five."""
    return COMPRESSED == ALL


@gluon.jit
def nothing_seen(s_rows: gl.constexpr, o_layout: gl.constexpr, DH: gl.constexpr):
    """Maxima, sums and accumulator of a task that begins. A finite maximum: a tile with no key that counts leaves it, and exp2(-inf - m) is
    0 and not NaN."""
    m = gl.full([64], -1.0e30, gl.float32, layout=s_rows)
    return m, gl.full([64], 0.0, gl.float32, layout=s_rows), gl.zeros([64, DH], gl.float32, layout=o_layout)


@gluon.jit
def consumer(
    X: gl.constexpr, out, lse, sinks, indices, places, used, rows, tasks, K, zero, scale2, q_s, k_s, p_s, spare_s, max_s, sum_s,
    q_full, q_empty, k_full, k_empty, p_full, p_empty, sum_full,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, SINKS: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Warpgroup X: S of the even (0) or odd (1) tiles, half X of D of the output."""
    DH: gl.constexpr = D // 2
    LATE: gl.constexpr = leaves_late(COMPRESSED)
    dtype: gl.constexpr = out.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DH, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
    s_zero = gl.zeros([64, BN], gl.float32, layout=s_layout)
    phase = 0
    odd_phase = 0  # of p_full[1] and p_empty[1], which a pair without an odd tile leaves alone
    q_phase = 0
    m, l, acc = nothing_seen(s_rows, o_layout, DH)
    done_row = 0
    done_group = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        row, group, num_pairs, ranges = task_of(task, rows, places, used, N, COMPRESSED, True, BN)
        first_slot = row.to(gl.int64) * K
        if not LATE:
            m, l, acc = nothing_seen(s_rows, o_layout, DH)
        mbarrier.wait(q_full[0], q_phase)
        mbarrier.wait(q_full[1], q_phase)
        for i in range(num_pairs):
            # Opaque zero: a run-time argument, so ptxas cannot see that z is 0. With static tile indices it hoists every wgmma descriptor
            # out of the loop and spills them.
            z = i * zero
            last = i + 1 == num_pairs
            whole = pair_is_whole(i, ranges, BN)
            leaves = (i == 0) & (task >= gl.num_programs(0))  # the output of the task before
            holds = last
            if LATE:
                holds = False
            _, valid = tile_keys(indices, first_slot, 2 * i + X, n, ranges, COMPRESSED == 2, BN)
            if X == 0:
                s = issue_scores(X, z, q_s, k_s, k_full, phase, s_zero)
                if LATE:  # at compile time  # noqa: SIM102
                    if leaves:  # under these products
                        value = finished(X, acc, m, l, done_row, done_group, q_phase ^ 1, lse, sinks, sum_s, sum_full, dtype, N, SINKS)
                        mbarrier.wait(p_empty[X], phase ^ 1)
                        store_through(out, value, p_s[X], spare_s[X], done_row, done_group, X * DH, N, D, DH)
                        m, l, acc = nothing_seen(s_rows, o_layout, DH)
                s = warpgroup_mma_wait(0, deps=[s])
                if last:
                    mbarrier.arrive(q_empty, count=1)
                s = gl.where(valid[None, :], s * scale2, float("-inf"))
                m0 = gl.maximum(m, gl.max(s, 1))
                p = gl.exp2(s - m0[:, None])
                mbarrier.wait(p_empty[0], phase ^ 1)
                p_s[0].store(p.to(dtype))
                max_s[0].store(m0)
                fence_async_shared()  # make P visible to wgmma; arrive syncs the warpgroup before it signals
                mbarrier.arrive(p_full[0], count=1)
                alpha = gl.exp2(m - m0)
                acc = acc * gl.convert_layout(alpha, o_rows)[:, None]
                acc_next = warpgroup_mma(p_s[0], k_s.index(z), acc, is_async=True)
                l = l * alpha + gl.sum(p, 1)
                acc = warpgroup_mma_wait(0, deps=[acc_next])
                mbarrier.arrive(k_empty[0], count=1)
                m = m0
                mbarrier.wait(k_full[2], phase)
                if whole:
                    mbarrier.wait(p_full[1], odd_phase)
                    m = max_s[1].load(s_rows)
                    alpha = gl.exp2(m0 - m)
                    l = l * alpha
                    acc = acc * gl.convert_layout(alpha, o_rows)[:, None]
                    fence_async_shared()
                    acc = warpgroup_mma(p_s[1], k_s.index(z + 2), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(p_empty[1], count=1)
                    odd_phase = odd_phase ^ 1
                if not holds:
                    mbarrier.arrive(k_empty[2], count=1)
            else:
                if LATE:  # at compile time  # noqa: SIM102
                    if leaves:  # while the odd tile is on its way
                        value = finished(X, acc, m, l, done_row, done_group, q_phase ^ 1, lse, sinks, sum_s, sum_full, dtype, N, SINKS)
                        mbarrier.wait(p_empty[X], odd_phase ^ 1)
                        store_through(out, value, p_s[X], spare_s[X], done_row, done_group, X * DH, N, D, DH)
                        m, l, acc = nothing_seen(s_rows, o_layout, DH)
                if whole:
                    s = scores(X, z, q_s, k_s, k_full, phase, s_zero)
                    if last:
                        mbarrier.arrive(q_empty, count=1)
                    s = gl.where(valid[None, :], s * scale2, float("-inf"))
                    s_max = gl.max(s, 1)
                    mbarrier.wait(p_full[0], phase)
                    m0 = max_s[0].load(s_rows)
                    acc = acc * gl.convert_layout(gl.exp2(m - m0), o_rows)[:, None]
                    mbarrier.wait(k_full[1], phase)
                    fence_async_shared()
                    acc_next = warpgroup_mma(p_s[0], k_s.index(z + 1), acc, is_async=True)
                    m1 = gl.maximum(m0, s_max)
                    p = gl.exp2(s - m1[:, None])
                    mbarrier.wait(p_empty[1], odd_phase ^ 1)
                    p_s[1].store(p.to(dtype))
                    max_s[1].store(m1)
                    fence_async_shared()
                    mbarrier.arrive(p_full[1], count=1)
                    l = l * gl.exp2(m - m1) + gl.sum(p, 1)
                    alpha = gl.convert_layout(gl.exp2(m0 - m1), o_rows)
                    acc = warpgroup_mma_wait(0, deps=[acc_next])
                    mbarrier.arrive(k_empty[1], count=1)
                    mbarrier.arrive(p_empty[0], count=1)
                    acc = acc * alpha[:, None]
                    acc = warpgroup_mma(p_s[1], k_s.index(z + 3), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    m = m1
                    odd_phase = odd_phase ^ 1
                else:  # the last pair, and no scores of this side's own in it
                    mbarrier.arrive(q_empty, count=1)
                    mbarrier.wait(k_full[2], phase)  # no phase may go by unseen
                    mbarrier.wait(k_full[3], phase)
                    mbarrier.wait(p_full[0], phase)
                    m0 = max_s[0].load(s_rows)
                    l = l * gl.exp2(m - m0)
                    acc = acc * gl.convert_layout(gl.exp2(m - m0), o_rows)[:, None]
                    mbarrier.wait(k_full[1], phase)
                    fence_async_shared()
                    acc_next = warpgroup_mma(p_s[0], k_s.index(z + 1), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[acc_next])
                    mbarrier.arrive(k_empty[1], count=1)
                    mbarrier.arrive(p_empty[0], count=1)
                    m = m0
                if not holds:
                    mbarrier.arrive(k_empty[3], count=1)
            phase = phase ^ 1
        # The other side has read the sums of the last task long ago: it has made P for this one since.
        sum_s[X].store(l)
        mbarrier.arrive(sum_full[X], count=1)
        if LATE:
            done_row = row
            done_group = group
        else:
            value = finished(X, acc, m, l, row, group, q_phase, lse, sinks, sum_s, sum_full, dtype, N, SINKS)
            # Stage the output in this warpgroup's half of the last tile, so that the stores to device memory are whole rows. Only then
            # may the half be filled again; the other warpgroup has read it for its S alone, which is long done.
            staged = k_s.index(num_pairs * zero + 2 + X)
            staged.store(value)
            store_heads(out, staged, row, group, X * DH, N, D, DH)
            mbarrier.arrive(k_empty[2 + X], count=1)
        q_phase = q_phase ^ 1
    if LATE:
        value = finished(X, acc, m, l, done_row, done_group, q_phase ^ 1, lse, sinks, sum_s, sum_full, dtype, N, SINKS)
        mbarrier.wait(p_empty[X], (phase if X == 0 else odd_phase) ^ 1)
        store_through(out, value, p_s[X], spare_s[X], done_row, done_group, X * DH, N, D, DH)


@gluon.jit(do_not_specialize=["rows", "tasks", "K", "zero", "scale"])
def hopper_fwd_kernel(
    q, ori_kv, cmp_kv, indices, sinks, places, used, out, lse, rows, tasks, K, zero, scale,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, SINKS: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    DH: gl.constexpr = D // 2
    dtype: gl.constexpr = q.dtype.element_ty
    scale2 = scale * 1.4426950408889634
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DH], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DH], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BN], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(dtype, [2, 64, DH], q_layout)
    k_s = gl.allocate_shared_memory(dtype, [4, BN, DH], k_layout)
    p_s = (gl.allocate_shared_memory(dtype, [64, BN], p_layout), gl.allocate_shared_memory(dtype, [64, BN], p_layout))
    spare_s = p_s  # where it is not used
    if leaves_late(COMPRESSED):
        spare_s = (gl.allocate_shared_memory(dtype, [64, BN], p_layout), gl.allocate_shared_memory(dtype, [64, BN], p_layout))
    max_s = (gl.allocate_shared_memory(gl.float32, [64], row_layout), gl.allocate_shared_memory(gl.float32, [64], row_layout))
    sum_s = (gl.allocate_shared_memory(gl.float32, [64], row_layout), gl.allocate_shared_memory(gl.float32, [64], row_layout))
    q_full, q_empty, k_full, k_empty = new_copy_barriers()
    p_full = (new_barrier(1), new_barrier(1))
    p_empty = (new_barrier(1), new_barrier(1))
    sum_full = (new_barrier(1), new_barrier(1))
    # Register split: 12 warps start at 168 each. The producer needs few, so the worker counts [216, 72] leave 216 to both consumers (the
    # default warpgroup gets what remains): 128 for the accumulator, the rest for S and addresses.
    gl.warp_specialize(
        [
            (consumer, (
                0, out, lse, sinks, indices, places, used, rows, tasks, K, zero, scale2, q_s, k_s, p_s, spare_s, max_s, sum_s,
                q_full, q_empty, k_full, k_empty, p_full, p_empty, sum_full, N, D, COMPRESSED, SINKS, BN,
            )),
            (consumer, (
                1, out, lse, sinks, indices, places, used, rows, tasks, K, zero, scale2, q_s, k_s, p_s, spare_s, max_s, sum_s,
                q_full, q_empty, k_full, k_empty, p_full, p_empty, sum_full, N, D, COMPRESSED, SINKS, BN,
            )),
            (gather_tasks, (
                q, ori_kv, cmp_kv, indices, places, used, rows, tasks, K, zero, q_s, k_s, q_full, q_empty, k_full, k_empty,
                N, D, COMPRESSED, True, BN,
            )),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip
