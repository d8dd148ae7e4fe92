"""Device functions shared by the attention's kernels, forward and backward."""

import triton
import triton.language as tl


@triton.jit
def load_rows(x, rows, on, d, D: tl.constexpr, EVEN: tl.constexpr):
    """[rows, d] of x [any, D]; 0 where a row is not `on` or a channel is past D. rows are int64."""
    mask = on[:, None] if EVEN else on[:, None] & (d < D)[None, :]
    return tl.load(x + rows[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(x, rows, on, d, value, D: tl.constexpr, EVEN: tl.constexpr):
    mask = on[:, None] if EVEN else on[:, None] & (d < D)[None, :]
    tl.store(x + rows[:, None] * D + d[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def zero_tile(task, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASCEND: tl.constexpr):
    """Zeros in which a task adds up. On Ascend they depend on the task as far as the compiler can tell: it moves a constant tile out of the
    loop over tasks, where it takes unified buffer beside the accumulator for as long as the kernel runs (ascendnpu-ir 1.0.0, whose plan is not
    the same each time, then lacked some for the forward in a few of a hundred compilations), and 1.0.0 crashes where a product starts from one."""
    if ASCEND:
        return tl.full([ROWS, COLUMNS], task * 0.0, tl.float32)
    else:
        return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def range_rows(begin, key, end):
    """Rows key + (0, 1, ...) of a range, 0 past its end, and whether they are in it."""
    seen = key < end
    return tl.where(seen, key, begin).to(tl.int64), seen


@triton.jit
def selected_rows(indices, first, slot, end, cmp_begin, cmp_end):
    """Rows of cmp_kv behind a query's slots and whether a slot counts; decided before an address is formed, row 0 where not."""
    entry = tl.load(indices + first + slot, mask=slot < end, other=-1)
    seen = (entry >= 0) & (entry < cmp_end - cmp_begin)
    return tl.where(seen, cmp_begin + entry, 0).to(tl.int64), seen


@triton.jit
def load_ranges(places, used, row, COMPRESSED: tl.constexpr):
    """first and number of window keys, first and number of visible entries, slots to walk through: of one query"""
    ptr = places + row * 4
    ori_begin = tl.load(ptr)
    ori_count = tl.load(ptr + 1) - ori_begin
    cmp_begin = 0
    cmp_count = 0
    slots = 0
    if COMPRESSED != 0:
        cmp_begin = tl.load(ptr + 2)
        cmp_count = tl.load(ptr + 3) - cmp_begin
        slots = cmp_count
    if COMPRESSED == 2:
        slots = tl.load(used + row)
    return ori_begin, ori_count, cmp_begin, cmp_count, slots


@triton.jit
def tile_rows(
    ori_kv, cmp_kv, indices, first, tile, n, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots,
    COMPRESSED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of a tile of BN keys: the tensor that holds them, their rows in it (0 where a slot does not count) and whether they count.

    A query's tiles are its window's, then its compressed ones': one loop over both needs a third of the registers that two loops do.
    `first` is the int64 offset of the query's list. Whether a slot counts is decided before an address is formed.
    """
    keys = ori_kv
    if COMPRESSED == 0:
        slot = tile * BN + n
        seen = slot < ori_count
        row = ori_begin + slot
    else:
        window = tile < ori_tiles
        keys = tl.where(window, ori_kv, cmp_kv)
        slot = tl.where(window, tile, tile - ori_tiles) * BN + n
        if COMPRESSED == 1:
            seen = slot < tl.where(window, ori_count, cmp_count)
            row = tl.where(window, ori_begin, cmp_begin) + slot
        else:
            entry = tl.load(indices + first + slot, mask=(slot < slots) & (window == 0), other=-1)
            seen = tl.where(window, slot < ori_count, (entry >= 0) & (entry < cmp_count))
            row = tl.where(window, ori_begin + slot, cmp_begin + entry)
    return keys, tl.where(seen, row, 0).to(tl.int64), seen


@triton.jit
def used_slots(indices, first, K, visible, BK: tl.constexpr):
    """One past the last slot that counts, so that a tail of -1 costs nothing; holes before it are skipped slot by slot."""
    last = 0
    for begin in range(0, K, BK):
        slot = begin + tl.arange(0, BK)
        entry = tl.load(indices + first + slot, mask=slot < K, other=-1)
        counts = (entry >= 0) & (entry < visible)
        last = tl.maximum(last, tl.max(tl.where(counts, slot + 1, 0), 0))
    return last


@triton.jit
def used_slots_ascend(indices, first, K, visible, BK: tl.constexpr):
    """used_slots in the form for Ascend: floats, as its vector units compare no integers (exact below 2^24 entries), and one maximum after
    the loop: ascendnpu-ir 1.0.0 crashes on a reduction in a loop that bounds one with products."""
    last = tl.zeros([BK], tl.float32)
    for begin in range(0, K, BK):
        slot = begin + tl.arange(0, BK)
        entry = tl.load(indices + first + slot, mask=slot < K, other=-1).to(tl.float32)
        counts = (entry >= 0.0) & (entry < visible.to(tl.float32))
        last = tl.maximum(last, tl.where(counts, (slot + 1).to(tl.float32), 0.0))
    return tl.max(last, 0).to(tl.int32)
