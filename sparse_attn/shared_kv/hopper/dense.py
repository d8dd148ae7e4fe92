"""Keys and streams of the Gluon kernels for short contiguous ranges (dense_fwd.py, dense_pdz.py): steps of queries, what stays in shared
memory, producers.

Rows are (query, head) pairs, q taken as [rows * heads, D]: a tile is 64 of them, whatever the number of heads. A step is a run of at most
STEP queries whose windows together fit into RING keys; it goes through its tiles with those keys in shared memory. Key k lies in slot
k % RING and two steps fit, so a step's new keys are loaded while the one before it is still going on. Entries, at most ENTRIES_MAX for any
query, stay in shared memory too; when a step sees other ones than the step before, they are loaded once that one is over.

Tiles go to the two consumers in turn. q of a tile comes in pairs of chunks of CHUNK channels through one ring of slots that both consumers
share, so that whoever computes S has all of it and a whole tile (half a tile beside entries) is under way while the other one is at its
softmax and output. It also keeps the consumers a phase apart: the second one's first pair takes the slots of the first one's.

A key of a step that some of its queries do not see meets a weight of 0 there: a NaN in it reaches those queries. Keys that no query of the
step sees are not read. Queries that see nothing (those past the last document of a pack) have steps of their own, in which zeros stand for q and dO.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from sparse_attn.shared_kv.hopper.core import copy_layout_for, new_barrier

STEP = gl.constexpr(8)  # queries of a step; two steps fit into the ring: WINDOW_MAX - 1 + 2 * STEP <= RING
UNIT = gl.constexpr(8)  # queries of a program at least, but for the last ones
RING_A = gl.constexpr(128)  # the ring's slots in two tiles: sizes of tensors are powers of two
RING_B = gl.constexpr(16)
RING = gl.constexpr(144)
CHUNK = gl.constexpr(64)
WINDOW_MAX, ENTRIES_MAX = 128, 32


def dense_supports(D: int, window: int | None, entries: int) -> bool:
    """Whether every query's ranges are short enough: `entries` is the length of cmp_kv, 0 without."""
    return D >= 256 and window is not None and window <= WINDOW_MAX and entries <= ENTRIES_MAX


@gluon.constexpr_function
def product_layout(W):
    """Of an accumulator [64, W] of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])


@gluon.jit
def queries_of_program(rows):
    """First and end of the queries of a program: contiguous, so that keys stay."""
    pairs = gl.cdiv(rows, 2).to(gl.int64)  # not one by one: consumers have tiles of one query each, and are to have as many
    first = (gl.program_id(0) * pairs // gl.num_programs(0)).to(gl.int32) * 2
    end = ((gl.program_id(0) + 1) * pairs // gl.num_programs(0)).to(gl.int32) * 2
    return gl.minimum(first, rows), gl.minimum(end, rows)


@gluon.jit
def step_of(first, end, places, COMPRESSED: gl.constexpr, WARPS: gl.constexpr):
    """The step that begins with query `first`, all of it before `end`: its own end, that of the queries of it that see anything (all or none), its
    keys [low, high) and its entries' first and number.
    Steps end at multiples of STEP, so that those of one sequence fill whole blocks of 8 slots wherever a program begins.
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
    blind = False
    if not COMPRESSED:  # packs have no entries here
        blind = gl.load(own + 1) <= low
        fits = fits & ((stop <= begin) == blind)
    cmp_begin = 0
    if COMPRESSED:
        cmp_stop = gl.load(at + 3, mask=on, other=0)
        cmp_begin = gl.load(own + 2)
        fits = fits & (gl.load(at + 2, mask=on, other=0) == cmp_begin)
    last = gl.min(gl.where(fits, gl.minimum(end, (first // STEP + 1) * STEP), r), 0)
    high = gl.max(gl.where(r < last, stop, low), 0)
    entries = 0
    if COMPRESSED:
        entries = gl.max(gl.where(r < last, cmp_stop, cmp_begin), 0) - cmp_begin
    seen = stop
    if COMPRESSED:
        seen = cmp_stop - cmp_begin
    return last, gl.where(blind, first, last), low, high, cmp_begin, entries, begin, stop, seen


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
def new_pair_barriers(count: gl.constexpr, PAIRS: gl.constexpr):
    """One for each pair of slots of q's ring, which has 2 or 4 of them. None may be left unused: what is allocated after a barrier that no
    warpgroup waits for gets its place, and is overwritten when the barrier is made."""
    if PAIRS == 2:
        return (new_barrier(count), new_barrier(count))
    else:
        return (new_barrier(count), new_barrier(count), new_barrier(count), new_barrier(count))


@gluon.jit
def wait_pair(bars, p: gl.constexpr, g, parity, PAIRS: gl.constexpr):
    """Waits for the barrier of the slots of chunks 4 g + 2 p and the next."""
    if PAIRS == 2:
        mbarrier.wait(bars[p], parity)
    else:
        mbarrier.wait(bars[p], parity, pred=g == 0)
        mbarrier.wait(bars[p + 2], parity, pred=g == 1)


@gluon.jit
def free_pair(bars, p: gl.constexpr, g, PAIRS: gl.constexpr):
    if PAIRS == 2:
        mbarrier.arrive(bars[p], count=1)
    else:
        if g == 0:  # a branch, since every arrival synchronises the warpgroup, a predicated one too
            mbarrier.arrive(bars[p], count=1)
        else:
            mbarrier.arrive(bars[p + 2], count=1)


@gluon.jit
def new_step_barriers(count: gl.constexpr):
    """For even and odd steps."""
    return (new_barrier(count), new_barrier(count))


@gluon.jit
def new_numbers():
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (gl.allocate_shared_memory(gl.int32, [STEP, 1], layout), gl.allocate_shared_memory(gl.int32, [STEP, 1], layout))


@gluon.jit
def new_facts():
    """Of even and odd steps: end, first key, first entry, end of what is read of q; begin and end of its queries' windows, number of their
    entries."""
    return new_numbers(), new_numbers(), new_numbers(), new_numbers()


@gluon.jit
def as_row(numbers):
    return numbers._reinterpret(gl.int32, [STEP], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def number(numbers, i, step):
    """Number i of a step, from shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    if step % 2 == 0:
        x = numbers[0].index(i).load(layout)
    else:
        x = numbers[1].index(i).load(layout)
    return gl.sum(x, 0)


@gluon.jit
def wait_step(bars, step, parity):
    mbarrier.wait(bars[0], parity, pred=(step & 1) == 0)
    mbarrier.wait(bars[1], parity, pred=(step & 1) == 1)


@gluon.jit
def write_facts(odd: gl.constexpr, facts, told, value, begin, stop, seen, COMPRESSED: gl.constexpr):
    """Of an even or odd step, and the arrival that says so."""
    as_row(facts[0][odd]).store(value)
    as_row(facts[1][odd]).store(begin)
    as_row(facts[2][odd]).store(stop)
    if COMPRESSED:
        as_row(facts[3][odd]).store(seen)
    mbarrier.arrive(told[odd], count=1)


@gluon.jit
def tell_step(step, facts, told, last, read_end, low, cmp_begin, begin, stop, seen, COMPRESSED: gl.constexpr):
    """What the other warpgroups need to know of a step. They would wait for device memory to find it out themselves."""
    i = gl.arange(0, STEP, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    value = gl.where(i == 0, last, gl.where(i == 1, low, gl.where(i == 2, cmp_begin, read_end)))
    if step % 2 == 0:
        write_facts(0, facts, told, value, begin, stop, seen, COMPRESSED)
    else:
        write_facts(1, facts, told, value, begin, stop, seen, COMPRESSED)


@gluon.jit
def hear_step(step, facts, told):
    """End of a step, its first key, its first entry."""
    wait_step(told, step, (step >> 1) & 1)
    return number(facts[0], 0, step), number(facts[0], 1, step), number(facts[0], 2, step)


@gluon.jit
def rows_read(step, facts, N: gl.constexpr):
    """End of the rows of a step, which was heard, that are read of q and dO; zeros stand for those after it."""
    return number(facts[0], 3, step).to(gl.int64) * N


@gluon.jit
def take_keys(step, k_full):
    wait_step(k_full, step, (step >> 1) & 1)
    fence_async_shared()


@gluon.jit
def free_keys(step, k_empty):
    mbarrier.arrive(k_empty[0], count=1, pred=(step & 1) == 0)
    mbarrier.arrive(k_empty[1], count=1, pred=(step & 1) == 1)


@gluon.jit
def copy_keys(ori_kv, block, blocks, low, high, kept, ring_a, ring_b, D: gl.constexpr):
    """`blocks` blocks of 8 slots from `block` on. A slot that holds neither a key of the step, [low, high), nor one from `kept` on of the
    step before gets zeros."""
    CHUNKS: gl.constexpr = D // CHUNK
    BLOCK: gl.constexpr = 8
    dtype: gl.constexpr = ori_kv.dtype.element_ty
    layout: gl.constexpr = copy_layout_for(CHUNK, 2)
    part: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, CHUNK], dtype)
    a = ring_a._reinterpret(dtype, [CHUNKS * 16, BLOCK, CHUNK], part)
    b = ring_b._reinterpret(dtype, [CHUNKS * 2, BLOCK, CHUNK], part)
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    for i in range(blocks):
        at = gl.where(block + i >= 18, block + i - 18, block + i)
        key = slot_keys(at * BLOCK + n, low)
        key = gl.where(key < high, key, key - RING)
        valid = (key >= low) | (key >= kept)
        ptrs = ori_kv + gl.where(valid, key, 0).to(gl.int64)[:, None] * D + d[None, :]
        for c in gl.static_range(CHUNKS):
            if at < 16:
                async_copy.async_copy_global_to_shared(a.index(c * 16 + at), ptrs + c * CHUNK, mask=valid[:, None])
            else:
                async_copy.async_copy_global_to_shared(b.index(c * 2 + at - 16), ptrs + c * CHUNK, mask=valid[:, None])


@gluon.jit
def copy_entries(cmp_kv, cmp_begin, entries, entry_s, D: gl.constexpr, ENTRIES: gl.constexpr):
    layout: gl.constexpr = copy_layout_for(CHUNK, 2)
    n = gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    on = n < entries
    ptrs = cmp_kv + gl.where(on, cmp_begin.to(gl.int64) + n, 0)[:, None] * D + d[None, :]
    for c in range(D // CHUNK):
        async_copy.async_copy_global_to_shared(entry_s.index(c), ptrs + c * CHUNK, mask=on[:, None])


@gluon.jit
def key_producer(
    ori_kv, cmp_kv, places, rows, ring_a, ring_b, entry_s, facts, told, k_full, k_empty, D: gl.constexpr, ENTRIES: gl.constexpr,
    RESIDENT: gl.constexpr = True,
):  # fmt: skip
    """Finds the steps, tells the others, and loads the keys that a step adds to those of the step before, and entries that are RESIDENT.

    The step before may still be going on, as its keys are left alone; the one before that must be over. If the two do not fit into the ring
    together, or the entries change, all that is new is loaded once both are over.
    """
    query, last_query = queries_of_program(rows)
    held_low = 0
    held_high = -1
    held_begin = -1
    held_entries = -1
    step = 0
    while query < last_query:
        last, read_end, low, high, cmp_begin, entries, begin, stop, seen = step_of(query, last_query, places, ENTRIES > 0, 2)
        wait_step(k_empty, step, ((step >> 1) & 1) ^ 1)
        tell_step(step, facts, told, last, read_end, low, cmp_begin, begin, stop, seen, ENTRIES > 0)
        block = held_high % RING // 8
        blocks = gl.where(high > held_high, gl.cdiv(held_high % 8 + high - held_high, 8), 0)
        kept = held_low
        anew = (low < held_low) | (low > held_high) | (high - held_low > RING)
        other = False
        if RESIDENT and ENTRIES > 0:
            other = (cmp_begin != held_begin) | (entries != held_entries)
        if (anew | other) & (step > 0):
            wait_step(k_empty, step - 1, ((step - 1) >> 1) & 1)
        if anew:
            block = 0
            blocks = 18
            kept = low
        copy_keys(ori_kv, block, blocks, low, high, kept, ring_a, ring_b, D)
        if RESIDENT and ENTRIES > 0:  # at compile time  # noqa: SIM102
            if other:
                copy_entries(cmp_kv, cmp_begin, entries, entry_s, D, ENTRIES)
                held_begin = cmp_begin
                held_entries = entries
        if step % 2 == 0:
            async_copy.mbarrier_arrive(k_full[0], increment_count=False)
        else:
            async_copy.mbarrier_arrive(k_full[1], increment_count=False)
        held_low = low
        held_high = high
        step += 1
        query = last


@gluon.jit
def q_producer(q, rows, zero, slots, full_0, full_1, empty, facts, told, N: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr):
    """q of all tiles in order, chunk c of a tile in slot c % (2 PAIRS). A pair of slots has a full barrier for each consumer, as each waits
    for its own tiles alone and would take the phase of one of the other's for its own."""
    USES: gl.constexpr = D // CHUNK // (2 * PAIRS)  # of a slot by a tile
    layout: gl.constexpr = copy_layout_for(CHUNK, 2)
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    query, last_query = queries_of_program(rows)
    tiles_before = 0
    step = 0
    while query < last_query:
        last, _, _ = hear_step(step, facts, told)
        tiles = gl.cdiv((last - query) * N, 64)
        row_end = last.to(gl.int64) * N
        for tile in range(tiles):
            row = query.to(gl.int64) * N + tile * 64 + n
            on = row < row_end
            ptrs = q + gl.where(on, row, 0)[:, None] * D + d[None, :]
            for p in gl.static_range(D // CHUNK // 2):
                use = (tiles_before + tile) * USES + p // PAIRS
                mbarrier.wait(empty[p % PAIRS], (use & 1) ^ 1)
                for c in gl.static_range(2 * p, 2 * p + 2):
                    async_copy.async_copy_global_to_shared(slots.index(tile * zero + c % (2 * PAIRS)), ptrs + c * CHUNK, mask=on[:, None])
                if (tiles_before + tile) % 2 == 0:
                    async_copy.mbarrier_arrive(full_0[p % PAIRS], increment_count=False)
                else:
                    async_copy.mbarrier_arrive(full_1[p % PAIRS], increment_count=False)
        tiles_before += tiles
        step += 1
        query = last
