"""The kernels of the portable backward: what they compute and why in these steps is said in bwd.py, which launches them."""

import triton
import triton.language as tl

from kernel_runtime.kernels import dot
from sparse_attn.shared_kv.core import (
    load_ranges,
    load_rows,
    range_rows,
    selected_rows,
    store_rows,
    tile_rows,
    used_slots_ascend,
    zero_tile,
)


@triton.jit
def weights(
    q0, q1, do0, do1, k0, k1, seen, delta, lse2, log_count, scale,
    HALVES: tl.constexpr, DENSE: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """P and scale * dZ of a tile in the keys' dtype."""
    s = dot(q0, tl.trans(k0), tl.zeros([BH, BN], tl.float32))
    if HALVES == 2:
        s = dot(q1, tl.trans(k1), s)
    dp = dot(do0, tl.trans(k0), tl.zeros([BH, BN], tl.float32))
    if HALVES == 2:
        dp = dot(do1, tl.trans(k1), dp)
    z = s * (scale * 1.4426950408889634) - lse2[:, None]
    if DENSE:
        z += log_count[None, :]  # the weight of an entry that is listed several times, all at once
    p = tl.where(seen[None, :], tl.exp2(z), 0.0)
    dz = p * (dp - delta[:, None]) * scale
    return p.to(k0.dtype), dz.to(k0.dtype)


@triton.jit
def gradient_tile(
    keys, key_rows, seen, q0, q1, do0, do1, delta, lse2, acc0, acc1, p_out, dz_out, slot_row, log_count, h, on, scale, always,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HALVES: tl.constexpr, EVEN: tl.constexpr, DENSE: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """A tile of keys: its part of dq (acc0 and acc1, the halves of D), and P^T and scale * dZ^T of its slots to p_out and dz_out.

    APART: P and dZ from a branch that is always taken, as S in the forward (fwd.attend), so that the warpgroups share their rows. D is in
    one piece there: a second half would continue the first one's product.
    """
    d = tl.arange(0, BD)
    k0 = load_rows(keys, key_rows, seen, d, D, EVEN)
    k1 = k0
    if HALVES == 2:
        k1 = load_rows(keys, key_rows, seen, BD + d, D, EVEN)
    if APART:
        p = tl.zeros([BH, BN], k0.dtype)
        dz = tl.zeros([BH, BN], k0.dtype)
        if always >= 0:
            p, dz = weights(q0, q1, do0, do1, k0, k1, seen, delta, lse2, log_count, scale, HALVES, DENSE, BH, BN)
    else:
        p, dz = weights(q0, q1, do0, do1, k0, k1, seen, delta, lse2, log_count, scale, HALVES, DENSE, BH, BN)
    acc0 = dot(dz, k0, acc0)
    if HALVES == 2:
        acc1 = dot(dz, k1, acc1)
    # keys past the range or the list have no slot of their own: nothing may be written for them. What is written is read by the next kernels
    # alone, long after it would have pushed the keys out of the cache.
    mask = seen[:, None] & on[None, :]
    offset = slot_row[:, None] * N + h[None, :]
    tl.store(p_out + offset, tl.trans(p), mask=mask, eviction_policy="evict_first")
    tl.store(dz_out + offset, tl.trans(dz), mask=mask, eviction_policy="evict_first")
    return acc0, acc1


@triton.jit
def dq_task(
    task,
    q, ori_kv, cmp_kv, indices, places, used, log_counts, out, dout, lse, dq, delta_out, p_out, dz_out, row0, rows, K, window_slots, slots, scale,
    N: tl.constexpr, D: tl.constexpr, COMPRESSED: tl.constexpr, DENSE: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HALVES: tl.constexpr, BK: tl.constexpr, ASCEND: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """One query and a block of its heads. What a query that sees nothing (past the last document of a pack) has in q and dout reaches nothing:
    its dq is a sum of no terms, its delta is 0."""
    EVEN: tl.constexpr = D == BD * HALVES
    APART: tl.constexpr = ARCH == 90 and BH * BD * HALVES > 64 * 256
    HEAD_BLOCKS: tl.constexpr = (N + BH - 1) // BH
    n = tl.arange(0, BN)
    d = tl.arange(0, BD)
    local = (rows - 1 - task // HEAD_BLOCKS).to(tl.int64)
    row = row0 + local
    h = (task % HEAD_BLOCKS) * BH + tl.arange(0, BH)
    on = h < N
    heads = row * N + h
    if ASCEND:
        sees = tl.load(places + row * 4) < tl.load(places + row * 4 + 1)
        if COMPRESSED != 0:
            sees = sees | (tl.load(places + row * 4 + 2) < tl.load(places + row * 4 + 3))
    else:
        ori_begin, ori_count, cmp_begin, cmp_count, walked = load_ranges(places, used, row, COMPRESSED)
        sees = ori_count + walked > 0
    do0 = load_rows(dout, heads, on, d, D, EVEN)
    delta = tl.sum(do0.to(tl.float32) * load_rows(out, heads, on, d, D, EVEN).to(tl.float32), 1)
    q0 = load_rows(q, heads, on, d, D, EVEN)
    acc0 = zero_tile(task, BH, BD, ASCEND)
    if HALVES == 2:
        do1 = load_rows(dout, heads, on, BD + d, D, EVEN)
        delta += tl.sum(do1.to(tl.float32) * load_rows(out, heads, on, BD + d, D, EVEN).to(tl.float32), 1)
        q1 = load_rows(q, heads, on, BD + d, D, EVEN)
        acc1 = zero_tile(task, BH, BD, ASCEND)
    else:
        do1 = do0
        q1 = q0
        acc1 = zero_tile(task, BH, 1, ASCEND)
    tl.store(delta_out + heads, tl.where(sees, delta, 0.0), mask=on)
    lse2 = tl.load(lse + heads, mask=on, other=float("inf")) * 1.4426950408889634
    slot_row = local * slots
    if ASCEND:  # a loop a tensor: a pointer cannot be chosen there
        begin = tl.load(places + row * 4)
        end = tl.load(places + row * 4 + 1)
        for key in range(begin, end, BN):
            key_rows, seen = range_rows(begin, key + n, end)
            acc0, acc1 = gradient_tile(
                ori_kv, key_rows, seen, q0, q1, do0, do1, delta, lse2, acc0, acc1, p_out, dz_out, slot_row + (key - begin) + n, 0.0,
                h, on, scale, rows, N, D, BD, HALVES, EVEN, False, BH, BN, APART,
            )  # fmt: skip
        slot_row += window_slots
        if COMPRESSED == 1:
            begin = tl.load(places + row * 4 + 2)
            end = tl.load(places + row * 4 + 3)
            for key in range(begin, end, BN):
                key_rows, seen = range_rows(begin, key + n, end)
                acc0, acc1 = gradient_tile(
                    cmp_kv, key_rows, seen, q0, q1, do0, do1, delta, lse2, acc0, acc1, p_out, dz_out, slot_row + (key - begin) + n,
                    0.0, h, on, scale, rows, N, D, BD, HALVES, EVEN, False, BH, BN, APART,
                )  # fmt: skip
        if COMPRESSED == 2:
            begin = tl.load(places + row * 4 + 2)
            end = tl.load(places + row * 4 + 3)
            walked = used_slots_ascend(indices, row * K, K, end - begin, BK)
            for slot in range(0, walked, BN):
                key_rows, seen = selected_rows(indices, row * K, slot + n, walked, begin, end)
                acc0, acc1 = gradient_tile(
                    cmp_kv, key_rows, seen, q0, q1, do0, do1, delta, lse2, acc0, acc1, p_out, dz_out, slot_row + slot + n, 0.0,
                    h, on, scale, rows, N, D, BD, HALVES, EVEN, False, BH, BN, APART,
                )  # fmt: skip
    else:
        ori_tiles = (ori_count + BN - 1) // BN
        first = (local if DENSE else row) * K
        for tile in range(0, ori_tiles + (walked + BN - 1) // BN):
            keys, key_rows, seen = tile_rows(
                ori_kv, cmp_kv, indices, first, tile, n, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, walked, COMPRESSED, BN
            )
            own = tile * BN + n
            log_count = 0.0
            if COMPRESSED != 0:
                window = tile < ori_tiles
                listed = own - ori_tiles * BN
                if DENSE:
                    log_count = tl.load(log_counts + first + listed, mask=(listed < walked) & (window == 0), other=0.0)
                    listed = tl.where(seen, key_rows.to(tl.int32) - cmp_begin, 0)
                own = tl.where(window, own, window_slots + listed)
            acc0, acc1 = gradient_tile(
                keys, key_rows, seen, q0, q1, do0, do1, delta, lse2, acc0, acc1, p_out, dz_out, slot_row + own, log_count, h, on, scale, rows,
                N, D, BD, HALVES, EVEN, DENSE, BH, BN, APART,
            )  # fmt: skip
    store_rows(dq, heads, on, d, acc0, D, EVEN)
    if HALVES == 2:
        store_rows(dq, heads, on, BD + d, acc1, D, EVEN)


@triton.jit(do_not_specialize=["tasks", "row0", "rows", "K", "window_slots", "slots", "scale"])
def attention_dq_kernel(
    q, ori_kv, cmp_kv, indices, places, used, log_counts, out, dout, lse, dq, delta_out, p_out, dz_out,
    tasks, row0, rows, K, window_slots, slots, scale,
    N: tl.constexpr, D: tl.constexpr, COMPRESSED: tl.constexpr, DENSE: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HALVES: tl.constexpr, BK: tl.constexpr, ASCEND: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Queries row0 to row0 + rows - 1. Slots of a query: window_slots for its window, then those of its compressed entries; with DENSE a
    slot for every entry there is, and lists of these queries alone that name each entry once (lists.py)."""
    if ASCEND:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            dq_task(
                task, q, ori_kv, cmp_kv, indices, places, used, log_counts, out, dout, lse, dq, delta_out, p_out, dz_out,
                row0, rows, K, window_slots, slots, scale, N, D, COMPRESSED, DENSE, BH, BN, BD, HALVES, BK, ASCEND, ARCH,
            )  # fmt: skip
    else:
        dq_task(
            tl.program_id(0), q, ori_kv, cmp_kv, indices, places, used, log_counts, out, dout, lse, dq, delta_out, p_out, dz_out,
            row0, rows, K, window_slots, slots, scale, N, D, COMPRESSED, DENSE, BH, BN, BD, HALVES, BK, ASCEND, ARCH,
        )  # fmt: skip


@triton.jit
def rows_up_to(bounds, row0, rows, limit, steps):
    """How many of the queries row0, ... have their bound (non-decreasing, 4 apart) at or below `limit`."""
    low = 0
    high = rows
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        below = tl.load(bounds + (row0 + tl.minimum(middle, rows - 1)).to(tl.int64) * 4) <= limit
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & (below == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["tasks", "keys", "row0", "rows", "first_slot", "slots", "steps", "splits"])
def range_dkv_kernel(
    q, dout, places, counts, p, dz, dkv, tasks, keys, row0, rows, first_slot, slots, steps, splits,
    N: tl.constexpr, D: tl.constexpr, COLUMN: tl.constexpr, LISTED: tl.constexpr, SPLIT: tl.constexpr,
    NH: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """What queries row0, ... give to a tile of BM keys and BD channels: added to dkv [keys, D] fp32, or, SPLIT, every splits-th block
    of their heads written to dkv [splits, keys, D]. COLUMN is the range's in places; LISTED: only keys with counts [queries, keys] above 0."""
    SLICES: tl.constexpr = (D + BD - 1) // BD
    EVEN: tl.constexpr = D % BD == 0
    BLOCKS: tl.constexpr = (N + NH - 1) // NH  # blocks of heads of a query
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        split = 0
        step = 1
        tile = task
        if SPLIT:
            split = task % splits
            step = splits
            tile = task // splits
        key0 = (tile // SLICES) * BM
        key = key0 + tl.arange(0, BM)
        d = (tile % SLICES) * BD + tl.arange(0, BD)
        inside = key < keys
        if SPLIT:
            acc = tl.zeros([BM, BD], tl.float32)
        else:
            acc = load_rows(dkv, key.to(tl.int64), inside, d, D, EVEN)
        first = rows_up_to(places + COLUMN + 1, row0, rows, key0, steps)  # before it ranges end at or before the tile
        # from it on they begin after the tile, or after all keys, as those of queries past the last document do
        last = rows_up_to(places + COLUMN, row0, rows, tl.minimum(key0 + BM, keys) - 1, steps)
        for i in range(first * BLOCKS + split, last * BLOCKS, step):
            row = (row0 + i // BLOCKS).to(tl.int64)
            h = (i % BLOCKS) * NH + tl.arange(0, NH)
            on = h < N
            begin = tl.load(places + row * 4 + COLUMN)
            end = tl.load(places + row * 4 + COLUMN + 1)
            seen = (key >= begin) & (key < end)
            if LISTED:
                own = (row - row0) * (slots - first_slot) + key - begin
                seen = seen & (tl.load(counts + tl.where(seen, own, 0), mask=seen, other=0) > 0)
            slot = tl.where(seen, (row - row0) * slots + first_slot + key - begin, 0)
            mask = seen[:, None] & on[None, :]
            heads = row * N + h
            p_tile = tl.load(p + slot[:, None] * N + h[None, :], mask=mask, other=0.0)
            dz_tile = tl.load(dz + slot[:, None] * N + h[None, :], mask=mask, other=0.0)
            do_tile = load_rows(dout, heads, on, d, D, EVEN)
            q_tile = load_rows(q, heads, on, d, D, EVEN)
            acc = dot(p_tile, do_tile, acc)
            acc = dot(dz_tile, q_tile, acc)
        store_rows(dkv, (split * keys + key).to(tl.int64), inside, d, acc, D, EVEN)


@triton.jit(do_not_specialize=["tasks", "row0", "rows", "K", "first_slot", "slots"])
def selected_dkv_kernel(
    q, dout, indices, places, used, p, dz, target, tasks, row0, rows, K, first_slot, slots,
    N: tl.constexpr, D: tl.constexpr, PARTIAL: tl.constexpr, NH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    ASCEND: tl.constexpr,
):  # fmt: skip
    """One query and BD channels. PARTIAL: target [queries, K, D] gets a row for every slot that counts; else target [entries, D] fp32 is
    added to."""
    SLICES: tl.constexpr = (D + BD - 1) // BD
    EVEN: tl.constexpr = D % BD == 0
    n = tl.arange(0, BN)
    h = tl.arange(0, NH)
    on = h < N
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        d = (task % SLICES) * BD + tl.arange(0, BD)
        local = (rows - 1 - task // SLICES).to(tl.int64)
        row = row0 + local
        heads = row * N + h
        q_tile = load_rows(q, heads, on, d, D, EVEN)
        do_tile = load_rows(dout, heads, on, d, D, EVEN)
        begin = tl.load(places + row * 4 + 2)
        end = tl.load(places + row * 4 + 3)
        if ASCEND:
            walked = used_slots_ascend(indices, row * K, K, end - begin, BK)
        else:
            walked = tl.load(used + row)
        for slot0 in range(0, walked, BN):
            slot = slot0 + n
            key_rows, seen = selected_rows(indices, row * K, slot, walked, begin, end)
            offset = (local * slots + first_slot + slot)[:, None] * N + h[None, :]
            mask = seen[:, None] & on[None, :]
            v = dot(tl.load(p + offset, mask=mask, other=0.0), do_tile, tl.zeros([BN, BD], tl.float32))
            v = dot(tl.load(dz + offset, mask=mask, other=0.0), q_tile, v)
            if PARTIAL:
                store_rows(target, local * K + slot, seen, d, v, D, EVEN)
            else:
                mask = seen[:, None] if EVEN else seen[:, None] & (d < D)[None, :]
                tl.atomic_add(target + key_rows[:, None] * D + d[None, :], v, mask=mask, sem="relaxed")
