"""What streams through shared memory where a query sees up to 128 entries (dense_pdz_streamed.py): order, producer, and where consumers find it.

One ring of five slots of 16 KB. A use of a slot is two chunks of 64 channels of a tile's q, or of its dO, or of 64 entries, or one chunk of 128
entries. Per tile, in this order:
    the sweep with the entries: a use of theirs, then q and dO of the same chunks, and so on (with 128 entries, a use is one chunk of q and of dO)
    the entries once more, for dq of the tile before
    the sweep with the window, q and dO in turn
So while one consumer is at the softmax of the entries the other one makes dq, and while one is at that of the window the other one is in its first
sweep. What dq waits for comes before the next tile waits for keys: a step that must not load its keys until the one before is over (as batches whose
keys are not one run) holds nothing up.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from sparse_attn.shared_kv.hopper.core import copy_layout_for
from sparse_attn.shared_kv.hopper.dense import CHUNK, STEP, as_row, hear_step, queries_of_program

PAIRS = gl.constexpr(5)


@gluon.constexpr_function
def uses_of(D, ENTRIES):
    """Uses of slots in a tile's sweep with the entries, and of the entries alone."""
    return D // CHUNK + D // CHUNK * ENTRIES // 128, D // CHUNK * ENTRIES // 128


@gluon.jit
def fill(use, x, y, rows_x, rows_y, turn, slots, full_0, full_1, empty, D: gl.constexpr, PAIRS: gl.constexpr):
    """Slot `use` of a ring of PAIRS: 64 rows of CHUNK channels from x on and as many from y on; those past rows_x and rows_y are zeros. Pointers are
    one number and constants, which takes few registers; for the consumer whose turn it is."""
    layout: gl.constexpr = copy_layout_for(CHUNK, gl.num_warps())
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    at = n[:, None] * D + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))[None, :]
    pair = use % PAIRS
    mbarrier.wait(empty.index(pair), ((use // PAIRS) & 1) ^ 1)
    async_copy.async_copy_global_to_shared(slots.index(2 * pair), x + at, mask=(n < rows_x)[:, None])
    async_copy.async_copy_global_to_shared(slots.index(2 * pair + 1), y + at, mask=(n < rows_y)[:, None])
    if turn % 2 == 0:
        async_copy.mbarrier_arrive(full_0.index(pair), increment_count=False)
    else:
        async_copy.mbarrier_arrive(full_1.index(pair), increment_count=False)


@gluon.jit
def entries_of(step, count, facts):
    """Number of entries that the queries of a step see."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    if step % 2 == 0:
        x = as_row(facts[3][0]).load(layout)
    else:
        x = as_row(facts[3][1]).load(layout)
    return gl.max(gl.where(gl.arange(0, STEP, layout=layout) < count, x, 0), 0)


@gluon.jit
def producer(q, do, cmp_kv, rows, slots, full_0, full_1, empty, facts, told, N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr):
    """One place that copies, for whatever is next, as every other one would take registers. The last tile is followed by its entries alone."""
    CHUNKS: gl.constexpr = D // CHUNK
    uses: gl.constexpr = uses_of(D, ENTRIES)
    SWEEP: gl.constexpr = uses[0]
    ALONE: gl.constexpr = uses[1]
    TILE: gl.constexpr = SWEEP + ALONE + CHUNKS
    GROUP: gl.constexpr = 1 + 128 // ENTRIES  # one use of the entries, and their chunks
    query, last_query = queries_of_program(rows)
    turn = 0
    step = 0
    first_before = 0
    entries_before = 0
    use = 0
    while query < last_query:
        last, _, first = hear_step(step, facts, told)
        entries = entries_of(step, last - query, facts)
        tiles = gl.cdiv((last - query) * N, 64)
        row_end = last.to(gl.int64) * N
        for tile in range(tiles + gl.where(last >= last_query, 1, 0)):
            row = query.to(gl.int64) * N + tile * 64
            left = (row_end - row).to(gl.int32)
            q_row = q + row * D
            do_row = do + row * D
            for u in range(gl.where(tile < tiles, 0, SWEEP), gl.where(tile < tiles, TILE, SWEEP + ALONE)):
                v = u - SWEEP
                alone = (v >= 0) & (v < ALONE)
                if (turn > 0) | (alone == 0):
                    if alone | ((u < SWEEP) & (u % GROUP == 0)):
                        i = gl.where(alone, v, u // GROUP)
                        at = gl.where(alone, first_before, first).to(gl.int64) * D
                        rows_x = gl.where(alone, entries_before, entries)
                        if ENTRIES == 128:
                            x = cmp_kv + at + i * CHUNK
                            y = x + 64 * D
                            rows_y = rows_x - 64
                        else:
                            x = cmp_kv + at + i * (2 * CHUNK)
                            y = x + CHUNK
                            rows_y = rows_x
                    else:
                        c = gl.where(u < SWEEP, u - u // GROUP - 1, v - ALONE)
                        if (ENTRIES == 128) & (u < SWEEP):
                            x = q_row + c * CHUNK
                            y = do_row + c * CHUNK
                        else:
                            x = gl.where(c % 2 == 0, q_row, do_row) + c // 2 * (2 * CHUNK)
                            y = x + CHUNK
                        rows_x = left
                        rows_y = left
                    fill(use, x, y, rows_x, rows_y, turn + alone.to(gl.int32), slots, full_0, full_1, empty, D, PAIRS)
                    use += 1
            first_before = first
            entries_before = entries
            turn += 1
        step += 1
        query = last


@gluon.jit
def take(use, bits, full):
    pair = use % PAIRS
    mbarrier.wait(full.index(pair), (bits >> pair) & 1)
    return bits ^ (1 << pair)
