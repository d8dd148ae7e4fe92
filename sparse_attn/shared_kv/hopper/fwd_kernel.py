"""Forward for sm_90 in Gluon, warp-specialised: a task is one query and 64 of its heads; a program works through many, three warpgroups.

    warpgroup 0   S of the even key tiles; left D half of the output  (two accumulators of 64 x 128 fp32 at D = 512)
    warpgroup 1   S of the odd key tiles;  right D half of the output
    warpgroup 2   gathers the keys with cp.async into two tiles of four parts [64 keys, D / 4 channels], each free again once it has been read

Tiles go in pairs. Each consumer makes P of its own tile and hands it to the other in 16 bits through shared memory, since each owns half
of D but needs every key. Row sums stay apart until the end, where the sink joins them. Of an odd number of tiles the first has no partner:
warpgroup 1, which has no scores of its own then, comes from the output of the task before, and the next pair's odd tile is on its way already.

What is taken from the scores before exp2 does not matter to a softmax; a running maximum is there so that exp2 neither overflows nor loses
all keys. With sums in fp32 and P in bfloat16, which has their exponents, only rows whose scores lie beyond some +-50 (base 2) would do
that, so for bfloat16 nothing is taken from them (NOTHING): no maxima, no rescaling of sums and accumulators, and P of either tile without a
word from the other warpgroup. The sums tell at the end of a task whether that was right. In [SUM_MIN, SUM_MAX] every weight has kept its
relative precision (what exp2 flushes to zero is below 2^-126 a key, 2^-66 of the sum) and accumulators are finite for keys up to 2^67. A
program that finds another sum says so in `anew`, and the launch behind this one (ANEW) does all tasks again with maxima; as a rule it ends
at once. float16 has its maxima from the start (MAXIMUM): they travel 0 -> 1 -> 0 with P, warpgroup 0 brings them over its tile, warpgroup 1
over the next, warpgroup 0 then rescales to warpgroup 1's.

The grid is as large as the device, so that q and the first keys of the next task arrive while the last one is finished: q is free after
the last S, and the output needs no key tile, as its layout changes within a warp. Without lists, where tasks are short, it leaves in the next
task: warpgroup 0's under its first products, warpgroup 1's while its first tile is on its way.

Shared memory at D = 512, 225 KB: q 64, two key tiles 128, two P tiles 16, 16 for the output's change of layout, a few rows of maxima and sums.

Barriers. Part i of the keys is tile i // 4 of the pair, quarter i % 4 of D.
    q_full[4], k_full[8]   128 arrivals: each producer thread's own cp.async group (increment_count=False)
    q_empty                256 arrivals, of every consumer's threads (tasks.free), after the last S
    k_empty[8]             128 arrivals, from the warpgroup that owns this part of D. The other one reads the part for its S only, and its P
                           (which the owner has waited for) comes after that S: one warpgroup's will do.
    p_full[2], p_empty[2]  P (and the maximum) of even / odd tiles; full by the maker, 1 arrival, empty by the other warpgroup, 128
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
from sparse_attn.shared_kv.hopper.core import new_barrier, tile_keys
from sparse_attn.shared_kv.hopper.finish import finished, store_rows
from sparse_attn.shared_kv.hopper.tasks import begins_alone, even_tile, free, gather_tasks, issue_scores, new_copy_barriers, scores, task_of

# What is taken from the scores of a row before exp2: its running maximum, nothing, or its maximum after all if any program asked for it
MAXIMUM, NOTHING, ANEW = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
SUM_MIN, SUM_MAX = gl.constexpr(2.0**-60), gl.constexpr(2.0**60)  # of the weights of a row, where nothing was taken from its scores
PROGRAMS_MAX = gl.constexpr(256)


@gluon.constexpr_function
def leaves_late(COMPRESSED):
    """Whether a task's output leaves in the next one. Measured: 5 % less for a task of two pairs, 3 % more for one of five."""
    return COMPRESSED == ALL


@gluon.jit
def nothing_seen(s_rows: gl.constexpr, o_layout: gl.constexpr, DP: gl.constexpr, MAXIMA: gl.constexpr):
    """Maxima, sums and accumulators of a task that begins. A finite maximum: a tile with no key that counts leaves it, and exp2(-inf - m) is
    0 and not NaN."""
    m = gl.full([64], -1.0e30 if MAXIMA else 0.0, gl.float32, layout=s_rows)
    zero = gl.zeros([64, DP], gl.float32, layout=o_layout)
    return m, gl.full([64], 0.0, gl.float32, layout=s_rows), zero, zero


@gluon.jit
def issue_values(p, k_s, at, a, b):
    """a, b += P V of two parts of D; issued and not waited for."""
    return warpgroup_mma(p, k_s.index(at), a, is_async=True), warpgroup_mma(p, k_s.index(at + 1), b, is_async=True)


@gluon.jit
def values(a, b, first, second, LATER: gl.constexpr = 0):
    """What issue_values has issued, each part of the keys given free as soon as it is read. LATER products have been issued since."""
    a, b = warpgroup_mma_wait(LATER + 1, deps=[a, b])
    free(first)
    a, b = warpgroup_mma_wait(LATER, deps=[a, b])
    free(second)
    return a, b


@gluon.jit
def rescaled(a, b, alpha):
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, a.type.layout))[:, None]
    return a * alpha, b * alpha


@gluon.jit
def ask_anew(X: gl.constexpr, anew, l, ranges):
    """Says so where a row of a task cannot do without its maximum. What warpgroup 1 has of the sum may be any part of it."""
    fine = l <= SUM_MAX
    if X == 0:
        fine = fine & ((l >= SUM_MIN) | (ranges[2] + ranges[5] == 0))
    rows: gl.constexpr = l.type.layout
    gl.store(anew + gl.program_id(0) + gl.zeros([64], gl.int32, layout=rows), 1, mask=fine == 0)


@gluon.jit
def asked_anew(anew):
    """Whether any program has."""
    i = gl.arange(0, PROGRAMS_MAX, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.max(gl.load(anew + i, mask=i < gl.num_programs(0), other=0), 0) > 0


@gluon.jit
def consumer(
    X: gl.constexpr, out, lse, sinks, indices, places, used, anew, rows, tasks, K, zero, scale2, q_s, k_s, p_s, max_s, sum_s,
    q_full, q_empty, k_full, k_empty, p_full, p_empty, sum_full,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, SINKS: gl.constexpr, MAXIMA: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Warpgroup X: S of the even (0) or odd (1) tiles, half X of D of the output."""
    DP: gl.constexpr = D // 4
    FIRST: gl.constexpr = 2 * X * (D // 4)
    LATE: gl.constexpr = leaves_late(COMPRESSED)
    dtype: gl.constexpr = out.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
    s_zero = gl.zeros([64, BN], gl.float32, layout=s_layout)
    phase = 0
    odd_phase = 0  # of p_full[1] and p_empty[1], which a pair without an odd tile leaves alone
    q_phase = 0
    m, l, a, b = nothing_seen(s_rows, o_layout, DP, MAXIMA)
    done_row = 0
    done_group = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        row, group, num_pairs, ranges = task_of(task, rows, places, used, N, COMPRESSED, True, BN)
        first_slot = row.to(gl.int64) * K
        if not LATE:
            m, l, a, b = nothing_seen(s_rows, o_layout, DP, MAXIMA)
        for part in gl.static_range(4):
            mbarrier.wait(q_full[part], q_phase)
        alone = begins_alone(ranges, BN)
        for i in range(num_pairs):
            # Opaque zero: a run-time argument, so ptxas cannot see that z is 0. With static tile indices it hoists every wgmma descriptor
            # out of the loop and spills them.
            z = i * zero
            last = i + 1 == num_pairs
            whole = i >= alone
            leaves = (i == 0) & (task >= gl.num_programs(0))  # the output of the task before
            _, valid = tile_keys(indices, first_slot, even_tile(i, alone) + X, n, ranges, COMPRESSED == 2, BN)
            if X == 0:
                s = issue_scores(X, z, q_s, k_s, k_full, phase, s_zero)
                if LATE:  # at compile time  # noqa: SIM102
                    if leaves:  # under these products
                        va, vb = finished(X, a, b, m, l, done_row, done_group, q_phase ^ 1, lse, sinks, sum_s, sum_full, dtype, N, SINKS)
                        store_rows(out, va, done_row, done_group, FIRST, N, D, DP)
                        store_rows(out, vb, done_row, done_group, FIRST + DP, N, D, DP)
                        m, l, a, b = nothing_seen(s_rows, o_layout, DP, MAXIMA)
                s = warpgroup_mma_wait(0, deps=[s])
                if last:
                    free(q_empty)
                s = gl.where(valid[None, :], s * scale2, float("-inf"))
                if MAXIMA:
                    m0 = gl.maximum(m, gl.max(s, 1))
                    p = gl.exp2(s - m0[:, None])
                else:
                    p = gl.exp2(s)
                    a, b = issue_values(gl.convert_layout(p.to(dtype), p_layout), k_s, z, a, b)
                mbarrier.wait(p_empty[0], phase ^ 1)
                p_s[0].store(p.to(dtype))
                if MAXIMA:
                    max_s[0].store(m0)
                fence_async_shared()  # make P visible to wgmma; arrive syncs the warpgroup before it signals
                mbarrier.arrive(p_full[0], count=1)
                if MAXIMA:
                    alpha = gl.exp2(m - m0)
                    a, b = rescaled(a, b, alpha)
                    a, b = issue_values(p_s[0], k_s, z, a, b)
                    l = l * alpha
                    m = m0
                l += gl.sum(p, 1)
                a, b = values(a, b, k_empty[0], k_empty[1])
                if whole:
                    mbarrier.wait(k_full[4], odd_phase)
                    mbarrier.wait(k_full[5], odd_phase)
                    mbarrier.wait(p_full[1], odd_phase)
                    if MAXIMA:
                        m = max_s[1].load(s_rows)
                        alpha = gl.exp2(m0 - m)
                        l = l * alpha
                        a, b = rescaled(a, b, alpha)
                    fence_async_shared()
                    a, b = issue_values(p_s[1], k_s, z + 4, a, b)
                    a, b = values(a, b, k_empty[4], k_empty[5])
                    free(p_empty[1])
                    odd_phase = odd_phase ^ 1
            else:
                if LATE:  # at compile time  # noqa: SIM102
                    if leaves:  # while the odd tile is on its way
                        va, vb = finished(X, a, b, m, l, done_row, done_group, q_phase ^ 1, lse, sinks, sum_s, sum_full, dtype, N, SINKS)
                        store_rows(out, va, done_row, done_group, FIRST, N, D, DP)
                        store_rows(out, vb, done_row, done_group, FIRST + DP, N, D, DP)
                        m, l, a, b = nothing_seen(s_rows, o_layout, DP, MAXIMA)
                if whole:
                    s = scores(X, z, q_s, k_s, k_full, odd_phase, s_zero)
                    if last:
                        free(q_empty)
                    s = gl.where(valid[None, :], s * scale2, float("-inf"))
                    if MAXIMA:
                        s_max = gl.max(s, 1)
                    mbarrier.wait(p_full[0], phase)
                    if MAXIMA:
                        m0 = max_s[0].load(s_rows)
                        a, b = rescaled(a, b, gl.exp2(m - m0))
                    mbarrier.wait(k_full[2], phase)
                    mbarrier.wait(k_full[3], phase)
                    fence_async_shared()
                    a, b = issue_values(p_s[0], k_s, z + 2, a, b)
                    if MAXIMA:
                        m1 = gl.maximum(m0, s_max)
                        p = gl.exp2(s - m1[:, None])
                    else:
                        p = gl.exp2(s)
                        a, b = issue_values(gl.convert_layout(p.to(dtype), p_layout), k_s, z + 6, a, b)
                    mbarrier.wait(p_empty[1], odd_phase ^ 1)
                    p_s[1].store(p.to(dtype))
                    if MAXIMA:
                        max_s[1].store(m1)
                    fence_async_shared()
                    mbarrier.arrive(p_full[1], count=1)
                    if MAXIMA:
                        l = l * gl.exp2(m - m1)
                    l += gl.sum(p, 1)
                    a, b = values(a, b, k_empty[2], k_empty[3], 0 if MAXIMA else 2)
                    free(p_empty[0])
                    if MAXIMA:
                        a, b = rescaled(a, b, gl.exp2(m0 - m1))
                        m = m1
                        a, b = issue_values(p_s[1], k_s, z + 6, a, b)
                    a, b = values(a, b, k_empty[6], k_empty[7])
                    odd_phase = odd_phase ^ 1
                else:  # the first tile, and no scores of this side's own beside it
                    mbarrier.wait(p_full[0], phase)
                    if MAXIMA:
                        m0 = max_s[0].load(s_rows)
                        l = l * gl.exp2(m - m0)
                        a, b = rescaled(a, b, gl.exp2(m - m0))
                        m = m0
                    mbarrier.wait(k_full[2], phase)
                    mbarrier.wait(k_full[3], phase)
                    fence_async_shared()
                    a, b = issue_values(p_s[0], k_s, z + 2, a, b)
                    a, b = values(a, b, k_empty[2], k_empty[3])
                    free(p_empty[0])
            phase = phase ^ 1
        # The other side has read the sums of the last task long ago: it has made P for this one since.
        sum_s[X].store(l)
        mbarrier.arrive(sum_full[X], count=1)
        if not MAXIMA:
            ask_anew(X, anew, l, ranges)
        if LATE:
            done_row = row
            done_group = group
        else:
            va, vb = finished(X, a, b, m, l, row, group, q_phase, lse, sinks, sum_s, sum_full, dtype, N, SINKS)
            store_rows(out, va, row, group, FIRST, N, D, DP)
            store_rows(out, vb, row, group, FIRST + DP, N, D, DP)
        q_phase = q_phase ^ 1
    if LATE:  # at compile time  # noqa: SIM102
        if gl.program_id(0) < tasks:
            va, vb = finished(X, a, b, m, l, done_row, done_group, q_phase ^ 1, lse, sinks, sum_s, sum_full, dtype, N, SINKS)
            store_rows(out, va, done_row, done_group, FIRST, N, D, DP)
            store_rows(out, vb, done_row, done_group, FIRST + DP, N, D, DP)


@gluon.jit(do_not_specialize=["rows", "tasks", "K", "zero", "scale"])
def hopper_fwd_kernel(
    q, ori_kv, cmp_kv, indices, sinks, places, used, anew, out, lse, rows, tasks, K, zero, scale,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, SINKS: gl.constexpr, FORM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    DP: gl.constexpr = D // 4
    MAXIMA: gl.constexpr = FORM != NOTHING
    dtype: gl.constexpr = q.dtype.element_ty
    if FORM == NOTHING:
        gl.store(anew + gl.program_id(0), 0)
    if FORM == ANEW:
        tasks = gl.where(asked_anew(anew), tasks, 0)
    scale2 = scale * 1.4426950408889634
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DP], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DP], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BN], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(dtype, [4, 64, DP], q_layout)
    k_s = gl.allocate_shared_memory(dtype, [8, BN, DP], k_layout)
    p_s = (gl.allocate_shared_memory(dtype, [64, BN], p_layout), gl.allocate_shared_memory(dtype, [64, BN], p_layout))
    max_s = (gl.allocate_shared_memory(gl.float32, [64], row_layout), gl.allocate_shared_memory(gl.float32, [64], row_layout))
    sum_s = (gl.allocate_shared_memory(gl.float32, [64], row_layout), gl.allocate_shared_memory(gl.float32, [64], row_layout))
    q_full, q_empty, k_full, k_empty = new_copy_barriers()
    p_full = (new_barrier(1), new_barrier(1))
    p_empty = (new_barrier(128), new_barrier(128))
    sum_full = (new_barrier(1), new_barrier(1))
    # Register split: 12 warps start at 168 each. The producer needs few, so the worker counts [224, 56] leave 224 to both consumers (the
    # default warpgroup gets what remains): 128 for the accumulator, the rest for S and addresses.
    gl.warp_specialize(
        [
            (consumer, (
                0, out, lse, sinks, indices, places, used, anew, rows, tasks, K, zero, scale2, q_s, k_s, p_s, max_s, sum_s,
                q_full, q_empty, k_full, k_empty, p_full, p_empty, sum_full, N, D, COMPRESSED, SINKS, MAXIMA, BN,
            )),
            (consumer, (
                1, out, lse, sinks, indices, places, used, anew, rows, tasks, K, zero, scale2, q_s, k_s, p_s, max_s, sum_s,
                q_full, q_empty, k_full, k_empty, p_full, p_empty, sum_full, N, D, COMPRESSED, SINKS, MAXIMA, BN,
            )),
            (gather_tasks, (
                q, ori_kv, cmp_kv, indices, places, used, rows, tasks, K, zero, q_s, k_s, q_full, q_empty, k_full, k_empty,
                N, D, COMPRESSED, True, BN,
            )),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
