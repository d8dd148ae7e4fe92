"""Tasks of the Gluon kernels that gather their keys (fwd_kernel.py, probs.py): what a task is, its producer, S of its tiles. The barriers and
the order between proxies are described in fwd_kernel.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from sparse_attn.shared_kv.hopper.core import copy_heads, copy_layout_for, load_ranges, new_barrier, tile_pointers

BN = 64  # keys of a tile


@gluon.jit
def task_of(task, rows, places, used, N: gl.constexpr, COMPRESSED: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr):
    """Row and group of heads of a task, its pairs of tiles (at least one, so that every task fills and frees q), its ranges (core.py)."""
    GROUPS: gl.constexpr = (N + 63) // 64
    row = rows - 1 - task // GROUPS  # the last queries see most: started first, the grid ends together
    ori_begin, ori_count, cmp_begin, cmp_count, slots = load_ranges(places, used, row, COMPRESSED)
    if not WINDOW:
        ori_count = 0
    ori_tiles = gl.cdiv(ori_count, BN)
    num_pairs = gl.maximum(gl.cdiv(ori_tiles + gl.cdiv(slots, BN), 2), 1)
    return row, task % GROUPS, num_pairs, (ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots)


@gluon.jit
def begins_alone(ranges, BN: gl.constexpr):
    """1 where a task's first tile has no partner: of an odd number of tiles, if there are more than one. 0 otherwise. The last pair is whole in
    any case, so that neither consumer can be through with a task before the other one has begun it."""
    tiles = ranges[0] + gl.cdiv(ranges[5], BN)
    return gl.where(tiles > 1, tiles % 2, 0)


@gluon.jit
def even_tile(i, alone):
    """The even tile of pair i; the odd one is the next."""
    return gl.maximum(2 * i - alone, 0)


@gluon.jit
def gather_tasks(
    q, ori_kv, cmp_kv, indices, places, used, rows, tasks, K, zero, q_s, k_s, q_full, q_empty, k_full, k_empty,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """The producer: q and the keys of all tasks. Without WINDOW the compressed keys alone (probs.py)."""
    DP: gl.constexpr = D // 4
    layout: gl.constexpr = copy_layout_for(DP)
    n = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, DP, layout=gl.SliceLayout(0, layout))
    empty_phase = 1  # the first wait on an "empty" barrier must pass at once
    odd_phase = 1  # of the odd tile's, which a tile alone leaves alone
    q_phase = 1
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        row, group, num_pairs, ranges = task_of(task, rows, places, used, N, COMPRESSED, WINDOW, BN)
        first_slot = row.to(gl.int64) * K
        mbarrier.wait(q_empty, q_phase)
        for part in gl.static_range(4):
            copy_heads(q, row, group, part * DP, q_s, zero + part, q_full[part], N, D, DP)
        alone = begins_alone(ranges, BN)
        for i in range(num_pairs):
            z = i * zero
            ptrs, valid = tile_pointers(ori_kv, cmp_kv, indices, first_slot, even_tile(i, alone), n, d, ranges, D, COMPRESSED == 2, BN)
            for part in gl.static_range(4):
                mbarrier.wait(k_empty[part], empty_phase)
                async_copy.async_copy_global_to_shared(k_s.index(z + part), ptrs + part * DP, mask=valid)
                async_copy.mbarrier_arrive(k_full[part], increment_count=False)
            empty_phase = empty_phase ^ 1
            if i + alone < num_pairs:  # beside a tile alone, the next pair's odd tile, and so on
                odd = even_tile(i + alone, alone) + 1
                ptrs, valid = tile_pointers(ori_kv, cmp_kv, indices, first_slot, odd, n, d, ranges, D, COMPRESSED == 2, BN)
                for part in gl.static_range(4):
                    mbarrier.wait(k_empty[4 + part], odd_phase)
                    async_copy.async_copy_global_to_shared(k_s.index(z + 4 + part), ptrs + part * DP, mask=valid)
                    async_copy.mbarrier_arrive(k_full[4 + part], increment_count=False)
                odd_phase = odd_phase ^ 1
        q_phase = q_phase ^ 1


@gluon.jit
def free(bar):
    """Every thread of a consumer says for itself that it is through with what bar guards: mbarrier.arrive would bring the warpgroup together
    first. Nothing that this thread has written is handed over by it."""
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def four_barriers(count: gl.constexpr):
    return (new_barrier(count), new_barrier(count), new_barrier(count), new_barrier(count))


@gluon.jit
def new_copy_barriers():
    """q_full, q_empty, k_full, k_empty between gather_tasks and its two consumers."""
    q_full = four_barriers(128)
    q_empty = new_barrier(256)
    a, b, c, d = four_barriers(128)
    e, f, g, h = four_barriers(128)
    k_full = (a, b, c, d, e, f, g, h)
    a, b, c, d = four_barriers(128)
    e, f, g, h = four_barriers(128)
    return q_full, q_empty, k_full, (a, b, c, d, e, f, g, h)


@gluon.jit
def issue_scores(X: gl.constexpr, z, q_s, k_s, k_full, phase, s_zero):
    """S = q K^T of the even (X = 0) or odd tile of a pair, part by part of D as they arrive; issued and not waited for."""
    s = s_zero
    for part in gl.static_range(4):
        mbarrier.wait(k_full[4 * X + part], phase)
        fence_async_shared()
        s = warpgroup_mma(q_s.index(z + part), k_s.index(z + 4 * X + part).permute((1, 0)), s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def scores(X: gl.constexpr, z, q_s, k_s, k_full, phase, s_zero):
    s = issue_scores(X, z, q_s, k_s, k_full, phase, s_zero)
    return warpgroup_mma_wait(0, deps=[s])
