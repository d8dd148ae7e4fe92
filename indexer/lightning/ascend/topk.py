"""Exact top-k for Ascend, by the rule of indexer/lightning/topk.py and in its two steps, but in floats throughout: the vector units compare
and sort no integers. Columns and slots are counted in fp32, exact below 2^24.

`select_ascend_kernel` streams a row of scores past once a step of the search, or holds a short one. `order_ascend_kernel` finds the rank of
every winner by comparing it with all others, and the winner of every rank by comparing ranks: no sort, no scatter. NaN counts as infinite.
"""

from functools import cache

import triton
import triton.language as tl

from indexer.core import visible_of_row
from indexer.lightning.topk import halfway, key_score, score_key
from kernel_runtime.launch import Spec

RESIDENT = 4096  # columns of a row that the unified buffer holds during the search
STREAMED = 2048  # columns of a tile otherwise
LANES = 64
PAIRS = 4096  # pairs of winners that are compared at a time
RUNTIME = ("b0", "i0", "n", "S", "S3", "rows", "q_offset", "tasks")
BEYOND = tl.constexpr(16777216.0)  # in place of a column where there is none


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


@triton.jit
def _scores(row, first, count, BC: tl.constexpr):
    """Scores from column `first` on, -inf past the visible ones."""
    column = first + tl.arange(0, BC)
    x = tl.load(row + column, mask=column < count, other=float("-inf"))
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _at_or_above(x, row, count, limit, HELD: tl.constexpr, BC: tl.constexpr):
    """How many of the row's scores are at or above `limit`."""
    if HELD:
        some = tl.where(x >= limit, 1.0, 0.0)
    else:
        some = tl.zeros([BC], tl.float32)
        for j in range(0, count, BC):
            some += tl.where(_scores(row, j, count, BC) >= limit, 1.0, 0.0)
    return tl.sum(some, 0).to(tl.int32)


@triton.jit
def _ties_up_to(x, row, count, limit, last, HELD: tl.constexpr, BC: tl.constexpr):
    """How many of the columns up to `last` have just the score `limit`."""
    column = tl.arange(0, BC).to(tl.float32)
    if HELD:
        some = tl.where((x == limit) & (column <= last.to(tl.float32)), 1.0, 0.0)
    else:
        some = tl.zeros([BC], tl.float32)
        for j in range(0, count, BC):
            some += tl.where((_scores(row, j, count, BC) == limit) & (column <= (last - j).to(tl.float32)), 1.0, 0.0)
    return tl.sum(some, 0).to(tl.int32)


@triton.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset", "tasks"])
def select_ascend_kernel(
    scores, span, winners, winner_scores, b0, i0, n, S, S3, rows, q_offset, tasks,
    K: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, HELD: tl.constexpr, BC: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """The K best of rows with more than K visible blocks, in no order: columns and scores, [batches, n, K]. tasks = batches * n.

    HELD: a row has at most BC columns. A lane's elements are A columns apart, so that running sums over a lane's elements add vectors.
    """
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        local = task % n
        i = i0 + local
        row = (b0 + task // n).to(tl.int64) * S + i
        _, count = visible_of_row(span, row, i, rows, S3, q_offset, R, TABLE)
        if count > K:
            buffer = (task // n * n + local).to(tl.int64)
            at = scores + buffer * S3
            x = _scores(at, 0, count, BC)
            inside = tl.arange(0, BC).to(tl.float32) < count.to(tl.float32)
            low_score = tl.min(tl.where(inside, x, float("inf")), 0)
            high_score = tl.max(x, 0)
            if not HELD:
                for j in range(BC, count, BC):
                    more = _scores(at, j, count, BC)
                    inside = tl.arange(0, BC).to(tl.float32) < (count - j).to(tl.float32)
                    low_score = tl.minimum(low_score, tl.min(tl.where(inside, more, float("inf")), 0))
                    high_score = tl.maximum(high_score, tl.max(more, 0))

            # the largest `low` with at least K scores at or above it, as in select_kernel
            low = score_key(low_score)
            high = score_key(high_score) + 1
            found = count
            at_low = count
            at_high = 0
            step = 0
            middle = halfway(low, high)
            while (middle > low) & (found != K):
                middle = next_threshold(low, high, middle, at_low, at_high, step, K)
                found = _at_or_above(x, at, count, key_score(middle), HELD, BC)
                enough = found >= K
                low = tl.where(enough, middle, low)
                at_low = tl.where(enough, found, at_low)
                high = tl.where(enough, high, middle)
                at_high = tl.where(enough, at_high, found)
                step += 1
                middle = halfway(low, high)
            limit = key_score(low)
            # where several blocks share the K-th score those of the smallest index belong, up to and including `last`
            last = count - 1
            before = tl.where(at_low == K, last - 1, -1)
            while last - before > 1:
                middle = (before + last) // 2
                enough = _ties_up_to(x, at, count, limit, middle, HELD, BC) >= K - at_high
                last = tl.where(enough, middle, last)
                before = tl.where(enough, before, middle)

            out = buffer * K
            used = 0
            for j in range(0, count, BC):
                y = _scores(at, j, count, BC)
                column = tl.arange(0, BC).to(tl.float32)
                take = (y > limit) | ((y == limit) & (column <= (last - j).to(tl.float32)))
                taken = tl.reshape(tl.where(take, 1.0, 0.0), [BC // A, A])
                by_lane = tl.sum(taken, 0)
                slot = tl.cumsum(taken, 0) + (tl.cumsum(by_lane, 0) - by_lane)[None, :]
                slot = used + tl.maximum(tl.reshape(slot, [BC]).to(tl.int32) - 1, 0)
                tl.store(winners + out + slot, j + column.to(tl.int32), mask=take)
                tl.store(winner_scores + out + slot, y, mask=take)
                used += tl.sum(by_lane, 0).to(tl.int32)


@triton.jit
def _winners(winners, winner_scores, scores, first, direct, listed, B: tl.constexpr):
    """Columns (as floats) and scores of slots first + (0, 1, ...): the first `direct` columns of a row, or the first `listed` winners."""
    slot = first + tl.arange(0, B)
    place = slot.to(tl.float32)
    column = tl.load(winners + slot, mask=slot < listed, other=0).to(tl.float32)
    column = tl.where(place < direct.to(tl.float32), place, tl.where(place < listed.to(tl.float32), column, BEYOND))
    x = tl.load(winner_scores + slot, mask=slot < listed, other=float("-inf"))
    return column, tl.maximum(_scores(scores, first, direct, B), x)


@triton.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset", "tasks"])
def order_ascend_kernel(
    scores, span, winners, winner_scores, chosen, values, b0, i0, n, S, S3, rows, q_offset, tasks,
    K: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, SORT: tl.constexpr,
):  # fmt: skip
    """Indices and scores of the winners into chosen and values [B, S, K], sorted if SORT; a row of at most K visible blocks takes all."""
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        local = task % n
        i = i0 + local
        row = (b0 + task // n).to(tl.int64) * S + i
        _, count = visible_of_row(span, row, i, rows, S3, q_offset, R, TABLE)
        buffer = (task // n * n + local).to(tl.int64)
        at = scores + buffer * S3
        out = buffer * K
        direct = tl.where(count > K, 0, count)
        listed = tl.where(count > K, K, 0)
        used = (direct + listed).to(tl.float32)
        if SORT:
            column, x = _winners(winners + out, winner_scores + out, at, 0, direct, listed, P)
            rank = tl.zeros([P], tl.float32)
            for j in range(0, P, BP):
                other, y = _winners(winners + out, winner_scores + out, at, j, direct, listed, BP)
                tie = (y[:, None] == x[None, :]) & (other[:, None] < column[None, :])
                rank += tl.sum(tl.where((y[:, None] > x[None, :]) | tie, 1.0, 0.0), 0)
        for j in range(0, P, BP):
            slot = j + tl.arange(0, BP)
            place = slot.to(tl.float32)
            if SORT:
                here = rank[None, :] == place[:, None]
                index = tl.sum(tl.where(here, column[None, :], 0.0), 1)
                value = tl.sum(tl.where(here, x[None, :], 0.0), 1)
            else:
                index, value = _winners(winners + out, winner_scores + out, at, j, direct, listed, BP)
            value = tl.where(value == 0.0, 0.0, value)  # one zero
            tl.store(chosen + row * K + slot, tl.where(place < used, index, -1.0).to(tl.int32), mask=slot < K)
            tl.store(values + row * K + slot, tl.where(place < used, value, float("-inf")), mask=slot < K)


@cache
def select_ascend_spec(topk: int, cmp_ratio: int, table: bool, held: bool) -> Spec:
    """held: for rows of at most RESIDENT blocks."""
    types = {"scores": "*fp32", "span": "*i32", "winners": "*i32", "winner_scores": "*fp32"}
    return Spec(
        select_ascend_kernel,
        types=types | dict.fromkeys(RUNTIME, "i32"),
        consts={"K": topk, "R": cmp_ratio, "TABLE": table, "HELD": held, "BC": RESIDENT if held else STREAMED, "A": LANES},
        targets=("ascend",),
    )


@cache
def order_ascend_spec(topk: int, cmp_ratio: int, table: bool, sort: bool) -> Spec:
    types = {"scores": "*fp32", "span": "*i32", "winners": "*i32", "winner_scores": "*fp32", "chosen": "*i32", "values": "*fp32"}
    size = max(16, triton.next_power_of_2(topk))
    return Spec(
        order_ascend_kernel,
        types=types | dict.fromkeys(RUNTIME, "i32"),
        consts={
            "K": topk, "P": size, "BP": min(size, max(1, PAIRS // size)) if sort else size, "R": cmp_ratio, "TABLE": table, "SORT": sort,
        },
        targets=("ascend",),
    )  # fmt: skip
