"""Kernel 2 of the dense backward for sm_90: the keys' gradients from P and dZ of kernel 1, dKV^T = q^T dZ + dO^T P. Key-stationary.

A program takes a run of queries and 128 channels, and walks through the run's tiles of 64 (query, head) rows with dKV^T [channels, 144
keys] of all keys in sight in registers, two consumers with half of the channels each. The 144 keys are nine blocks of 16, block k being the keys
[16 (base + k), 16 (base + k + 1)). When the next step's first key lies in a later block, the first block is written out, the others move down by
one (a renaming of registers) and the last starts from zero. So a key leaves the chip once a run, not once a query, and without atomics.

A key that runs before this one have seen as well goes to the run's halo [144, D] (slot key % 144), the others to dori; dense_totals.py then adds
the halos in the order of the runs. Entries are summed up over the whole run, [32, 64 or 128, D]. Hence the same bits on every run.

P and dZ [rows, 144] lie in slots key % 144, so that both kernels may cut the queries into steps as they like: block k of the window is block
(base + k) % 9 of memory. Within a block of 16, column 8 j + 2 lane + e stands at 4 lane + 2 j + e (what a thread of kernel 1 holds is 8 bytes).

Every tile is two items X^T Y: (q, dZ) and (dO, P), X [64, 128] and Y [64, 144 and the entries]. One producer fills a ring of two tiles.
Shared memory: 136 KB; with 32, 64, 128 entries 152, 168, 200.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernel_runtime.launch import TRITON_DTYPE, Spec
from sparse_attn.shared_kv.hopper.core import copy_layout_for, new_barrier
from sparse_attn.shared_kv.hopper.dense import CHUNK, RING, RING_A, product_layout

SLICE = gl.constexpr(128)  # channels of a program: with 256 and entries, registers spill
BLOCK = gl.constexpr(16)  # keys of a block
BLOCKS = gl.constexpr(9)
RUN_UNIT = gl.constexpr(16)  # queries of a run at least, but for the last ones: a step of a long sequence
LONGEST = gl.constexpr(32)  # queries of a step at most


@gluon.jit
def run_of(run, length, runs):
    """First and end of the queries of a run: `runs` runs to a batch of `length` queries, contiguous so that keys stay."""
    part = run % runs
    each = length // runs
    first = part * each + gl.minimum(part, length % runs)
    end = first + each + (part < length % runs)
    begin = run // runs * length
    return begin + first, begin + end


@gluon.jit
def key_step(query, run_end, places, ENTRIES: gl.constexpr):
    """The step that begins with `query`: its end, that of the queries of it that see anything (all or none), its first block of keys, the end of
    its keys. What queries that see nothing (past the last document of a pack) have in q and dO is not read: their steps have no tiles."""
    r = query + gl.arange(0, LONGEST, layout=gl.BlockedLayout([1], [32], [4], [0]))
    on = r < run_end
    at = places + r.to(gl.int64) * 4
    stop = gl.load(at + 1, mask=on, other=0)
    own = places + query.to(gl.int64) * 4
    low = gl.load(own)
    base = low // BLOCK
    fits = on & (stop <= (base + BLOCKS) * BLOCK)  # begins never go back
    blind = False
    if ENTRIES == 0:  # packs have no entries here
        blind = gl.load(own + 1) <= low
        fits = fits & ((stop <= gl.load(at, mask=on, other=0)) == blind)
    last = gl.maximum(gl.min(gl.where(fits, gl.minimum(run_end, query + LONGEST), r), 0), query + 1)  # the first always fits: no endless loop
    high = gl.max(gl.where(r < last, stop, 0), 0)
    return last, gl.where(blind, query, last), base, high


@gluon.jit
def fill_item(x, y, ye, row, row_end, slice0, base, stage, xs, ya, yb, ys, D: gl.constexpr, ENTRIES: gl.constexpr):
    """X [64, SLICE] of x and Y of y and ye, its blocks in the order of the window."""
    x_layout: gl.constexpr = copy_layout_for(CHUNK)
    a_layout: gl.constexpr = copy_layout_for(RING_A)
    b_layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, x_layout))
    d = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, x_layout))
    on = (row + n < row_end)[:, None]
    ptrs = x + gl.where(row + n < row_end, row + n, 0)[:, None] * D + slice0 + d[None, :]
    for c in gl.static_range(SLICE // CHUNK):
        async_copy.async_copy_global_to_shared(xs.index(stage * (SLICE // CHUNK) + c), ptrs + c * CHUNK, mask=on)
    na = gl.arange(0, 64, layout=gl.SliceLayout(1, a_layout))
    ca = gl.arange(0, RING_A, layout=gl.SliceLayout(0, a_layout))
    from_a = (ca // BLOCK + base) % BLOCKS * BLOCK + ca % BLOCK
    on_a = (row + na < row_end)[:, None]
    async_copy.async_copy_global_to_shared(ya.index(stage), y + (row + na)[:, None] * RING + from_a[None, :], mask=on_a)
    nb = gl.arange(0, 64, layout=gl.SliceLayout(1, b_layout))
    cb = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, b_layout))
    on_b = (row + nb < row_end)[:, None]
    from_b = (base + BLOCKS - 1) % BLOCKS * BLOCK + cb
    async_copy.async_copy_global_to_shared(yb.index(stage), y + (row + nb)[:, None] * RING + from_b[None, :], mask=on_b)
    if ENTRIES > 0:
        e_layout: gl.constexpr = copy_layout_for(ENTRIES)
        ne = gl.arange(0, 64, layout=gl.SliceLayout(1, e_layout))
        ce = gl.arange(0, ENTRIES, layout=gl.SliceLayout(0, e_layout))
        on_e = (row + ne < row_end)[:, None]
        async_copy.async_copy_global_to_shared(ys.index(stage), ye + (row + ne)[:, None] * ENTRIES + ce[None, :], mask=on_e)


@gluon.jit
def producer(
    run, side, q, do, p, dz, pe, dze, places, length, runs, xs, ya, yb, ys, full, empty,
    N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr,
):  # fmt: skip
    query, run_end = run_of(run, length, runs)
    slice0 = side * SLICE
    g = 0
    while query < run_end:
        last, read_end, base, _ = key_step(query, run_end, places, ENTRIES)
        tiles = gl.cdiv((read_end - query) * N, 64)
        row_end = last.to(gl.int64) * N
        for tile in range(tiles):
            row = query.to(gl.int64) * N + tile * 64
            odd = g & 1
            phase = ((g >> 1) & 1) ^ 1
            for item in gl.static_range(2):
                mbarrier.wait(empty[item], phase, pred=odd == 0)
                mbarrier.wait(empty[2 + item], phase, pred=odd == 1)
                stage = odd * 2 + item
                if item == 0:
                    fill_item(q, dz, dze, row, row_end, slice0, base, stage, xs, ya, yb, ys, D, ENTRIES)
                else:
                    fill_item(do, p, pe, row, row_end, slice0, base, stage, xs, ya, yb, ys, D, ENTRIES)
                if odd == 0:
                    async_copy.mbarrier_arrive(full[item], increment_count=False)
                else:
                    async_copy.mbarrier_arrive(full[2 + item], increment_count=False)
            g += 1
        query = last


@gluon.jit
def halves(x, layout: gl.constexpr):
    """x [64, W] as its left and its right half; registers are renamed, nothing moves."""
    W: gl.constexpr = x.shape[1]
    left, right = gl.split(x.reshape([64, 2, W // 2]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def joined(left, right, layout: gl.constexpr):
    W: gl.constexpr = left.shape[1]
    return gl.convert_layout(gl.join(left, right).permute((0, 2, 1)).reshape([64, 2 * W]), layout, assert_trivial=True)


@gluon.jit
def blocks_of(a, b):
    """The nine blocks of a [64, 128] and b [64, 16]."""
    l16: gl.constexpr = product_layout(16)
    l32: gl.constexpr = product_layout(32)
    l64: gl.constexpr = product_layout(64)
    x0, x1 = halves(a, l64)
    y0, y1 = halves(x0, l32)
    y2, y3 = halves(x1, l32)
    c0, c1 = halves(y0, l16)
    c2, c3 = halves(y1, l16)
    c4, c5 = halves(y2, l16)
    c6, c7 = halves(y3, l16)
    return c0, c1, c2, c3, c4, c5, c6, c7, b


@gluon.jit
def shift(a, b, nothing):
    """The first block, and a and b after all have moved down by one."""
    l32: gl.constexpr = product_layout(32)
    l64: gl.constexpr = product_layout(64)
    c0, c1, c2, c3, c4, c5, c6, c7, c8 = blocks_of(a, b)
    x0 = joined(joined(c1, c2, l32), joined(c3, c4, l32), l64)
    x1 = joined(joined(c5, c6, l32), joined(c7, c8, l32), l64)
    return c0, joined(x0, x1, product_layout(128)), nothing


@gluon.jit
def block_columns(n):
    """Which key of its block of 16 stands at position n of a block."""
    return n // 2 % 2 * 8 + n % 16 // 4 * 2 + n % 2


@gluon.jit
def write_block(v, d, base, target, halo, held_low, held_high, seen_before, D: gl.constexpr):
    """Keys of block `base` from v [64 channels from d on, 16]: those that runs before have seen too go to the halo."""
    layout: gl.constexpr = product_layout(16)
    key = base * BLOCK + block_columns(gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout)))
    c = d + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    row = gl.where(key < seen_before, halo + key % RING * D, target + key.to(gl.int64) * D)
    gl.store(row[None, :] + c[:, None], v, mask=((key >= held_low) & (key < held_high))[None, :])


@gluon.jit
def write_blocks(a, b, d, base, target, halo, held_low, held_high, seen_before, D: gl.constexpr):
    """All nine, `base` being the first one, without a move."""
    blocks = blocks_of(a, b)
    for i in gl.static_range(BLOCKS):
        write_block(blocks[i], d, base + i, target, halo, held_low, held_high, seen_before, D)


@gluon.jit
def add_item(item: gl.constexpr, X: gl.constexpr, odd, phase, z, a, b, e, xs, ya, yb, ys, full, ENTRIES: gl.constexpr):
    mbarrier.wait(full[item], phase, pred=odd == 0)
    mbarrier.wait(full[2 + item], phase, pred=odd == 1)
    fence_async_shared()
    stage = odd * 2 + item + z
    x = xs.index(stage * (SLICE // CHUNK) + X).permute((1, 0))
    a = warpgroup_mma(x, ya.index(stage), a, is_async=True)
    b = warpgroup_mma(x, yb.index(stage), b, is_async=True)
    if ENTRIES > 0:
        e = warpgroup_mma(x, ys.index(stage), e, is_async=True)
    return a, b, e


@gluon.jit
def products_done(LEFT: gl.constexpr, a, b, e, ENTRIES: gl.constexpr):
    if ENTRIES > 0:
        a, b, e = warpgroup_mma_wait(LEFT, deps=[a, b, e])
    else:
        a, b = warpgroup_mma_wait(LEFT, deps=[a, b])
    return a, b, e


@gluon.jit
def free_item(item: gl.constexpr, odd, empty):
    if odd == 0:  # a branch, since every arrival synchronises the warpgroup, a predicated one too
        mbarrier.arrive(empty[item], count=1)
    else:
        mbarrier.arrive(empty[2 + item], count=1)


@gluon.jit
def consumer(
    X: gl.constexpr, run, side, places, dori, halo, part, bounds, length, runs, before, zero, xs, ya, yb, ys, full, empty,
    N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    BE: gl.constexpr = max(16, ENTRIES)
    a_layout: gl.constexpr = product_layout(RING_A)
    b_layout: gl.constexpr = product_layout(BLOCK)
    e_layout: gl.constexpr = product_layout(BE)
    query, run_end = run_of(run, length, runs)
    d0 = side * SLICE + X * CHUNK
    halo += run.to(gl.int64) * RING * D
    a = gl.zeros([64, RING_A], gl.float32, layout=a_layout)
    b = gl.zeros([64, BLOCK], gl.float32, layout=b_layout)
    e = gl.zeros([64, BE], gl.float32, layout=e_layout)
    nothing = gl.zeros([64, BLOCK], gl.float32, layout=b_layout)
    held_low = 0
    seen_before = 0  # keys below this one were seen by runs before, or by queries before the first row
    if query < run_end:
        held_low = gl.load(places + query.to(gl.int64) * 4)
        if query + before > 0:
            seen_before = gl.load(places + query.to(gl.int64) * 4 - 3)
    if (X == 0) & (side == 0):
        gl.store(bounds + run * 4, held_low)
        gl.store(bounds + run * 4 + 1, seen_before)
        gl.store(bounds + run * 4 + 2, ENTRIES)
    held = held_low // BLOCK
    held_high = held_low
    g = 0
    while query < run_end:
        last, read_end, base, high = key_step(query, run_end, places, ENTRIES)
        for i in range(gl.minimum(base - held, BLOCKS)):
            v, a, b = shift(a, b, nothing)
            write_block(v, d0, held + i, dori, halo, held_low, held_high, seen_before, D)
        held = base
        held_high = gl.maximum(held_high, high)
        tiles = gl.cdiv((read_end - query) * N, 64)
        for tile in range(tiles):
            odd = g & 1
            phase = (g >> 1) & 1
            z = tile * zero  # opaque zero, as in fwd.py
            # the products may not run on into the next pass: ptxas would wait for each of them
            a, b, e = add_item(0, X, odd, phase, z, a, b, e, xs, ya, yb, ys, full, ENTRIES)
            a, b, e = add_item(1, X, odd, phase, z, a, b, e, xs, ya, yb, ys, full, ENTRIES)
            a, b, e = products_done(3 if ENTRIES else 2, a, b, e, ENTRIES)
            free_item(0, odd, empty)
            a, b, e = products_done(0, a, b, e, ENTRIES)
            free_item(1, odd, empty)
            g += 1
        query = last
    write_blocks(a, b, d0, held, dori, halo, held_low, held_high, seen_before, D)
    if ENTRIES > 0:
        ne = block_columns(gl.arange(0, BE, layout=gl.SliceLayout(0, e_layout)))
        ne += gl.arange(0, BE, layout=gl.SliceLayout(0, e_layout)) // BLOCK * BLOCK
        ce = d0 + gl.arange(0, 64, layout=gl.SliceLayout(1, e_layout))
        gl.store(part + (run.to(gl.int64) * STRIDE + ne)[None, :] * D + ce[:, None], e)


@gluon.jit(do_not_specialize=["length", "runs", "before", "zero"])
def hopper_dense_dkv_kernel(
    q, do, p, dz, pe, dze, places, dori, halo, part, bounds, length, runs, before, zero,
    N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """Batches of `length` queries, `runs` runs to each; `before` is 1 where queries before the first of `places` have been dealt with. bounds
    [runs, 4]: first key of a run, end of the keys that were seen before, its entries. part [runs, STRIDE, D]. Put into the stream before kernel 1
    has ended (programmatic dependent launch)."""
    gdc_wait()
    gdc_launch_dependents()
    SLICES: gl.constexpr = D // SLICE
    run = gl.program_id(0) // SLICES
    side = gl.program_id(0) % SLICES
    dtype: gl.constexpr = q.dtype.element_ty
    BE: gl.constexpr = max(16, ENTRIES)
    SE: gl.constexpr = 4 if ENTRIES else 1
    xs = gl.allocate_shared_memory(dtype, [4 * (SLICE // CHUNK), 64, CHUNK], gl.NVMMASharedLayout.get_default_for([64, CHUNK], dtype))
    ya = gl.allocate_shared_memory(dtype, [4, 64, RING_A], gl.NVMMASharedLayout.get_default_for([64, RING_A], dtype))
    yb = gl.allocate_shared_memory(dtype, [4, 64, BLOCK], gl.NVMMASharedLayout.get_default_for([64, BLOCK], dtype))
    ys = gl.allocate_shared_memory(dtype, [SE, 64, BE], gl.NVMMASharedLayout.get_default_for([64, BE], dtype))
    full = (new_barrier(128), new_barrier(128), new_barrier(128), new_barrier(128))
    empty = (new_barrier(2), new_barrier(2), new_barrier(2), new_barrier(2))
    gl.warp_specialize(
        [
            (consumer, (
                0, run, side, places, dori, halo, part, bounds, length, runs, before, zero, xs, ya, yb, ys, full, empty, N, D, ENTRIES, STRIDE,
            )),
            (consumer, (
                1, run, side, places, dori, halo, part, bounds, length, runs, before, zero, xs, ya, yb, ys, full, empty, N, D, ENTRIES, STRIDE,
            )),
            (producer, (run, side, q, do, p, dz, pe, dze, places, length, runs, xs, ya, yb, ys, full, empty, N, D, ENTRIES)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip


@cache
def dense_dkv_spec(dtype: torch.dtype, N: int, D: int, entries: int, stride: int) -> Spec:
    """entries: those that queries see at most, as many as there is room for in pe and dze; stride: those that `part` has room for."""
    x = f"*{TRITON_DTYPE[dtype]}"
    return Spec(
        hopper_dense_dkv_kernel,
        types={
            **dict.fromkeys(("q", "do", "p", "dz", "pe", "dze"), x), "places": "*i32",
            **dict.fromkeys(("dori", "halo", "part"), "*fp32"), "bounds": "*i32", **dict.fromkeys(("length", "runs", "before", "zero"), "i32"),
        },
        consts={"N": N, "D": D, "ENTRIES": entries, "STRIDE": stride},
        targets=("cuda",),
        options={"launch_pdl": True},
    )  # fmt: skip
