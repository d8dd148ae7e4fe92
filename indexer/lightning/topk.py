"""Exact top-k of score rows: score descending, ties by ascending index.

Two steps. `select_kernel` finds the K best of a row as a set: a search for the K-th score with the row in registers; where several blocks
share that score, a second search for the largest index that still belongs. `order_kernel` sorts the K, at most GROUP by one warp: of more,
`select_kernel` finds the GROUP best, the next GROUP, and so on, each as a set.
A row of at most K (or GROUP) blocks needs no search. Of a row of more than WIDE blocks `indexer.lightning.filter` lists those that may belong
first, and the search is among them.

Rows live in a buffer of scores [batches, queries, S3] of one chunk; columns past the visible ones are never read.
"""

from functools import cache

import triton
import triton.language as tl

from indexer.core import visible
from kernel_runtime.launch import Spec

GROUP = 512  # keys that are sorted together: a warp keeps most of the network in registers, and few share a step of 32 bits
NARROW = 1024  # columns of the narrowest search: 32 a thread of one warp
WIDE = 4096  # columns of the widest, which leaves room for others beside it
LOWEST = tl.constexpr(-2147483648)  # key of an empty place, below that of -inf
INFINITE = tl.constexpr(0x7F800000)  # key of +inf; ~INFINITE is that of -inf


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
    """In floats within a thread, a comparison that gives 1.0 and an addition: booleans would be packed into bits, at twice the instructions.
    Eight at a time, as additions that wait for each other are what a short row would wait for."""
    ones = tl.reshape(tl.where(condition, 1.0, 0.0), [condition.shape[0], condition.shape[1] // 8, 8])
    return tl.sum(tl.sum(tl.sum(ones, 2), 1).to(tl.int32), 0)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _quantile(share):
    """Of the normal distribution, to about 1 % (Tukey's lambda 0.135)."""
    p = tl.minimum(tl.maximum(share, 1e-6), 1.0 - 1e-6)
    return (tl.exp2(0.135 * tl.log2(p)) - tl.exp2(0.135 * tl.log2(1.0 - p))) / 0.1975


@triton.jit
def next_limit(step, low, at_low, high, at_high, middle, wanted, total, quantile, mean, deviation):
    """Key at which to count next, of `total` scores those at or above it, if the wanted-th is looked for between low and high. `middle`, halfway
    between them, is what is left after 16 steps, and where a guess is no good.

    First guess: where the wanted-th of so many normal numbers of this mean and deviation is. While one side
    is open, a step of that distribution's slope from the known side; then interpolation in the scores, held off the ends; zero and
    the next number above it, as zero is the usual tie.
    """
    share = (at_low - wanted).to(tl.float32) / tl.maximum(at_low - at_high, 1).to(tl.float32)
    edge = tl.where(step < 8, 0.1, 0.3)
    guess = key_score(low) + (key_score(high) - key_score(low)) * tl.minimum(tl.maximum(share, edge), 1.0 - edge)
    if (at_high == 0) | (at_low == total):
        known = tl.where(at_high == 0, at_low, at_high).to(tl.float32)
        ahead = quantile - _quantile(1.0 - known / tl.maximum(total, 1).to(tl.float32)) + tl.where(at_high == 0, 0.02, -0.02)
        base = key_score(tl.where(at_high == 0, low, high))
        guess = tl.where((step == 0) & (at_high == 0), mean + quantile * deviation, base + 1.3 * deviation * ahead)
    key = tl.where(step == 5, 0, tl.where(step == 6, 1, score_key(guess)))
    return tl.where((step < 16) & (key > low) & (key < high), key, middle)


@triton.jit
def _threshold(x, total, beyond, mean, deviation, wanted, low, at_low, high, at_high):
    """Narrows the bracket of the wanted-th of `total` scores: `low` is the largest key found with at least as many scores at or above it, `high`
    the smallest with fewer; at_low and at_high are how many. In the end at_low is wanted, or several share the score of low, or no more are there.
    After 16 steps bisection of the bits, which always ends."""
    quantile = _quantile(1.0 - wanted / tl.maximum(total, 1).to(tl.float32))
    found = at_low
    step = total * 0
    middle = halfway(low, high)
    while (middle > low) & (found != wanted) & (total > wanted):
        middle = next_limit(step, low, at_low, high, at_high, middle, wanted, total, quantile, mean, deviation)
        limit = key_score(middle)
        found = _count(~(x < limit)) - tl.where(limit <= 0.0, beyond, 0)
        enough = found >= wanted
        low = tl.where(enough, middle, low)
        at_low = tl.where(enough, found, at_low)
        high = tl.where(enough, high, middle)
        at_high = tl.where(enough, at_high, found)
        step += 1
        middle = halfway(low, high)
    return low, at_low, high, at_high


@triton.jit
def _last_tied(tie, column, missing):
    """The largest column that still belongs, if the `missing` smallest of those with the tied score do."""
    before = missing * 0 - 1
    last = tl.max(tl.max(tl.where(tie, column, -1), 1), 0)
    while last - before > 1:
        middle = (before + last) // 2
        enough = _count(tie & (column <= middle)) >= missing
        last = tl.where(enough, middle, last)
        before = tl.where(enough, before, middle)
    return last


@triton.jit
def _slots(taken):
    """Number of every element among those taken, and how many are."""
    by_lane = tl.sum(taken, 1)
    return tl.cumsum(taken, 1) + (tl.cumsum(by_lane, 0) - by_lane)[:, None] - 1, tl.sum(by_lane, 0)


@triton.jit
def _store_set(out, column, take):
    """Columns of the elements that are taken, side by side."""
    slot, _used = _slots(take.to(tl.int32))
    tl.store(out + slot, column, mask=take)


@triton.jit(do_not_specialize=["b0", "i0", "first", "n", "S", "S3", "rows", "q_offset", "stride", "above", "upto"])
def select_kernel(
    scores, span, winners, chosen, b0, i0, first, n, S, S3, rows, q_offset, stride, above, upto,
    K: tl.constexpr, G: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, LISTED: tl.constexpr, A: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The set of the K best of rows with above < visible blocks <= upto into chosen [B, S, K]; other rows are left alone. G: the G best come first,
    then the next G ..

    Of a whole row, or, LISTED, of the candidates that `filter_kernel` left in winners [batches, n, stride], -1 behind them.
    The tile is [A lanes, E], a lane's elements A columns apart: loads are coalesced, and load, scan and store keep one layout. stride is
    a number of run time: of a constant one Triton would know how addresses are aligned, and choose another layout.
    NaN counts as infinite.
    """
    batch = b0 + tl.program_id(1)
    local = first + tl.program_id(0)
    i = i0 + local
    row = batch.to(tl.int64) * S + i
    buffer = (tl.program_id(1) * n + local).to(tl.int64)
    _, count = visible(span, row, i, i < S, rows, S3, q_offset, R, TABLE)
    if (count > above) & (count <= upto):
        lane = tl.arange(0, A)
        across = tl.arange(0, E) * A
        place = across[None, :] + lane[:, None]
        at = scores + buffer * S3
        if LISTED:
            held = place < stride
            column = tl.load(winners + buffer * stride + place, mask=held, other=-1)
            held = held & (column >= 0)
            x = tl.load(at + column, mask=held, other=0.0)
            total = _count(held)
        else:
            total = tl.minimum(count, A * E)
            column = place
            held = across[None, :] < (total - lane)[:, None]
            x = tl.load((at + lane)[:, None] + across[None, :], mask=held, other=0.0)

        sums, squares = tl.reduce((x, x * x), 1, _add_pairs)
        sums, squares = tl.reduce((sums, squares), 0, _add_pairs)
        many = tl.maximum(total, 1).to(tl.float32)
        mean = sums / many
        deviation = tl.sqrt(tl.maximum(squares / many - mean * mean, 0.0))
        beyond = A * E - total  # places that hold a 0 which is no score
        low = total * 0 + ~INFINITE
        at_low = total
        high = total * 0 + (INFINITE + 1)
        at_high = total * 0
        if G < K:
            x = tl.where(x == x, x, float("inf"))
            done = total * 0
            previous = (total * 0).to(tl.float32) + float("inf")
            previous_last = total * 0 - 1
            while done < tl.minimum(total, K):
                wanted = tl.minimum(done + G, K)
                low, at_low, high, at_high = _threshold(x, total, beyond, mean, deviation, wanted, low, at_low, high, at_high)
                limit = key_score(low)
                last = total * 0 + 2147483647
                if (at_low != wanted) & (total > wanted):
                    last = _last_tied((x == limit) & held, column, wanted - at_high)
                take = held & ~(x < limit) & ((x != limit) | (column <= last))
                take = take & ((x < previous) | ((x == previous) & (column > previous_last)))
                slot, _used = _slots(take.to(tl.int32))
                tl.store(chosen + row * K + done + slot, column, mask=take)
                # of the next set: the same bracket, if it lies within the same tie; otherwise it is below
                same = at_low >= tl.minimum(wanted + G, K)
                high = tl.where(same, high, low)
                at_high = tl.where(same, at_high, at_low)
                low = tl.where(same, low, ~INFINITE)
                at_low = tl.where(same, at_low, total)
                previous = limit
                previous_last = last
                done = wanted
        else:
            low, at_low, high, at_high = _threshold(x, total, beyond, mean, deviation, K, low, at_low, high, at_high)
            limit = key_score(low)
            out = chosen + row * K
            # the set is written in both branches: one that leaves a branch is packed into bits and taken apart again
            if (at_low != K) & (total > K):
                # several blocks share the K-th score: those of the smallest index belong, up to and including `last`
                y = tl.where(x == x, x, float("inf"))
                tie = (y == limit) & held
                last = _last_tied(tie, column, K - at_high)
                _store_set(out, column, ((y > limit) | (tie & (column <= last))) & held)
            else:
                _store_set(out, column, ~(x < limit) & held)


@triton.jit
def _bit(P: tl.constexpr, LOG: tl.constexpr, i: tl.constexpr):
    """Bit i of every place, [2] * LOG."""
    return tl.reshape((tl.arange(0, P) >> i) & 1, [2] * LOG)


@triton.jit
def sort_ascending(x, P: tl.constexpr, LOG: tl.constexpr):
    """Bitonic sort of int32 or int64 [P = 2^LOG]. Where a stage sorts runs downwards they are negated for its time, so that a step between
    places of one thread is a single minimum or maximum, or one comparison (`tl.sort` compares and selects by a third word)."""
    h = tl.reshape(x, [2] * LOG)
    for stage in tl.static_range(1, LOG + 1):
        if stage < LOG:
            h ^= -_bit(P, LOG, stage)
        for i in tl.static_range(stage):
            partner = h ^ tl.xor_sum(h, LOG - stage + i, True)
            h = tl.where((h > partner) != (_bit(P, LOG, stage - 1 - i) != 0), partner, h)
        if stage < LOG:
            h ^= -_bit(P, LOG, stage)
    return tl.reshape(h, [P])


@triton.jit
def _spread(x, P: tl.constexpr):
    """Another order of what is to be sorted, which is free: most steps then stay within a thread of the warp."""
    if P >= 512:
        x = tl.reshape(tl.permute(tl.reshape(x, [P // 128, 32, 4]), (1, 0, 2)), [P])
    return x


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _listed(scores, chosen, slot, first, on, everything):
    """Index and score at slots of a row before it is in order: what was selected, or blocks from `first` on where the row takes them all."""
    column = slot + first
    if not everything:
        column = tl.load(chosen + slot, mask=on, other=0)
    return column, tl.load(scores + column, mask=on, other=0.0)


@triton.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset"])
def order_kernel(
    scores, span, chosen, values, b0, i0, n, S, S3, rows, q_offset,
    K: tl.constexpr, P: tl.constexpr, LOG: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, SORT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Sorts P indices in chosen [B, S, K], from program_id(2) * P on, in place and writes their scores. Rows that `select_kernel` left alone,
    with at most P blocks to be sorted or K others, take all they see.

    SORT: one 32-bit sort of the score in LEVELS steps over the slot. It is right unless two scores fall into one step, which is looked for
    afterwards; then a 64-bit sort of score and index, which obeys both halves of the order rule.
    """
    batch = b0 + tl.program_id(1)
    i = i0 + tl.program_id(0)
    row = batch.to(tl.int64) * S + i
    buffer = (tl.program_id(1) * n + tl.program_id(0)).to(tl.int64)
    _, count = visible(span, row, i, i < S, rows, S3, q_offset, R, TABLE)
    at = scores + buffer * S3
    first = 0
    if P < K:
        first = tl.program_id(2) * P
    indices = chosen + row * K + first
    slot = tl.arange(0, P)
    used = tl.minimum(tl.maximum(tl.minimum(count, K) - first, 0), P)
    held = slot < used
    if SORT and P < K:
        everything = count <= P
    else:
        everything = count <= K
    column, x = _listed(at, indices, slot, first, held, everything)
    key = tl.where(held, score_key(x), LOWEST)
    if SORT and (P >= K or used > 1):
        top = tl.max(tl.where(held, x, float("-inf")), 0)
        bottom = tl.min(tl.where(held, x, float("inf")), 0)
        level = (top - x) * ((LEVELS - 1.0) / tl.where(top > bottom, top - bottom, 1.0))
        level = tl.where((level >= 0.0) & (level <= LEVELS - 1.0) & held, level, LEVELS - 1.0)  # also where it is NaN
        packed = sort_ascending(_spread((level.to(tl.int32) * P | slot) ^ LOWEST, P), P, LOG)
        # empty places have the last level and the last slots, and stay behind
        column, x = _listed(at, indices, packed & (P - 1), first, held, everything)
        key = tl.where(held, score_key(x), LOWEST)
        # strictly falling keys, each plus its place: never above the least before
        falling = tl.where(held, key + slot, LOWEST)
        if tl.sum((tl.associative_scan(falling, 0, _least) != falling).to(tl.int32), 0) > 0:
            # ascending in the complement is descending in the score; an empty place needs an index of its own to stay a strict order
            both = sort_ascending(_spread(((~key).to(tl.int64) << 32) | tl.where(held, column, slot).to(tl.int64), P), P, LOG)
            key = ~(both >> 32).to(tl.int32)
            column = both.to(tl.int32)
    on = first + slot < K
    tl.store(indices + slot, tl.where(held, column, -1), mask=on)
    tl.store(values + row * K + first + slot, tl.where(held, key_score(key), float("-inf")), mask=on)


RUNTIME = ("b0", "i0", "n", "S", "S3", "rows", "q_offset")


def group_size(topk: int) -> int:
    """Slots that a program of `order_kernel` takes."""
    return min(GROUP, triton.next_power_of_2(max(topk, 2)))


def row_lengths(fewest: int, columns: int) -> list[tuple[int, int]]:
    """(above, most): lengths of rows that are searched together, of all with more than `fewest` and at most `columns` blocks."""
    found, most = [], NARROW
    while fewest < columns:
        if most > WIDE:
            most = max(most, columns)
        if most > fewest:
            found.append((fewest, most))
            fewest = most
        most *= 2
    return found


@cache
def select_spec(topk: int, cmp_ratio: int, table: bool, listed: bool, width: int, sort: bool) -> Spec:
    """`width`: elements of the tile, a power of two from NARROW on; sort: what is selected will be sorted."""
    names = ("b0", "i0", "first", "n", "S", "S3", "rows", "q_offset", "stride", "above", "upto")
    warps = width // NARROW
    return Spec(
        select_kernel,
        types={"scores": "*fp32", "span": "*i32", "winners": "*i32", "chosen": "*i32"} | dict.fromkeys(names, "i32"),
        consts={
            "K": topk, "G": group_size(topk) if sort else topk, "R": cmp_ratio, "TABLE": table, "LISTED": listed,
            "A": 32 * warps, "E": 32,
        },
        num_warps=warps,
        options={"maxnreg": 128},
        targets=("cuda", "hip"),
    )  # fmt: skip


@cache
def order_spec(topk: int, cmp_ratio: int, table: bool, sort: bool) -> Spec:
    size = group_size(topk)
    return Spec(
        order_kernel,
        types={"scores": "*fp32", "span": "*i32", "chosen": "*i32", "values": "*fp32"} | dict.fromkeys(RUNTIME, "i32"),
        consts={
            "K": topk, "P": size, "LOG": size.bit_length() - 1, "R": cmp_ratio, "TABLE": table, "SORT": sort,
            "LEVELS": min(1 << 23, (1 << 32) // size),
        },
        num_warps=1,
        options={"maxnreg": 96},
        targets=("cuda",),  # Ascend sorts floats of at most 32 bits
    )  # fmt: skip
