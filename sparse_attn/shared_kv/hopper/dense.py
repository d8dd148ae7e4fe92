"""Keys and streams of the Gluon kernel for short contiguous ranges (dense_fwd.py): steps of queries, their keys in shared memory, producers.

Rows are (query, head) pairs, q taken as [rows * heads, D]: a tile is 64 of them, whatever the number of heads. A step is a run of at most
STEP queries whose windows together fit into RING keys; it goes through its tiles with those keys in shared memory. Key k lies in slot
k % RING and two steps fit, so a step's new keys are loaded while the one before it is still going on. Entries, at most ENTRIES_MAX for any
query, are streamed.

q and the entries are streamed in chunks of CHUNK channels through a ring of four slots [64, CHUNK] a consumer, filled by a producer of its
own with cp.async. Fills have a fixed order within four chunks, so slot and phase of each are known at compile time.

A key of a step that some of its queries do not see meets a weight of 0 there: a NaN in it reaches those queries. Keys that no query of the
step sees are not read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from sparse_attn.shared_kv.hopper.core import copy_layout_for, new_barrier

STEP = gl.constexpr(8)  # queries of a step; two steps fit into the ring: WINDOW_MAX - 1 + 2 * STEP <= RING
ALIGN = gl.constexpr(16)  # programs begin at multiples of this
RING_A = gl.constexpr(128)  # the ring's slots in two tiles: sizes of tensors are powers of two
RING_B = gl.constexpr(16)
RING = gl.constexpr(144)
CHUNK = gl.constexpr(64)
WINDOW_MAX, ENTRIES_MAX = 128, 32


def dense_supports(D: int, window: int | None, entries: int) -> bool:
    """Whether every query's ranges are short enough: `entries` is the length of cmp_kv, 0 without."""
    return D >= 256 and window is not None and window <= WINDOW_MAX and entries <= ENTRIES_MAX


@gluon.jit
def queries_of_program(rows):
    """First and end of the queries of a program: contiguous, so that keys stay."""
    blocks = gl.cdiv(rows, ALIGN).to(gl.int64)
    first = (gl.program_id(0) * blocks // gl.num_programs(0)).to(gl.int32) * ALIGN
    end = ((gl.program_id(0) + 1) * blocks // gl.num_programs(0)).to(gl.int32) * ALIGN
    return gl.minimum(first, rows), gl.minimum(end, rows)


@gluon.jit
def step_of(first, end, places, COMPRESSED: gl.constexpr, WARPS: gl.constexpr):
    """The step that begins with query `first`, all of it before `end`: its own end, its keys [low, high) and its entries' first and number.
    Every query sees a key that the one before it sees or the key after those, so each key of a step is seen by one of them."""
    r = first + gl.arange(0, STEP, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    on = r < end
    at = places + r.to(gl.int64) * 4
    own = places + first.to(gl.int64) * 4
    begin = gl.load(at, mask=on, other=0)
    stop = gl.load(at + 1, mask=on, other=0)
    before = gl.load(places + gl.maximum(r - 1, first).to(gl.int64) * 4 + 1, mask=on, other=0)
    low = gl.load(own)
    fits = on & (begin >= low) & (stop <= low + RING) & (begin <= before)
    cmp_begin = 0
    if COMPRESSED:
        cmp_stop = gl.load(at + 3, mask=on, other=0)
        cmp_begin = gl.load(own + 2)
        fits = fits & (gl.load(at + 2, mask=on, other=0) == cmp_begin)
    last = gl.min(gl.where(fits, gl.minimum(end, first + STEP), r), 0)
    high = gl.max(gl.where(r < last, stop, low), 0)
    entries = 0
    if COMPRESSED:
        entries = gl.max(gl.where(r < last, cmp_stop, cmp_begin), 0) - cmp_begin
    return last, low, high, cmp_begin, entries


@gluon.jit
def slot_keys(slot, low):
    """The key that each slot of the ring holds in a step whose keys begin with `low`."""
    ahead = slot - low % RING
    return low + gl.where(ahead < 0, ahead + RING, ahead)


@gluon.jit
def new_ring(dtype: gl.constexpr, D: gl.constexpr):
    """The keys of a step in chunks of channels: [D / CHUNK, 128, CHUNK] and [D / CHUNK, 16, CHUNK]."""
    a = gl.allocate_shared_memory(dtype, [D // CHUNK, RING_A, CHUNK], gl.NVMMASharedLayout.get_default_for([RING_A, CHUNK], dtype))
    b = gl.allocate_shared_memory(dtype, [D // CHUNK, RING_B, CHUNK], gl.NVMMASharedLayout.get_default_for([RING_B, CHUNK], dtype))
    return a, b


@gluon.jit
def new_stream(dtype: gl.constexpr, threads: gl.constexpr):
    slots = gl.allocate_shared_memory(dtype, [4, 64, CHUNK], gl.NVMMASharedLayout.get_default_for([64, CHUNK], dtype))
    full = (new_barrier(threads), new_barrier(threads), new_barrier(threads), new_barrier(threads))
    empty = (new_barrier(1), new_barrier(1), new_barrier(1), new_barrier(1))
    return slots, full, empty


@gluon.jit
def new_key_barriers():
    """For even and odd steps: full (every thread of both producers) and empty (both consumers)."""
    return (new_barrier(128), new_barrier(128)), (new_barrier(2), new_barrier(2))


@gluon.jit
def copy_keys(
    step, kv, low, high, held_low, held_high, ring_a, ring_b, k_full, k_empty, X: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """The keys that a step adds to those of the step before, [held_low, held_high), producer X's half of the chunks.

    The step before may still be going on, as its keys are left alone; the one before that must be over. Blocks of 8 slots: a slot that
    holds a key of neither step gets zeros. If the two steps do not fit into the ring together, all is loaded anew once both are over.
    """
    CHUNKS: gl.constexpr = D // CHUNK
    BLOCK: gl.constexpr = 8
    dtype: gl.constexpr = kv.dtype.element_ty
    layout: gl.constexpr = copy_layout_for(CHUNK, 2)
    part: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, CHUNK], dtype)
    a = ring_a._reinterpret(dtype, [CHUNKS * 16, BLOCK, CHUNK], part)
    b = ring_b._reinterpret(dtype, [CHUNKS * 2, BLOCK, CHUNK], part)
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    odd = step & 1
    mbarrier.wait(k_empty[0], ((step >> 1) & 1) ^ 1, pred=odd == 0)
    mbarrier.wait(k_empty[1], ((step >> 1) & 1) ^ 1, pred=odd == 1)
    block = held_high % RING // BLOCK
    blocks = gl.where(high > held_high, gl.cdiv(held_high % BLOCK + high - held_high, BLOCK), 0)
    kept = held_low
    if (low < held_low) | (low > held_high) | (high - held_low > RING):
        before = step - 1
        mbarrier.wait(k_empty[0], (before >> 1) & 1, pred=(odd == 1) & (step > 0))
        mbarrier.wait(k_empty[1], (before >> 1) & 1, pred=(odd == 0) & (step > 0))
        block = 0
        blocks = 18
        kept = low
    for i in range(blocks):
        at = gl.where(block + i >= 18, block + i - 18, block + i)
        key = slot_keys(at * BLOCK + n, low)
        key = gl.where(key < high, key, key - RING)
        valid = (key >= low) | (key >= kept)
        ptrs = kv + gl.where(valid, key, 0).to(gl.int64)[:, None] * D + d[None, :]
        for half in gl.static_range(CHUNKS // 2):
            c = X * (CHUNKS // 2) + half
            if at < 16:
                async_copy.async_copy_global_to_shared(a.index(c * 16 + at), ptrs + c * CHUNK, mask=valid[:, None])
            else:
                async_copy.async_copy_global_to_shared(b.index(c * 2 + at - 16), ptrs + c * CHUNK, mask=valid[:, None])
    if odd == 0:
        async_copy.mbarrier_arrive(k_full[0], increment_count=False)
    else:
        async_copy.mbarrier_arrive(k_full[1], increment_count=False)


@gluon.jit
def take_keys(step, k_full):
    mbarrier.wait(k_full[0], (step >> 1) & 1, pred=(step & 1) == 0)
    mbarrier.wait(k_full[1], (step >> 1) & 1, pred=(step & 1) == 1)
    fence_async_shared()


@gluon.jit
def free_keys(step, k_empty):
    mbarrier.arrive(k_empty[0], count=1, pred=(step & 1) == 0)
    mbarrier.arrive(k_empty[1], count=1, pred=(step & 1) == 1)


@gluon.jit
def fill(j: gl.constexpr, x, first, end, channel, turn, slots, full, empty, zero, ROWS: gl.constexpr, D: gl.constexpr):
    """Fill j of four chunks: ROWS rows of x from `first` (int64) on, one chunk of channels; rows from `end` on are zeros."""
    layout: gl.constexpr = copy_layout_for(CHUNK, 2)
    n = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    on = n < end
    ptrs = x + gl.where(on, n, 0)[:, None] * D + channel + d[None, :]
    mbarrier.wait(empty[j % 4], ((turn + j // 4) & 1) ^ 1)
    target = slots.index(zero + j % 4)
    if ROWS < 64:
        target = target.slice(0, ROWS, dim=0)
    async_copy.async_copy_global_to_shared(target, ptrs, mask=on[:, None])
    async_copy.mbarrier_arrive(full[j % 4], increment_count=False)


@gluon.jit
def producer(
    X: gl.constexpr, q, ori_kv, cmp_kv, places, rows, zero, ring_a, ring_b, slots, full, empty, k_full, k_empty,
    N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr,
):  # fmt: skip
    """Everything that consumer X streams, and half of the new keys of every step, after the first fills of its first tile. For S a chunk of q
    and one of the entries in turn, then the entries once more for the output."""
    TILES: gl.constexpr = 1 if ENTRIES else 0
    PER: gl.constexpr = 1 + TILES
    query, last_query = queries_of_program(rows)
    held_low = 0
    held_high = -1
    tiles_before = 0
    turn = 0
    step = 0
    while query < last_query:
        last, low, high, cmp_begin, entries = step_of(query, last_query, places, ENTRIES > 0, 2)
        tiles = gl.cdiv((last - query) * N, 64)
        row_end = last.to(gl.int64) * N
        first_entry = cmp_begin.to(gl.int64)
        load_keys = tiles > 0
        for tile in range((tiles_before & 1) ^ X, tiles, 2):
            row = query.to(gl.int64) * N + tile * 64
            z = tile * zero
            for g in range(D // CHUNK // 4):
                for j in gl.static_range(4 * PER):
                    channel = (g * 4 + j // PER) * CHUNK
                    if j % PER == 0:
                        fill(j, q, row, row_end, channel, turn, slots, full, empty, z, 64, D)
                    else:
                        fill(j, cmp_kv, first_entry, first_entry + entries, channel, turn, slots, full, empty, z, ENTRIES, D)
                    if j == 3:  # at compile time  # noqa: SIM102
                        if load_keys & (g == 0):
                            copy_keys(step, ori_kv, low, high, held_low, held_high, ring_a, ring_b, k_full, k_empty, X, D)
                turn += PER
            if TILES > 0:
                for g in range(D // CHUNK // 4):
                    for j in gl.static_range(4):
                        channel = (g * 4 + j) * CHUNK
                        fill(j, cmp_kv, first_entry, first_entry + entries, channel, turn, slots, full, empty, z, ENTRIES, D)
                    turn += 1
            load_keys = False
        if load_keys:  # a step of one tile, and that the other's
            copy_keys(step, ori_kv, low, high, held_low, held_high, ring_a, ring_b, k_full, k_empty, X, D)
        held_low = low
        held_high = high
        tiles_before += tiles
        step += 1
        query = last


@gluon.jit
def take(j: gl.constexpr, turn, full):
    """Waits for fill j of a group; what it holds may be an operand then."""
    mbarrier.wait(full[j % 4], (turn + j // 4) & 1)
    fence_async_shared()
