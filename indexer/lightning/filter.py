"""First step of the selection on rows that are too long for one search: those blocks that may be among the K best, few enough for a search.

The row is read a tile at a time. A limit is guessed, from mean and deviation of the first tile, at or above which lie at least K scores and no more
than there is room for, 2 K as a rule: half as many again as K are aimed at, so that most rows need one reading. What is found lands in a
list of candidates, of which `select_kernel` takes the K best. Too many or too few: another limit and another reading, as in
`indexer.lightning.topk`, to the end of bisection. Where even neighbouring numbers part fewer than K from more than there is room for,
many share a score, and the list gets those above it and the first of those that share it, exactly K.
"""

from functools import cache

import triton
import triton.language as tl

from indexer.core import visible
from indexer.lightning import topk as search
from indexer.lightning.topk import INFINITE, NARROW, _add_pairs, _count, _last_tied, _quantile, _slots, halfway, key_score, next_limit
from kernel_runtime.launch import Spec


@triton.jit
def _candidates(at, out, count, limit, room, A: tl.constexpr, E: tl.constexpr):
    """Lists the blocks of a row whose scores are not below the limit, which is above -inf; of more than `room` some. Returns how many there are."""
    lane = tl.arange(0, A)
    across = tl.arange(0, E) * A
    place = across[None, :] + lane[:, None]
    used = count * 0
    for j in range(0, count, A * E):
        held = across[None, :] < (count - j - lane)[:, None]
        x = tl.load((at + j + lane)[:, None] + across[None, :], mask=held, other=float("-inf"))
        take = ~(x < limit)
        slot, more = _slots(take.to(tl.int32))
        tl.store(out + used + slot, j + place, mask=take & (slot < room - used))
        used += more
    return used


@triton.jit
def _above_and_tied(at, out, count, limit, missing, A: tl.constexpr, E: tl.constexpr):
    """Lists the blocks of scores above the limit, and the first `missing` of those at it."""
    lane = tl.arange(0, A)
    across = tl.arange(0, E) * A
    place = across[None, :] + lane[:, None]
    used = count * 0
    for j in range(0, count, A * E):
        held = across[None, :] < (count - j - lane)[:, None]
        x = tl.load((at + j + lane)[:, None] + across[None, :], mask=held, other=0.0)
        x = tl.where(x == x, x, float("inf"))
        tie = (x == limit) & held
        here = _count(tie)
        last = missing * 0 - 1  # the last place of a tie that belongs
        if here <= missing:
            last += A * E
        elif missing > 0:
            last = _last_tied(tie, place, missing)
        missing -= tl.minimum(here, missing)
        take = ((x > limit) & held) | (tie & (place <= last))
        slot, more = _slots(take.to(tl.int32))
        tl.store(out + used + slot, j + place, mask=take)
        used += more
    return used


@triton.jit(do_not_specialize=["b0", "i0", "first", "n", "S", "S3", "rows", "q_offset", "stride", "above", "upto"])
def filter_kernel(
    scores, span, winners, chosen, b0, i0, first, n, S, S3, rows, q_offset, stride, above, upto,
    K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, A: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Candidates of rows with above < visible blocks <= upto into winners [batches, n, stride], C = stride at most and no fewer than K, -1 behind
    them. Arguments as of `select_kernel`; chosen is not looked at. NaN counts as infinite."""
    batch = b0 + tl.program_id(1)
    local = first + tl.program_id(0)
    i = i0 + local
    buffer = (tl.program_id(1) * n + local).to(tl.int64)
    _, count = visible(span, batch.to(tl.int64) * S + i, i, i < S, rows, S3, q_offset, R, TABLE)
    if (count > above) & (count <= upto):
        at = scores + buffer * S3
        out = winners + buffer * stride
        lane = tl.arange(0, A)
        across = tl.arange(0, E) * A
        sampled = tl.minimum(count, A * E)
        sample = tl.load((at + lane)[:, None] + across[None, :], mask=across[None, :] < (sampled - lane)[:, None], other=0.0)
        sums, squares = tl.reduce((sample, sample * sample), 1, _add_pairs)
        sums, squares = tl.reduce((sums, squares), 0, _add_pairs)
        mean = sums / sampled
        deviation = tl.sqrt(tl.maximum(squares / sampled - mean * mean, 0.0))
        aim = count * 0 + (K + C) // 2
        quantile = _quantile(1.0 - aim / count.to(tl.float32))
        low = count * 0 + ~INFINITE
        at_low = count
        high = count * 0 + (INFINITE + 1)
        at_high = count * 0
        found = count * 0
        step = count * 0
        middle = halfway(low, high)
        while (middle > low) & ((found < K) | (found > C)):
            middle = next_limit(step, low, at_low, high, at_high, middle, aim, count, quantile, mean, deviation)
            found = _candidates(at, out, count, key_score(middle), C, A, E)
            many = found > C
            low = tl.where(many, middle, low)
            at_low = tl.where(many, found, at_low)
            few = found < K
            high = tl.where(few, middle, high)
            at_high = tl.where(few, found, at_high)
            step += 1
            middle = halfway(low, high)
        if (found < K) | (found > C):
            found = _above_and_tied(at, out, count, key_score(low), K - at_high, A, E)
        rest = tl.arange(0, triton.next_power_of_2(C))  # in one dimension: a store of a tile would give all of it another layout
        tl.store(out + rest, tl.full([triton.next_power_of_2(C)], -1, tl.int32), mask=(rest >= found) & (rest < C))


def room_for(topk: int) -> int:
    """Candidates of a row."""
    return max(NARROW, triton.next_power_of_2(2 * topk))


@cache
def filter_spec(topk: int, cmp_ratio: int, table: bool, width: int) -> Spec:
    """`width`: columns of a tile, 32 a thread."""
    names = ("b0", "i0", "first", "n", "S", "S3", "rows", "q_offset", "stride", "above", "upto")
    warps = width // NARROW
    return Spec(
        filter_kernel,
        types={"scores": "*fp32", "span": "*i32", "winners": "*i32", "chosen": "*i32"} | dict.fromkeys(names, "i32"),
        consts={"K": topk, "C": room_for(topk), "R": cmp_ratio, "TABLE": table, "A": 32 * warps, "E": 32},
        num_warps=warps,
        options={"maxnreg": 128},
        targets=("cuda", "hip"),
    )


def selection(topk: int, cmp_ratio: int, table: bool, columns: int, sort: bool) -> list[Spec]:
    """The launches that find the set of the K best of rows of at most so many blocks; all take the same arguments."""
    if columns <= search.WIDE:
        return [search.select_spec(topk, cmp_ratio, table, False, max(NARROW, triton.next_power_of_2(columns)), sort)]
    return [filter_spec(topk, cmp_ratio, table, search.WIDE), search.select_spec(topk, cmp_ratio, table, True, room_for(topk), sort)]
