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

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernel_runtime.launch import TRITON_DTYPE, Spec
from sparse_attn.shared_kv.fwd import ALL, SELECTED, mode_of
from sparse_attn.shared_kv.hopper.core import (
    HEADS,
    copy_heads,
    copy_layout_for,
    laid_out,
    load_ranges,
    new_barrier,
    programs,
    store_heads,
    tile_keys,
    tile_pointers,
)
from sparse_attn.shared_kv.hopper.dense import dense_supports
from sparse_attn.shared_kv.hopper.finish import finished, store_through
from sparse_attn.shared_kv.places import places_of
from sparse_attn.shared_kv.used import used_of

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
def pair_is_whole(i, ranges, BN: gl.constexpr):
    """Whether pair i has an odd tile: the last of an odd number of tiles has no partner, and nothing is loaded or computed for one. The first
    pair counts as whole in any case, so that neither consumer can be through with a task before the other one has begun it."""
    return (i == 0) | (2 * i + 1 < ranges[0] + gl.cdiv(ranges[5], BN))


@gluon.jit
def gather_tasks(
    q, ori_kv, cmp_kv, indices, places, used, rows, tasks, K, zero, q_s, k_s, q_full, q_empty, k_full, k_empty,
    N: gl.constexpr, D: gl.constexpr, COMPRESSED: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """The producer: q and the keys of all tasks. Without WINDOW the compressed keys alone (probs.py)."""
    DH: gl.constexpr = D // 2
    layout: gl.constexpr = copy_layout_for(DH)
    n = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, DH, layout=gl.SliceLayout(0, layout))
    empty_phase = 1  # the first wait on an "empty" barrier must pass at once
    q_phase = 1
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        row, group, num_pairs, ranges = task_of(task, rows, places, used, N, COMPRESSED, WINDOW, BN)
        first_slot = row.to(gl.int64) * K
        mbarrier.wait(q_empty, q_phase)
        for half in gl.static_range(2):
            copy_heads(q, row, group, half * DH, q_s, zero + half, q_full[half], N, D, DH)
        for i in range(num_pairs):
            z = i * zero
            for tile in gl.static_range(2):
                ptrs, valid = tile_pointers(ori_kv, cmp_kv, indices, first_slot, 2 * i + tile, n, d, ranges, D, COMPRESSED == 2, BN)
                for half in gl.static_range(2):
                    mbarrier.wait(k_empty[2 * tile + half], empty_phase)
                    if tile == 0:
                        async_copy.async_copy_global_to_shared(k_s.index(z + half), ptrs + half * DH, mask=valid)
                    elif pair_is_whole(i, ranges, BN):
                        async_copy.async_copy_global_to_shared(k_s.index(z + 2 + half), ptrs + half * DH, mask=valid)
                    async_copy.mbarrier_arrive(k_full[2 * tile + half], increment_count=False)
            empty_phase = empty_phase ^ 1
        q_phase = q_phase ^ 1


@gluon.jit
def new_copy_barriers():
    """q_full, q_empty, k_full, k_empty between gather_tasks and its two consumers."""
    q_full = (new_barrier(128), new_barrier(128))
    q_empty = new_barrier(2)
    k_full = (new_barrier(128), new_barrier(128), new_barrier(128), new_barrier(128))
    k_empty = (new_barrier(1), new_barrier(1), new_barrier(1), new_barrier(1))
    return q_full, q_empty, k_full, k_empty


@gluon.jit
def issue_scores(X: gl.constexpr, z, q_s, k_s, k_full, phase, s_zero):
    """S = q K^T of the even (X = 0) or odd tile of a pair, D half by D half as they arrive; issued and not waited for."""
    mbarrier.wait(k_full[2 * X], phase)
    fence_async_shared()
    s = warpgroup_mma(q_s.index(z), k_s.index(z + 2 * X).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    mbarrier.wait(k_full[2 * X + 1], phase)
    fence_async_shared()
    return warpgroup_mma(q_s.index(z + 1), k_s.index(z + 2 * X + 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def scores(X: gl.constexpr, z, q_s, k_s, k_full, phase, s_zero):
    s = issue_scores(X, z, q_s, k_s, k_full, phase, s_zero)
    return warpgroup_mma_wait(0, deps=[s])


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


@cache
def forward_spec(dtype: torch.dtype, N: int, D: int, compressed: int, sinks: bool) -> Spec:
    x = f"*{TRITON_DTYPE[dtype]}"
    return Spec(
        hopper_fwd_kernel,
        types={
            "q": x, "ori_kv": x, "cmp_kv": x, "indices": "*i32", "sinks": "*fp32", "places": "*i32", "used": "*i32", "out": x,
            "lse": "*fp32", "rows": "i32", "tasks": "i32", "K": "i32", "zero": "i32", "scale": "fp32",
        },
        consts={"N": N, "D": D, "COMPRESSED": compressed, "SINKS": sinks, "BN": BN},
        targets=("cuda",),
    )  # fmt: skip


def attention_fwd(
    q: torch.Tensor, ori_kv: torch.Tensor, cmp_kv: torch.Tensor | None, cmp_indices: torch.Tensor | None, sinks: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_ori: torch.Tensor | None, cu_cmp: torch.Tensor | None, q_offsets: torch.Tensor | None,
    q_offset: int | None, scale: float, cmp_ratio: int, window: int | None, return_cmp_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """out, lse, cmp_probs of the op shared_kv_fwd, for calls that hopper_supports takes."""
    N, D = q.shape[-2:]
    K = cmp_indices.shape[-1] if cmp_indices is not None else 0
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    probs = torch.zeros(cmp_indices.shape if return_cmp_probs and cmp_indices is not None else 0, dtype=torch.float32, device=q.device)
    rows, mode = lse.numel() // N, mode_of(cmp_kv, cmp_indices)
    if not rows:
        return out, lse, probs
    places = places_of(q, ori_kv, cmp_kv, cu_q, cu_ori, cu_cmp, q_offsets, q_offset, cmp_ratio, window)
    entry_kv = cmp_kv if mode == ALL else None  # lists without a slot see no entry, whatever there is of them
    # the dense kernel takes the maximum before the scale
    if mode != SELECTED and scale > 0 and dense_supports(D, window, 0 if entry_kv is None else entry_kv.shape[-2]):
        from sparse_attn.shared_kv.hopper.dense_fwd import dense_forward

        dense_forward(q, ori_kv, entry_kv, sinks, places, out, lse, scale)
        return out, lse, probs
    # a tensor that the mode does not read is stood in for by another of its type
    q, ori_kv = laid_out(q), laid_out(ori_kv)
    cmp_kv = q if cmp_kv is None else laid_out(cmp_kv)
    indices = places if cmp_indices is None else cmp_indices.contiguous()
    used = used_of(indices, places) if mode == SELECTED else places
    spec = forward_spec(q.dtype, N, D, mode, sinks is not None)
    sinks = lse if sinks is None else sinks.contiguous()
    tasks = rows * triton.cdiv(N, HEADS)
    spec.launch((programs(tasks, q.device),), q, ori_kv, cmp_kv, indices, sinks, places, used, out, lse, rows, tasks, K, 0, scale)
    if return_cmp_probs and mode == SELECTED:  # otherwise there is no entry that a slot could hold
        from sparse_attn.shared_kv.hopper.probs import slot_probs

        probs = slot_probs(q, cmp_kv, indices, places, used, lse, scale)
    return out, lse, probs
