"""Kernel 1 of the dense backward for sm_90: P, dZ and dq where a query's ranges are contiguous and short. Kernel 2: dense_dkv.py.

The forward's structure (dense_fwd.py): steps of 8 queries, their keys in a ring of 144 slots, entries resident; two consumers with a tile of 64
(query, head) rows in turn, a producer of q and dO for both, a producer of keys. S and dP of all keys are in registers at once, so delta is the
row sum of P dP, in fp32 and before anything is rounded: out is not read, and dq of a query with few keys does not suffer from the rounding of out.
q and dO come in pairs of chunks, two of q and the same two of dO in turn, so 256 bytes of a row at once, in a ring of five pairs of slots (SWA) or
three (with entries). dq leaves from the registers of the product, which the lanes of a warp exchange in shuffles.

P and dZ leave in 16 bits, [rows, 144] in slots key % 144 and [rows, 32] for the entries, zero where a row does not see a key; columns of a block of
16 stand in the order 4 lane + 2 j + e for 8 j + 2 lane + e, so that a thread writes 8 bytes and a row 32 at a time, without an exchange.

Shared memory at D = 512, 225 KB: keys 144; q and dO 80, or 48 and entries 32.
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
    rows_read,
    take_keys,
)
from sparse_attn.shared_kv.hopper.dense_fwd import one_query
from sparse_attn.shared_kv.hopper.dense_stream import fill


@gluon.jit
def new_barriers(count: gl.constexpr, PAIRS: gl.constexpr):
    """One a pair of slots, in one allocation, as which pair a chunk takes is not known at compile time (cf. core.new_barrier)."""
    bars = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PAIRS):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def pair_producer(
    q, do, rows, slots, full_0, full_1, empty, facts, told, N: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr
):  # fmt: skip
    """Two chunks of q, the same two of dO, and so on, of all tiles in order, in the pairs of slots in turn; barriers as in dense.q_producer."""
    query, last_query = queries_of_program(rows)
    turn = 0
    step = 0
    use = 0
    while query < last_query:
        last, _, _ = hear_step(step, facts, told)
        tiles = gl.cdiv((last - query) * N, 64)
        row_end = rows_read(step, facts, N)
        for tile in range(tiles):
            row = query.to(gl.int64) * N + tile * 64
            left = (row_end - row).to(gl.int32)
            q_row = q + row * D
            do_row = do + row * D
            for c in range(D // CHUNK):
                x = gl.where(c % 2 == 0, q_row, do_row) + c // 2 * (2 * CHUNK)
                fill(use, x, x + CHUNK, left, left, turn, slots, full_0, full_1, empty, D, PAIRS)
                use += 1
            turn += 1
        step += 1
        query = last


@gluon.jit
def products_done(LEFT: gl.constexpr, sa, sb, se, da, db, de, ENTRIES: gl.constexpr):
    if ENTRIES > 0:
        sa, sb, se, da, db, de = warpgroup_mma_wait(LEFT, deps=[sa, sb, se, da, db, de])
    else:
        sa, sb, da, db = warpgroup_mma_wait(LEFT, deps=[sa, sb, da, db])
    return sa, sb, se, da, db, de


@gluon.jit
def score_chunk(
    j: gl.constexpr, g, sa, sb, se, da, db, de, use, bits, z, ring_a, ring_b, entry_s, slots, full, empty,
    ENTRIES: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """S += q K^T (even j) or dP += dO K^T (odd j) over two chunks of a group of four, which are use number `use` of the ring. Bit i of `bits` is the
    parity that this consumer waits for next at pair i. A pair of slots is free again when the next one's products have been issued and its own
    are done."""
    PRODUCTS: gl.constexpr = 6 if ENTRIES else 4
    at = g * 4 + j // 2 * 2 + z
    pair = use % PAIRS
    mbarrier.wait(full.index(pair), (bits >> pair) & 1)
    bits = bits ^ (1 << pair)
    fence_async_shared()
    for k in gl.static_range(2):
        x = slots.index(2 * pair + k)
        if j % 2 == 0:
            sa = warpgroup_mma(x, ring_a.index(at + k).permute((1, 0)), sa, is_async=True)
            sb = warpgroup_mma(x, ring_b.index(at + k).permute((1, 0)), sb, is_async=True)
            if ENTRIES > 0:
                se = warpgroup_mma(x, entry_s.index(at + k).permute((1, 0)), se, is_async=True)
        else:
            da = warpgroup_mma(x, ring_a.index(at + k).permute((1, 0)), da, is_async=True)
            db = warpgroup_mma(x, ring_b.index(at + k).permute((1, 0)), db, is_async=True)
            if ENTRIES > 0:
                de = warpgroup_mma(x, entry_s.index(at + k).permute((1, 0)), de, is_async=True)
    if PAIRS < 5:
        # freed at once: with three pairs, one that is held until the next has come leaves two on their way
        sa, sb, se, da, db, de = products_done(0, sa, sb, se, da, db, de, ENTRIES)
        mbarrier.arrive(empty.index(pair), count=1)
    else:
        if j > 0:
            sa, sb, se, da, db, de = products_done(PRODUCTS, sa, sb, se, da, db, de, ENTRIES)
            mbarrier.arrive(empty.index((use + PAIRS - 1) % PAIRS), count=1)
        if j == 3:  # no product may run on into the next pass of the loop
            sa, sb, se, da, db, de = products_done(0, sa, sb, se, da, db, de, ENTRIES)
            mbarrier.arrive(empty.index(pair), count=1)
    return sa, sb, se, da, db, de, bits


@gluon.jit
def dq_chunk(c: gl.constexpr, g, za, zb, ze, o_zero, z, ring_a, ring_b, entry_s, ENTRIES: gl.constexpr):
    at = g * 4 + c + z
    o = warpgroup_mma(za, ring_a.index(at), o_zero, use_acc=False, is_async=True)
    o = warpgroup_mma(zb, ring_b.index(at), o, is_async=True)
    if ENTRIES > 0:
        o = warpgroup_mma(ze, entry_s.index(at), o, is_async=True)
    return o


@gluon.constexpr_function
def block_layout(W):
    """Of [64, W] with the columns of every block of 16 in the order of store_blocks: a thread's four stand side by side."""
    high = [[0, 16 << i] for i in range((W // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *high, [8, 0]], lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, W],
    )


@gluon.jit
def store_blocks(x, row, row_end, v, first: gl.constexpr, STRIDE: gl.constexpr, ALL_ON: gl.constexpr):
    """v [64, W] to columns from `first` on of x [rows, STRIDE]: column 8 j + 2 lane + e of a block of 16 goes to 4 lane + 2 j + e."""
    W: gl.constexpr = v.shape[1]
    layout: gl.constexpr = block_layout(W)
    v = v.reshape([64, W // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, W])
    v = gl.convert_layout(v, layout, assert_trivial=True)
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    n = first + gl.arange(0, W, layout=gl.SliceLayout(0, layout))
    ptrs = x + r[:, None] * STRIDE + n[None, :]
    if ALL_ON:
        gl.store(ptrs, v)
    else:
        gl.store(ptrs, v, mask=(r < row_end)[:, None])


@gluon.jit
def store_dq(ptrs, v, on, ALL_ON: gl.constexpr):
    """v [64, CHUNK] from the registers of the product: a thread gets 16 bytes, the lanes of a row 64, by exchanges in the warp."""
    v = gl.convert_layout(gl.convert_layout(v, turned(CHUNK, 0)), turned(CHUNK, 1))
    v = gl.convert_layout(v, turned(CHUNK, 2))
    if ALL_ON:
        gl.store(ptrs, v)
    else:
        gl.store(ptrs, v, mask=on[:, None])


@gluon.jit
def in_window(slot, begin, stop, rows: gl.constexpr, ONE_QUERY: gl.constexpr):
    """Which slots of the ring hold keys of [begin, stop), as a tensor that broadcasts over rows and slots. How far a slot is past that of `begin`,
    round the ring, is the smaller one of two unsigned numbers."""
    if ONE_QUERY:
        ahead = (slot - begin % RING).to(gl.uint32)
        ahead = gl.minimum(ahead, ahead + RING)
        return (ahead < (stop - begin).to(gl.uint32))[None, :]
    else:
        ahead = (slot[None, :] - gl.convert_layout(begin % RING, rows)[:, None]).to(gl.uint32)
        ahead = gl.minimum(ahead, ahead + RING)
        return ahead < gl.convert_layout(stop - begin, rows)[:, None].to(gl.uint32)


@gluon.jit
def tile_backward(
    row, row_end, query, step, cmp_begin, use, bits, z, zero, lse, dq, p, dz, pe, dze, delta, places, scale, ring_a, ring_b, entry_s,
    slots, full, empty, facts, N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """One tile of 64 rows, whose first chunk is number `use` of all."""
    TILES: gl.constexpr = 1 if ENTRIES else 0
    BE: gl.constexpr = max(16, ENTRIES)
    ONE_QUERY: gl.constexpr = one_query(N)
    dtype: gl.constexpr = dq.dtype.element_ty
    a_layout: gl.constexpr = product_layout(RING_A)
    b_layout: gl.constexpr = product_layout(RING_B)
    e_layout: gl.constexpr = product_layout(BE)
    o_layout: gl.constexpr = product_layout(CHUNK)
    z_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    a_rows: gl.constexpr = gl.SliceLayout(1, a_layout)
    b_rows: gl.constexpr = gl.SliceLayout(1, b_layout)
    e_rows: gl.constexpr = gl.SliceLayout(1, e_layout)
    r = row + gl.arange(0, 64, layout=a_rows)
    on = r < row_end
    # asked for before they are needed; rows past the end get an LSE of +inf, so P = 0
    lse2 = gl.load(lse + r, mask=on, other=float("inf")) * 1.4426950408889634
    if not ONE_QUERY:
        where = places + r // N * 4
        begin = gl.load(where, mask=on, other=0)
        stop = gl.load(where + 1, mask=on, other=0)
        seen = stop
        if ENTRIES > 0:
            seen = gl.load(where + 3, mask=on, other=0) - cmp_begin
    sa = gl.zeros([64, RING_A], gl.float32, layout=a_layout)
    sb = gl.zeros([64, RING_B], gl.float32, layout=b_layout)
    se = gl.zeros([64, BE], gl.float32, layout=e_layout)
    da = gl.zeros([64, RING_A], gl.float32, layout=a_layout)
    db = gl.zeros([64, RING_B], gl.float32, layout=b_layout)
    de = gl.zeros([64, BE], gl.float32, layout=e_layout)
    # A zero that is another one in every pass. Were it the same, descriptors of all chunks would be made before the loop, for which there are no
    # registers, and what is spilled instead is not in L1, which shared memory leaves too little of (NOTES_dense_bwd.md)
    for g in range(D // CHUNK // 4):
        z = (z + g) * zero
        for j in gl.static_range(4):
            sa, sb, se, da, db, de, bits = score_chunk(
                j, g, sa, sb, se, da, db, de, use + g * 4 + j, bits, z, ring_a, ring_b, entry_s, slots, full, empty, ENTRIES, PAIRS
            )
    if ONE_QUERY:
        i = (row // N).to(gl.int32) - query
        begin = number(facts[1], i, step)
        stop = number(facts[2], i, step)
        seen = 0
        if ENTRIES > 0:
            seen = number(facts[3], i, step)
    scale2 = scale * 1.4426950408889634
    na = gl.arange(0, RING_A, layout=gl.SliceLayout(0, a_layout))
    nb = RING_A + gl.arange(0, RING_B, layout=gl.SliceLayout(0, b_layout))
    # both with exponent and weight at once: what is not seen is 0 whatever the product made of it
    sa = gl.where(in_window(na, begin, stop, a_rows, ONE_QUERY), gl.exp2(sa * scale2 - lse2[:, None]), 0.0)
    sb = gl.where(in_window(nb, begin, stop, b_rows, ONE_QUERY), gl.exp2(sb * scale2 - gl.convert_layout(lse2, b_rows)[:, None]), 0.0)
    # out of the registers before dZ is made
    store_blocks(p, row, row_end, sa.to(dtype), 0, RING, ONE_QUERY)
    store_blocks(p, row, row_end, sb.to(dtype), RING_A, RING, ONE_QUERY)
    w = gl.sum(sa * da, 1) + gl.convert_layout(gl.sum(sb * db, 1), a_rows)
    if TILES == 1:
        entry = gl.arange(0, BE, layout=gl.SliceLayout(0, e_layout))
        if ONE_QUERY:
            visible = (entry < seen)[None, :]
        else:
            visible = entry[None, :] < gl.convert_layout(seen, e_rows)[:, None]
        se = gl.where(visible, gl.exp2(se * scale2 - gl.convert_layout(lse2, e_rows)[:, None]), 0.0)
        w += gl.convert_layout(gl.sum(se * de, 1), a_rows)
    gl.store(delta + r, w, mask=on)
    ws = w * scale
    za = (sa * (da * scale - ws[:, None])).to(dtype)
    zb = (sb * (db * scale - gl.convert_layout(ws, b_rows)[:, None])).to(dtype)
    ze = zb
    if TILES == 1:
        ze = (se * (de * scale - gl.convert_layout(ws, e_rows)[:, None])).to(dtype)
    store_blocks(dz, row, row_end, za, 0, RING, ONE_QUERY)
    store_blocks(dz, row, row_end, zb, RING_A, RING, ONE_QUERY)
    if TILES == 1:
        store_blocks(pe, row, row_end, se.to(dtype), 0, ENTRIES, ONE_QUERY)
        store_blocks(dze, row, row_end, ze, 0, ENTRIES, ONE_QUERY)
    za = gl.convert_layout(za, z_layout)
    zb = gl.convert_layout(zb, z_layout)
    if TILES == 1:
        ze = gl.convert_layout(ze, z_layout)
    # dq of one chunk while the last one is written out
    out: gl.constexpr = turned(CHUNK, 2)
    rq = row + gl.arange(0, 64, layout=gl.SliceLayout(1, out))
    target = dq + rq[:, None] * D + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, out))[None, :]
    o_zero = gl.zeros([64, CHUNK], gl.float32, layout=o_layout)
    for g in range(D // CHUNK // 4):
        z = (z + g) * zero
        current = dq_chunk(0, g, za, zb, ze, o_zero, z, ring_a, ring_b, entry_s, ENTRIES)
        for c in gl.static_range(4):
            if c < 3:
                upcoming = dq_chunk(c + 1, g, za, zb, ze, o_zero, z, ring_a, ring_b, entry_s, ENTRIES)
                v = warpgroup_mma_wait(2 + TILES, deps=[current])
                current = upcoming
            else:
                v = warpgroup_mma_wait(0, deps=[current])
            store_dq(target + (g * 4 + c) * CHUNK, v.to(dtype), rq < row_end, ONE_QUERY)
    return bits


@gluon.jit
def consumer(
    X: gl.constexpr, lse, dq, p, dz, pe, dze, delta, places, rows, zero, scale, ring_a, ring_b, entry_s, slots, full, empty, facts, told,
    k_full, k_empty, N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    query, last_query = queries_of_program(rows)
    tiles_before = 0
    bits = 0
    step = 0
    while query < last_query:
        last, _, cmp_begin = hear_step(step, facts, told)
        tiles = gl.cdiv((last - query) * N, 64)
        row_end = last.to(gl.int64) * N
        take_keys(step, k_full)
        for tile in range((tiles_before & 1) ^ X, tiles, 2):
            row = query.to(gl.int64) * N + tile * 64
            z = tile * zero  # opaque zero, see dense_fwd.py
            bits = tile_backward(
                row, row_end, query, step, cmp_begin, (tiles_before + tile) * (D // CHUNK), bits, z, zero, lse, dq, p, dz, pe, dze,
                delta, places, scale, ring_a, ring_b, entry_s, slots, full, empty, facts, N, D, ENTRIES, PAIRS,
            )  # fmt: skip
        free_keys(step, k_empty)
        tiles_before += tiles
        step += 1
        query = last


@gluon.jit(do_not_specialize=["rows", "zero", "scale"])
def hopper_dense_pdz_kernel(
    q, ori_kv, cmp_kv, do, lse, places, dq, p, dz, pe, dze, delta, rows, zero, scale,
    N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr,
):  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()
    PAIRS: gl.constexpr = 3 if ENTRIES else 5  # what shared memory has room for
    dtype: gl.constexpr = q.dtype.element_ty
    ring_a, ring_b = new_ring(dtype, D)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CHUNK], dtype)
    slots = gl.allocate_shared_memory(dtype, [2 * PAIRS, 64, CHUNK], tile_layout)
    entry_s = slots  # stands in where there are none
    if ENTRIES > 0:
        entry_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ENTRIES, CHUNK], dtype)
        entry_s = gl.allocate_shared_memory(dtype, [D // CHUNK, ENTRIES, CHUNK], entry_layout)
    full_0, full_1, empty = new_barriers(64, PAIRS), new_barriers(64, PAIRS), new_barriers(1, PAIRS)
    facts, told = new_facts(), new_step_barriers(1)
    k_full, k_empty = new_step_barriers(64), new_step_barriers(2)
    gl.warp_specialize(
        [
            (consumer, (
                0, lse, dq, p, dz, pe, dze, delta, places, rows, zero, scale, ring_a, ring_b, entry_s, slots, full_0, empty, facts,
                told, k_full, k_empty, N, D, ENTRIES, PAIRS,
            )),
            (consumer, (
                1, lse, dq, p, dz, pe, dze, delta, places, rows, zero, scale, ring_a, ring_b, entry_s, slots, full_1, empty, facts,
                told, k_full, k_empty, N, D, ENTRIES, PAIRS,
            )),
            (pair_producer, (q, do, rows, slots, full_0, full_1, empty, facts, told, N, D, PAIRS)),
            (key_producer, (ori_kv, cmp_kv, places, rows, ring_a, ring_b, entry_s, facts, told, k_full, k_empty, D, ENTRIES)),
        ],
        [4, 2, 2],
        [232, 40, 40],
    )  # fmt: skip


@cache
def dense_pdz_spec(dtype: torch.dtype, N: int, D: int, entries: int) -> Spec:
    x = f"*{TRITON_DTYPE[dtype]}"
    return Spec(
        hopper_dense_pdz_kernel,
        types={
            **dict.fromkeys(("q", "ori_kv", "cmp_kv", "do"), x), "lse": "*fp32", "places": "*i32",
            **dict.fromkeys(("dq", "p", "dz", "pe", "dze"), x), "delta": "*fp32", "rows": "i32", "zero": "i32", "scale": "fp32",
        },
        consts={"N": N, "D": D, "ENTRIES": entries},
        targets=("cuda",),
        options={"launch_pdl": True},
    )  # fmt: skip
