"""Device functions shared by the attention's kernels, forward and backward."""

import triton
import triton.language as tl

from kernel_runtime.kernels import INTERPRETING


@triton.jit
def product(a, b, acc):
    """acc + a @ b in fp32. fp32 operands are not rounded to tf32: fp32 inputs are asked for where precision matters."""
    if INTERPRETING:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


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
