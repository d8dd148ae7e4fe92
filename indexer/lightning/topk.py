"""Exact top-k of score rows: score descending, ties by ascending index.

Two steps. `select_kernel` finds the K best of a row as a set: a search for the K-th score on the ordered bits of the floats, with the row
in registers; where several blocks share that score, a second search for the largest index that still belongs. `order_kernel` sorts the K.
A row of at most K blocks needs no search. A row longer than a segment is searched in segments first and then once more among their winners,
which is exact, as a block among the K best of the row is among the K best of its segment.

Rows live in a buffer of scores [batches, queries, S3] of one chunk; columns past the visible ones are never read.
"""

from functools import cache

import triton
import triton.language as tl

from indexer.core import visible
from kernel_runtime.launch import Spec

NARROW = 1024  # columns of the narrowest search: 32 a thread of one warp; SEGMENT is that of 16 warps
LOWEST = tl.constexpr(-2147483648)  # key of an empty place, below that of -inf


@triton.jit
def score_key(x):
    """int32 that orders as the float does; both zeros get one key, as they are a tie."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_score(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def halfway(low, high):
    """(low + high) / 2 rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _count(condition):
    return tl.sum(tl.sum(condition.to(tl.int32), 1), 0)


@triton.jit
def next_threshold(low, high, middle, at_low, at_high, step, K: tl.constexpr):
    """The key to count at next: interpolation in the scores themselves, damped at first and held off the ends; bisection of the bits,
    `middle`, after 16 steps. at_low > at_high are the counts of keys at or above low and high."""
    if step < 16:
        share = (at_low - K).to(tl.float32) / tl.maximum(at_low - at_high, 1).to(tl.float32)
        share = tl.where(step < 3, 0.5 * share + 0.25, tl.minimum(tl.maximum(share, 0.1), 0.9))
        guess = score_key(key_score(low) + (key_score(high) - key_score(low)) * share)
        middle = tl.where((guess > low) & (guess < high), guess, middle)
    return middle


@triton.jit(do_not_specialize=["b0", "i0", "first", "n", "S", "S3", "rows", "q_offset", "segments", "above", "upto"])
def select_kernel(
    scores, span, winners, chosen, b0, i0, first, n, S, S3, rows, q_offset, segments, above, upto,
    K: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, LEVEL: tl.constexpr, A: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The set of the K best of rows with above < visible blocks <= upto; other rows are left alone.

    LEVEL 0: a whole row into chosen [B, S, K]. LEVEL 1: segment program_id(2) of a row into winners [batches, n, segments, K], -1 where the
    segment holds fewer than K. LEVEL 2: the winners of all segments into chosen.
    The tile is [A lanes, E], a lane's elements A columns apart: loads are coalesced, and load, scan and store keep one layout.
    """
    batch = b0 + tl.program_id(1)
    local = first + tl.program_id(0)
    i = i0 + local
    row = batch.to(tl.int64) * S + i
    buffer = (tl.program_id(1) * n + local).to(tl.int64)
    _, count = visible(span, row, i, i < S, rows, S3, q_offset, R, TABLE)
    if (count > above) & (count <= upto):
        place = tl.arange(0, E)[None, :] * A + tl.arange(0, A)[:, None]
        if LEVEL == 2:
            held = place < segments * K
            column = tl.load(winners + buffer * segments * K + place, mask=held, other=-1)
            held = held & (column >= 0)
        else:
            column = place
            if LEVEL == 1:
                column += tl.program_id(2) * (A * E)
            held = column < count
        x = tl.load(scores + buffer * S3 + tl.where(held, column, 0), mask=held, other=float("-inf"))
        key = tl.where(held, score_key(x), LOWEST)
        total = _count(held)

        # the largest `low` with at least K keys at or above it; `at_low`, `at_high`: keys at or above low and high
        low = tl.min(tl.min(tl.where(held, key, 2147483647), 1), 0)
        high = tl.max(tl.max(key, 1), 0) + 1
        found = total
        at_low = total
        at_high = 0
        step = 0
        middle = halfway(low, high)
        while (middle > low) & (found != K) & (total > K):
            middle = next_threshold(low, high, middle, at_low, at_high, step, K)
            found = _count(key >= middle)
            enough = found >= K
            low = tl.where(enough, middle, low)
            at_low = tl.where(enough, found, at_low)
            high = tl.where(enough, high, middle)
            at_high = tl.where(enough, at_high, found)
            step += 1
            middle = halfway(low, high)
        take = (key >= low) & held
        if (found != K) & (total > K):
            # several blocks share the K-th score: those of the smallest index belong, up to and including `last`
            tie = (key == low) & held
            missing = K - _count((key > low) & held)
            before = -1
            last = tl.max(tl.max(tl.where(tie, column, -1), 1), 0)
            while last - before > 1:
                middle = (before + last) // 2
                enough = _count(tie & (column <= middle)) >= missing
                last = tl.where(enough, middle, last)
                before = tl.where(enough, before, middle)
            take = take & ((key > low) | (column <= last))

        taken = take.to(tl.int32)
        by_lane = tl.sum(taken, 1)
        slot = tl.cumsum(taken, 1) + (tl.cumsum(by_lane, 0) - by_lane)[:, None] - 1
        if LEVEL == 1:
            out = winners + (buffer * segments + tl.program_id(2)) * K
            tl.store(out + slot, column, mask=take)
            used = tl.sum(by_lane, 0)
            tl.store(out + place, tl.full([A, E], -1, tl.int32), mask=(place >= used) & (place < K))
        else:
            tl.store(chosen + row * K + slot, column, mask=take)


@triton.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset"])
def order_kernel(
    scores, span, chosen, values, b0, i0, n, S, S3, rows, q_offset,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, SORT: tl.constexpr,
):  # fmt: skip
    """Sorts the indices in chosen [B, S, K] in place and writes their scores; a row of at most K visible blocks takes them all.

    One 64-bit key holds score and index, so that one sort of P >= K keys obeys both halves of the order rule.
    """
    batch = b0 + tl.program_id(1)
    i = i0 + tl.program_id(0)
    row = batch.to(tl.int64) * S + i
    buffer = (tl.program_id(1) * n + tl.program_id(0)).to(tl.int64)
    _, count = visible(span, row, i, i < S, rows, S3, q_offset, R, TABLE)
    slot = tl.arange(0, P)
    held = (slot < count) & (slot < K)
    column = tl.load(chosen + row * K + slot, mask=held & (count > K), other=0)
    column = tl.where(held, tl.where(count > K, column, slot), slot)
    x = tl.load(scores + buffer * S3 + tl.where(held, column, 0), mask=held, other=0.0)
    key = tl.where(held, score_key(x), LOWEST)
    if SORT:
        # ascending in the complement is descending in the score; an empty place needs an index of its own to stay a strict order
        packed = tl.sort(((~key).to(tl.int64) << 32) | column.to(tl.int64))
        key = ~(packed >> 32).to(tl.int32)
        column = packed.to(tl.int32)
    empty = key == LOWEST
    tl.store(chosen + row * K + slot, tl.where(empty, -1, column), mask=slot < K)
    tl.store(values + row * K + slot, tl.where(empty, float("-inf"), key_score(key)), mask=slot < K)


RUNTIME = ("b0", "i0", "n", "S", "S3", "rows", "q_offset")


@cache
def select_spec(topk: int, cmp_ratio: int, table: bool, level: int, width: int) -> Spec:
    """`width`: elements of the tile, a power of two from NARROW to SEGMENT."""
    names = ("b0", "i0", "first", "n", "S", "S3", "rows", "q_offset", "segments", "above", "upto")
    warps = width // NARROW
    return Spec(
        select_kernel,
        types={"scores": "*fp32", "span": "*i32", "winners": "*i32", "chosen": "*i32"} | dict.fromkeys(names, "i32"),
        consts={"K": topk, "R": cmp_ratio, "TABLE": table, "LEVEL": level, "A": 32 * warps, "E": 32},
        num_warps=warps,
        # without the cap the search takes 215 to 255 registers and twice the time
        options={"maxnreg": 128},
        targets=("cuda", "hip"),
    )


@cache
def order_spec(topk: int, cmp_ratio: int, table: bool, sort: bool) -> Spec:
    size = triton.next_power_of_2(max(topk, 2))
    return Spec(
        order_kernel,
        types={"scores": "*fp32", "span": "*i32", "chosen": "*i32", "values": "*fp32"} | dict.fromkeys(RUNTIME, "i32"),
        consts={"K": topk, "P": size, "R": cmp_ratio, "TABLE": table, "SORT": sort},
        num_warps=max(1, min(8, size // 512)),  # 512 keys on one warp: most of the network stays in registers and shuffles
        targets=("cuda",),  # Ascend sorts floats of at most 32 bits
    )
