"""Kernel 1 of the dense backward for sm_90 where a query sees more than 32 entries, but no more than 128 (dense_pdz.py up to 32).

The window's keys stay in shared memory as there, the entries stream (dense_stream.py). A tile of 64 rows goes through its q and dO twice, as S and dP
of all keys are more than the registers hold: with the entries and with the window's keys. P and dP of the entries wait in 16 bits for delta, the row
sum of P dP in fp32: of 64 entries in registers, of 128 in memory, dP in the place of dZ, which the same thread then makes of them. dq is made of all
keys, chunk by chunk of channels. So dP of the entries is rounded before delta is taken off, which costs what rounding dZ costs once more.

Shared memory at D = 512, 225 KB: keys 144, ring 80.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernel_runtime.launch import TRITON_DTYPE, Spec
from sparse_attn.shared_kv.hopper.bwd_kernel import turned
from sparse_attn.shared_kv.hopper.dense import (
    CHUNK,
    RING,
    RING_A,
    RING_B,
    free_keys,
    hear_step,
    key_producer,
    new_facts,
    new_ring,
    new_step_barriers,
    number,
    product_layout,
    queries_of_program,
    take_keys,
)
from sparse_attn.shared_kv.hopper.dense_fwd import one_query
from sparse_attn.shared_kv.hopper.dense_pdz import block_layout, in_window, new_barriers, store_blocks, store_dq
from sparse_attn.shared_kv.hopper.dense_stream import PAIRS, producer, take, uses_of


@gluon.constexpr_function
def copying_warps(ENTRIES):
    """Warps of the producer. A copy waits until the one before it has read its address, of which a thread has registers for one, some 45 cycles: four
    warps copy faster than two, but take 8 registers of every consumer's thread. Measured: 3 % of the whole backward at 16384 tokens; with 64
    entries nothing, and with up to 32 (dense_pdz.py) a loss of 2 %, as the consumers spill."""
    return 4 if ENTRIES == 128 else 2


@gluon.jit
def entry_tile(use, part: gl.constexpr, slots, wide, ENTRIES: gl.constexpr):
    """[ENTRIES, CHUNK] of the entries in a slot."""
    if ENTRIES == 128:
        return wide.index(use % PAIRS)
    else:
        return slots.index(2 * (use % PAIRS) + part)


@gluon.jit
def entry_chunk(j: gl.constexpr, g, se, de, use, bits, slots, wide, full, empty, ENTRIES: gl.constexpr):
    """S and dP of the entries in a group of four chunks that begins with slot `use`: both over chunk j; of 64 entries, S (even j) or dP over two."""
    PER: gl.constexpr = ENTRIES // 64  # slots of entries for two chunks
    STRIDE: gl.constexpr = 2 + PER  # of two chunks
    at = use + j // 2 * STRIDE
    if ENTRIES == 128:
        entry_use = at + j % 2 * 2
        pair_use = entry_use + 1
        bits = take(entry_use, bits, full)
    else:
        entry_use = at
        pair_use = at + 1 + j % 2
        if j % 2 == 0:
            bits = take(entry_use, bits, full)
    bits = take(pair_use, bits, full)
    fence_async_shared()
    pair = pair_use % PAIRS
    if ENTRIES == 128:
        k = wide.index(entry_use % PAIRS).permute((1, 0))
        se = warpgroup_mma(slots.index(2 * pair), k, se, is_async=True)
        de = warpgroup_mma(slots.index(2 * pair + 1), k, de, is_async=True)
    else:
        for part in gl.static_range(2):
            k = slots.index(2 * (entry_use % PAIRS) + part).permute((1, 0))
            if j % 2 == 0:
                se = warpgroup_mma(slots.index(2 * pair + part), k, se, is_async=True)
            else:
                de = warpgroup_mma(slots.index(2 * pair + part), k, de, is_async=True)
    # freed at once: a slot held until the next one has come is a slot that nothing is on its way to
    se, de = warpgroup_mma_wait(0, deps=[se, de])
    if ENTRIES == 128 or j % 2 == 1:
        mbarrier.arrive(empty.index(entry_use % PAIRS), count=1)
    mbarrier.arrive(empty.index(pair), count=1)
    return se, de, bits


@gluon.jit
def window_chunk(j: gl.constexpr, g, sa, sb, da, db, use, bits, z, ring_a, ring_b, slots, full, empty):
    """As dense_pdz.score_chunk, for slots that are not one after the other."""
    at = g * 4 + j // 2 * 2 + z
    pair = use % PAIRS
    bits = take(use, bits, full)
    fence_async_shared()
    for k in gl.static_range(2):
        x = slots.index(2 * pair + k)
        if j % 2 == 0:
            sa = warpgroup_mma(x, ring_a.index(at + k).permute((1, 0)), sa, is_async=True)
            sb = warpgroup_mma(x, ring_b.index(at + k).permute((1, 0)), sb, is_async=True)
        else:
            da = warpgroup_mma(x, ring_a.index(at + k).permute((1, 0)), da, is_async=True)
            db = warpgroup_mma(x, ring_b.index(at + k).permute((1, 0)), db, is_async=True)
    sa, sb, da, db = warpgroup_mma_wait(0, deps=[sa, sb, da, db])
    mbarrier.arrive(empty.index(pair), count=1)
    return sa, sb, da, db, bits


@gluon.jit
def block_pointers(x, row, STRIDE: gl.constexpr, W: gl.constexpr):
    layout: gl.constexpr = block_layout(W)
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, W, layout=gl.SliceLayout(0, layout))
    return x + r[:, None] * STRIDE + n[None, :], r


@gluon.jit
def dq_chunk(c: gl.constexpr, g, za, zb, ze, o_zero, z, use, bits, ring_a, ring_b, slots, wide, full, ENTRIES: gl.constexpr):
    at = g * 4 + c + z
    o = warpgroup_mma(za, ring_a.index(at), o_zero, use_acc=False, is_async=True)
    o = warpgroup_mma(zb, ring_b.index(at), o, is_async=True)
    if ENTRIES == 128:
        entry_use = use + g * 4 + c
        bits = take(entry_use, bits, full)
    else:
        entry_use = use + g * 2 + c // 2
        if c % 2 == 0:
            bits = take(entry_use, bits, full)
    fence_async_shared()
    o = warpgroup_mma(ze, entry_tile(entry_use, c % 2, slots, wide, ENTRIES), o, is_async=True)
    return o, bits


@gluon.jit
def free_entries(c: gl.constexpr, g, use, empty, ENTRIES: gl.constexpr):
    if ENTRIES == 128:
        mbarrier.arrive(empty.index((use + g * 4 + c) % PAIRS), count=1)
    elif c % 2 == 1:
        mbarrier.arrive(empty.index((use + g * 2 + c // 2) % PAIRS), count=1)


@gluon.jit
def tile_backward(
    row, row_end, query, step, cmp_begin, use, window_use, dq_use, bits, z, zero, lse, dq, p, dz, pe, dze, delta, places, scale, ring_a, ring_b,
    slots, wide, full, empty, facts, k_full, first_of_step, N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr,
):  # fmt: skip
    """One tile of 64 rows: its sweeps begin with slots `use` and window_use, the entries for dq with slot dq_use."""
    ONE_QUERY: gl.constexpr = one_query(N)
    CHUNKS: gl.constexpr = D // CHUNK
    uses: gl.constexpr = uses_of(D, ENTRIES)
    SWEEP: gl.constexpr = uses[0]
    dtype: gl.constexpr = dq.dtype.element_ty
    a_layout: gl.constexpr = product_layout(RING_A)
    b_layout: gl.constexpr = product_layout(RING_B)
    e_layout: gl.constexpr = product_layout(ENTRIES)
    o_layout: gl.constexpr = product_layout(CHUNK)
    z_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    a_rows: gl.constexpr = gl.SliceLayout(1, a_layout)
    b_rows: gl.constexpr = gl.SliceLayout(1, b_layout)
    e_rows: gl.constexpr = gl.SliceLayout(1, e_layout)
    r = row + gl.arange(0, 64, layout=a_rows)
    on = r < row_end
    lse2 = gl.load(lse + r, mask=on, other=float("inf")) * 1.4426950408889634
    if not ONE_QUERY:
        where = places + r // N * 4
        begin = gl.load(where, mask=on, other=0)
        stop = gl.load(where + 1, mask=on, other=0)
        seen = gl.load(where + 3, mask=on, other=0) - cmp_begin
    scale2 = scale * 1.4426950408889634
    # the entries
    se = gl.zeros([64, ENTRIES], gl.float32, layout=e_layout)
    de = gl.zeros([64, ENTRIES], gl.float32, layout=e_layout)
    for g in range(CHUNKS // 4):
        for j in gl.static_range(4):
            se, de, bits = entry_chunk(j, g, se, de, use + g * (SWEEP // (CHUNKS // 4)), bits, slots, wide, full, empty, ENTRIES)
    if ONE_QUERY:
        i = (row // N).to(gl.int32) - query
        begin = number(facts[1], i, step)
        stop = number(facts[2], i, step)
        seen = number(facts[3], i, step)
    entry = gl.arange(0, ENTRIES, layout=gl.SliceLayout(0, e_layout))
    if ONE_QUERY:
        visible = (entry < seen)[None, :]
    else:
        visible = entry[None, :] < gl.convert_layout(seen, e_rows)[:, None]
    se = gl.where(visible, gl.exp2(se * scale2 - gl.convert_layout(lse2, e_rows)[:, None]), 0.0)
    w = gl.convert_layout(gl.sum(se * de, 1), a_rows)
    store_blocks(pe, row, row_end, se.to(dtype), 0, ENTRIES, ONE_QUERY)
    PARKED: gl.constexpr = ENTRIES == 128  # of 64, dP stays in registers
    de_held = de.to(dtype)
    if PARKED:
        store_blocks(dze, row, row_end, de_held, 0, ENTRIES, ONE_QUERY)
    # the window
    if first_of_step:
        take_keys(step, k_full)
    sa = gl.zeros([64, RING_A], gl.float32, layout=a_layout)
    sb = gl.zeros([64, RING_B], gl.float32, layout=b_layout)
    da = gl.zeros([64, RING_A], gl.float32, layout=a_layout)
    db = gl.zeros([64, RING_B], gl.float32, layout=b_layout)
    for g in range(CHUNKS // 4):
        z = (z + g) * zero
        for j in gl.static_range(4):
            sa, sb, da, db, bits = window_chunk(
                j, g, sa, sb, da, db, window_use + g * 4 + j, bits, z, ring_a, ring_b, slots, full, empty,
            )  # fmt: skip
    na = gl.arange(0, RING_A, layout=gl.SliceLayout(0, a_layout))
    nb = RING_A + gl.arange(0, RING_B, layout=gl.SliceLayout(0, b_layout))
    sa = gl.where(in_window(na, begin, stop, a_rows, ONE_QUERY), gl.exp2(sa * scale2 - lse2[:, None]), 0.0)
    sb = gl.where(in_window(nb, begin, stop, b_rows, ONE_QUERY), gl.exp2(sb * scale2 - gl.convert_layout(lse2, b_rows)[:, None]), 0.0)
    # out of the registers before dZ is made
    store_blocks(p, row, row_end, sa.to(dtype), 0, RING, ONE_QUERY)
    store_blocks(p, row, row_end, sb.to(dtype), RING_A, RING, ONE_QUERY)
    w += gl.sum(sa * da, 1) + gl.convert_layout(gl.sum(sb * db, 1), a_rows)
    gl.store(delta + r, w, mask=on)
    ws = w * scale
    za = (sa * (da * scale - ws[:, None])).to(dtype)
    zb = (sb * (db * scale - gl.convert_layout(ws, b_rows)[:, None])).to(dtype)
    # what this thread has stored before
    pe_ptrs, rb = block_pointers(pe, row, ENTRIES, ENTRIES)
    dze_ptrs, _ = block_pointers(dze, row, ENTRIES, ENTRIES)
    if ONE_QUERY:
        pb = gl.load(pe_ptrs)
        if PARKED:
            dpb = gl.load(dze_ptrs)
    else:
        on_b = (rb < row_end)[:, None]
        pb = gl.load(pe_ptrs, mask=on_b, other=0.0)
        if PARKED:
            dpb = gl.load(dze_ptrs, mask=on_b, other=0.0)
    store_blocks(dz, row, row_end, za, 0, RING, ONE_QUERY)
    store_blocks(dz, row, row_end, zb, RING_A, RING, ONE_QUERY)
    wb = gl.convert_layout(ws, gl.SliceLayout(1, block_layout(ENTRIES)))
    if not PARKED:
        dpb = de_held.reshape([64, ENTRIES // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, ENTRIES])
        dpb = gl.convert_layout(dpb, block_layout(ENTRIES), assert_trivial=True)
    zbl = (pb.to(gl.float32) * (dpb.to(gl.float32) * scale - wb[:, None])).to(dtype)
    if ONE_QUERY:
        gl.store(dze_ptrs, zbl)
    else:
        gl.store(dze_ptrs, zbl, mask=on_b)
    ze = zbl.reshape([64, ENTRIES // 16, 4, 2, 2]).permute((0, 1, 3, 2, 4)).reshape([64, ENTRIES])
    ze = gl.convert_layout(ze, e_layout, assert_trivial=True)
    za = gl.convert_layout(za, z_layout)
    zb = gl.convert_layout(zb, z_layout)
    ze = gl.convert_layout(ze, z_layout)
    # dq of one chunk while the last one is written out
    out: gl.constexpr = turned(CHUNK, 2)
    rq = row + gl.arange(0, 64, layout=gl.SliceLayout(1, out))
    target = dq + rq[:, None] * D + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, out))[None, :]
    o_zero = gl.zeros([64, CHUNK], gl.float32, layout=o_layout)
    for g in range(CHUNKS // 4):
        z = (z + g) * zero
        current, bits = dq_chunk(0, g, za, zb, ze, o_zero, z, dq_use, bits, ring_a, ring_b, slots, wide, full, ENTRIES)
        for c in gl.static_range(4):
            v = warpgroup_mma_wait(0, deps=[current])
            free_entries(c, g, dq_use, empty, ENTRIES)
            if c < 3:
                current, bits = dq_chunk(c + 1, g, za, zb, ze, o_zero, z, dq_use, bits, ring_a, ring_b, slots, wide, full, ENTRIES)
            store_dq(target + (g * 4 + c) * CHUNK, v.to(dtype), rq < row_end, ONE_QUERY)
    return bits


@gluon.jit
def consumer(
    X: gl.constexpr, lse, dq, p, dz, pe, dze, delta, places, rows, zero, scale, ring_a, ring_b, slots, wide, full, empty, facts, told,
    k_full, k_empty, N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr,
):  # fmt: skip
    CHUNKS: gl.constexpr = D // CHUNK
    uses: gl.constexpr = uses_of(D, ENTRIES)
    SWEEP: gl.constexpr = uses[0]
    ALONE: gl.constexpr = uses[1]
    TILE: gl.constexpr = SWEEP + ALONE + CHUNKS
    query, last_query = queries_of_program(rows)
    tiles_before = 0
    bits = 0
    step = 0
    while query < last_query:
        last, _, cmp_begin = hear_step(step, facts, told)
        tiles = gl.cdiv((last - query) * N, 64)
        row_end = last.to(gl.int64) * N
        for tile in range((tiles_before & 1) ^ X, tiles, 2):
            row = query.to(gl.int64) * N + tile * 64
            z = tile * zero
            turn = tiles_before + tile
            # the first tile of all has no entries of a tile before between its sweeps, the last one's own come right after it
            before = gl.where(turn > 0, ALONE, 0)
            use = turn * TILE - before
            ends = (tile == tiles - 1) & (last >= last_query)
            own = (turn + 1) * TILE - ALONE + gl.where(ends, 0, SWEEP)
            bits = tile_backward(
                row, row_end, query, step, cmp_begin, use, use + SWEEP + before, own, bits, z, zero, lse, dq, p, dz, pe, dze, delta, places,
                scale, ring_a, ring_b, slots, wide, full, empty, facts, k_full, tile < 2, N, D, ENTRIES,
            )  # fmt: skip
        if tiles <= ((tiles_before & 1) ^ X):
            take_keys(step, k_full)  # no tile of this step: every phase is waited for all the same
        free_keys(step, k_empty)
        tiles_before += tiles
        step += 1
        query = last


@gluon.jit(do_not_specialize=["rows", "zero", "scale"])
def hopper_dense_pdz_streamed_kernel(
    q, ori_kv, cmp_kv, do, lse, places, dq, p, dz, pe, dze, delta, rows, zero, scale,
    N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr,
):  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()
    COPIERS: gl.constexpr = copying_warps(ENTRIES)
    dtype: gl.constexpr = q.dtype.element_ty
    ring_a, ring_b = new_ring(dtype, D)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CHUNK], dtype)
    slots = gl.allocate_shared_memory(dtype, [2 * PAIRS, 64, CHUNK], tile_layout)
    wide = slots._reinterpret(dtype, [PAIRS, 128, CHUNK], gl.NVMMASharedLayout.get_default_for([128, CHUNK], dtype))
    full_0, full_1, empty = new_barriers(32 * COPIERS, PAIRS), new_barriers(32 * COPIERS, PAIRS), new_barriers(1, PAIRS)
    facts, told = new_facts(), new_step_barriers(1)
    k_full, k_empty = new_step_barriers(64), new_step_barriers(2)
    gl.warp_specialize(
        [
            (consumer, (
                0, lse, dq, p, dz, pe, dze, delta, places, rows, zero, scale, ring_a, ring_b, slots, wide, full_0, empty, facts,
                told, k_full, k_empty, N, D, ENTRIES,
            )),
            (consumer, (
                1, lse, dq, p, dz, pe, dze, delta, places, rows, zero, scale, ring_a, ring_b, slots, wide, full_1, empty, facts,
                told, k_full, k_empty, N, D, ENTRIES,
            )),
            (producer, (q, do, cmp_kv, rows, slots, full_0, full_1, empty, facts, told, N, D, ENTRIES)),
            (key_producer, (ori_kv, cmp_kv, places, rows, ring_a, ring_b, slots, facts, told, k_full, k_empty, D, ENTRIES, False)),
        ],
        [4, COPIERS, 2],
        [232, 40, 40] if COPIERS == 2 else [224, 32, 32],
    )  # fmt: skip


@cache
def streamed_pdz_spec(dtype: torch.dtype, N: int, D: int, entries: int) -> Spec:
    x = f"*{TRITON_DTYPE[dtype]}"
    return Spec(
        hopper_dense_pdz_streamed_kernel,
        types={
            **dict.fromkeys(("q", "ori_kv", "cmp_kv", "do"), x), "lse": "*fp32", "places": "*i32",
            **dict.fromkeys(("dq", "p", "dz", "pe", "dze"), x), "delta": "*fp32", "rows": "i32", "zero": "i32", "scale": "fp32",
        },
        consts={"N": N, "D": D, "ENTRIES": entries},
        targets=("cuda",),
        options={"launch_pdl": True},
    )  # fmt: skip
