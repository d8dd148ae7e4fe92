"""Forward for sm_90 in Gluon where a query's ranges are contiguous and short: SWA, and CFA with few entries. See dense.py.

    two consumers    a tile of 64 rows each, in turn: S of all keys, softmax, then O = P V chunk by chunk of channels. P stays in registers
                     and no accumulator outlives its chunk, so a consumer has registers to spare and the two overlap each other's phases.
                     q is multiplied from registers too: read as it was written, by ordinary accesses, it needs no fence between proxies (in
                     the machine code a memory barrier of the whole thread), is read once for all products, and its slots are free at once.
    q producer       two warps: q of all tiles through one ring of slots
    key producer     two warps: finds the steps, loads their new keys and entries

Shared memory at D = 512, 217 KB: keys 144; q 64, or q 32 and entries 32; 8 in which the output's rows change their layout, warp by warp.

Barriers
    full_0, full_1, empty   of a pair of slots of q: 64 arrivals (each producer thread's own cp.async group), and 1, of the consumer that read it
    told[2]                 what a step is stands in shared memory: 1 arrival of the key producer, for even and odd steps
    k_full[2], k_empty[2]   the keys of a step: 64 arrivals, and 2, of both consumers; for even and odd steps, since the producer is one ahead
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from kernel_runtime.launch import TRITON_DTYPE, Spec
from sparse_attn.shared_kv.hopper.core import laid_out, programs
from sparse_attn.shared_kv.hopper.dense import (
    CHUNK,
    ENTRIES_MAX,
    RING,
    RING_A,
    RING_B,
    UNIT,
    free_keys,
    free_pair,
    hear_step,
    key_producer,
    new_facts,
    new_pair_barriers,
    new_ring,
    new_step_barriers,
    number,
    product_layout,
    q_producer,
    queries_of_program,
    slot_keys,
    take_keys,
    wait_pair,
)
from sparse_attn.shared_kv.hopper.finish import load_sink, with_sink


@gluon.constexpr_function
def operand_of(layout):
    """q as the first operand, in registers, of products with this accumulator: of all of them the same registers."""
    return gl.DotOperandLayout(0, layout, 2)


@gluon.jit
def read_pair(p: gl.constexpr, g, parity, z, slots, full, a_layout: gl.constexpr, PAIRS: gl.constexpr):
    """Two chunks of q to registers. Ordinary loads of what ordinary copies have written: no fence, and the slots are free at once."""
    wait_pair(full, p, g, parity, PAIRS)
    at = g * 4 + 2 * p + z
    if PAIRS == 2:
        at = z + 2 * p
    return slots.index(at).load(operand_of(a_layout)), slots.index(at + 1).load(operand_of(a_layout))


@gluon.jit
def score_chunk(c: gl.constexpr, g, x, sa, sb, se, z, ring_a, ring_b, entry_s, ENTRIES: gl.constexpr):
    """S += q K^T over chunk c of a group of four, q in registers; issued and not waited for."""
    at = g * 4 + c + z
    sa = warpgroup_mma(x, ring_a.index(at).permute((1, 0)), sa, is_async=True)
    sb = warpgroup_mma(gl.convert_layout(x, operand_of(product_layout(RING_B))), ring_b.index(at).permute((1, 0)), sb, is_async=True)
    if ENTRIES > 0:
        se = warpgroup_mma(gl.convert_layout(x, operand_of(product_layout(max(16, ENTRIES)))), entry_s.index(at).permute((1, 0)), se, is_async=True)
    return sa, sb, se


@gluon.jit
def scores_done(sa, sb, se, ENTRIES: gl.constexpr):
    if ENTRIES > 0:
        sa, sb, se = warpgroup_mma_wait(0, deps=[sa, sb, se])
    else:
        sa, sb = warpgroup_mma_wait(0, deps=[sa, sb])
    return sa, sb, se


@gluon.jit
def output_chunk(c: gl.constexpr, g, pa, pb, pe, o_zero, z, ring_a, ring_b, entry_s, ENTRIES: gl.constexpr):
    """P V of chunk 4 g + c of the channels; issued and not waited for."""
    at = g * 4 + c + z
    o = warpgroup_mma(pa, ring_a.index(at), o_zero, use_acc=False, is_async=True)
    o = warpgroup_mma(pb, ring_b.index(at), o, is_async=True)
    if ENTRIES > 0:
        o = warpgroup_mma(pe, entry_s.index(at), o, is_async=True)
    return o


@gluon.constexpr_function
def one_query(N):
    """Whether all rows of a tile are one query's; ranges and sinks come from shared memory then, and no load from device memory stands between
    a consumer and its next product."""
    return N in (64, 128)


@gluon.jit
def seen_by(x, begin, stop, rows: gl.constexpr, ONE_QUERY: gl.constexpr):
    """Which of x lie in [begin, stop), as a tensor that broadcasts over rows and x; begin and stop are numbers where all rows are one query's."""
    if ONE_QUERY:
        return ((x >= begin) & (x < stop))[None, :]
    else:
        return (x[None, :] >= gl.convert_layout(begin, rows)[:, None]) & (x[None, :] < gl.convert_layout(stop, rows)[:, None])


@gluon.jit
def keep(s, on):
    """Scores where `on`, of one query's keys, else -inf. A minimum takes half of the instructions of a choice by predicates, and masks NaN too."""
    return gl.minimum(s, gl.where(on, float("inf"), float("-inf"))[None, :])


@gluon.jit
def keep_window(s, first: gl.constexpr, low, begin, stop, ONE_QUERY: gl.constexpr):
    """Scores of the ring's slots from `first` on, -inf where a slot's key does not lie in [begin, stop): numbers, or one of each row."""
    layout: gl.constexpr = s.type.layout
    slot = first + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    if ONE_QUERY:  # the slots of its keys are one run, or all but one run: one comparison
        count = gl.maximum(stop - begin, 0)
        at = begin % RING
        wraps = at + count > RING
        start = gl.where(wraps, at + count - RING, at)
        length = gl.where(wraps, RING - count, count)
        # eights of slots that a thread's own place in an eight is inside of, as bits: one test of a bit a slot, whose number is a constant
        low_eight = (start + 7 - (slot & 7)) >> 3
        end_eight = (start + length + 7 - (slot & 7)) >> 3
        bits = ((1 << end_eight) - (1 << low_eight)) ^ gl.where(wraps, -1, 0)
        return keep(s, ((bits >> (slot >> 3)) & 1) != 0)
    else:
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        return gl.where(seen_by(slot_keys(slot, low), begin, stop, rows, False), s, float("-inf"))


@gluon.jit
def opaque_zero(z, g, zero, D: gl.constexpr):
    """As in fwd_kernel.py. Made of the loop's counter, where there is a loop, it is one number for the whole warp in the eyes of ptxas too, and
    descriptors need not go through registers."""
    if D > 4 * CHUNK:
        z = g * zero
    return z


@gluon.jit
def tile_forward(
    row, row_end, query, step, low, cmp_begin, turn, z, zero, out, lse, sinks, places, scale2, ring_a, ring_b, entry_s, slots, full, empty,
    facts, sink_s, N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, SINKS: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """One tile of 64 rows, this consumer's tile number `turn`."""
    TILES: gl.constexpr = 1 if ENTRIES else 0
    BE: gl.constexpr = max(16, ENTRIES)
    ONE_QUERY: gl.constexpr = one_query(N)
    dtype: gl.constexpr = out.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RING_A, 16])
    b_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RING_B, 16])
    e_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    a_rows: gl.constexpr = gl.SliceLayout(1, a_layout)
    b_rows: gl.constexpr = gl.SliceLayout(1, b_layout)
    e_rows: gl.constexpr = gl.SliceLayout(1, e_layout)
    r = row + gl.arange(0, 64, layout=a_rows)
    on = r < row_end
    if not ONE_QUERY:  # asked for before they are needed
        at = places + r // N * 4
        begin = gl.load(at, mask=on, other=0)
        stop = gl.load(at + 1, mask=on, other=0)
        seen = stop
        if ENTRIES > 0:
            seen = gl.load(at + 3, mask=on, other=0) - cmp_begin
    # S, two chunks after two; their slots are free again as soon as q is in registers
    sa = gl.zeros([64, RING_A], gl.float32, layout=a_layout)
    sb = gl.zeros([64, RING_B], gl.float32, layout=b_layout)
    se = gl.zeros([64, BE], gl.float32, layout=e_layout)
    for g in range(D // CHUNK // 4):
        z = opaque_zero(z, g, zero, D)
        parity = (turn * (D // CHUNK // (2 * PAIRS)) + (g if PAIRS == 2 else 0)) & 1
        x, y = read_pair(0, g, parity, z, slots, full, a_layout, PAIRS)
        free_pair(empty, 0, g, PAIRS)
        sa, sb, se = score_chunk(0, g, x, sa, sb, se, z, ring_a, ring_b, entry_s, ENTRIES)
        sa, sb, se = score_chunk(1, g, y, sa, sb, se, z, ring_a, ring_b, entry_s, ENTRIES)
        x, y = read_pair(1, g, parity, z, slots, full, a_layout, PAIRS)
        free_pair(empty, 1, g, PAIRS)
        sa, sb, se = score_chunk(2, g, x, sa, sb, se, z, ring_a, ring_b, entry_s, ENTRIES)
        sa, sb, se = score_chunk(3, g, y, sa, sb, se, z, ring_a, ring_b, entry_s, ENTRIES)
        sa, sb, se = scores_done(sa, sb, se, ENTRIES)  # no product may run on into the next pass of the loop
    if ONE_QUERY:
        i = (row // N).to(gl.int32) - query
        begin = number(facts[1], i, step)
        stop = number(facts[2], i, step)
        seen = 0
        if ENTRIES > 0:
            seen = number(facts[3], i, step)
    # softmax over all keys at once; the scale is positive, so the maximum may be taken before it
    sa = keep_window(sa, 0, low, begin, stop, ONE_QUERY)
    sb = keep_window(sb, RING_A, low, begin, stop, ONE_QUERY)
    m = gl.maximum(gl.max(sa, 1), gl.convert_layout(gl.max(sb, 1), a_rows))
    if TILES == 1:
        entry = gl.arange(0, BE, layout=gl.SliceLayout(0, e_layout))
        if ONE_QUERY:
            se = keep(se, entry < seen)
        else:
            se = gl.where(entry[None, :] < gl.convert_layout(seen, e_rows)[:, None], se, float("-inf"))
        m = gl.maximum(m, gl.convert_layout(gl.max(se, 1), a_rows))
    m = gl.maximum(m * scale2, -1.0e30)  # finite, where a row sees no key
    sa = gl.exp2(sa * scale2 - m[:, None])
    sb = gl.exp2(sb * scale2 - gl.convert_layout(m, b_rows)[:, None])
    l = gl.sum(sa, 1) + gl.convert_layout(gl.sum(sb, 1), a_rows)
    if TILES == 1:
        se = gl.exp2(se * scale2 - gl.convert_layout(m, e_rows)[:, None])
        l += gl.convert_layout(gl.sum(se, 1), a_rows)
    if ONE_QUERY and SINKS:
        sink = sink_s.index((row // 64 % (N // 64)).to(gl.int32)).load(a_rows)
    else:
        sink = load_sink(sinks, (r % N).to(gl.int32), on, SINKS)
    inverse, total = with_sink(m, l, sink, SINKS)
    gl.store(lse + r, total, mask=on)
    EARLY: gl.constexpr = dtype == gl.bfloat16  # float16 has no exponents for weights beside a large sink
    if EARLY:  # 88 products in place of the output's 256
        sa = sa * inverse[:, None]
        sb = sb * gl.convert_layout(inverse, b_rows)[:, None]
        if TILES == 1:
            se = se * gl.convert_layout(inverse, e_rows)[:, None]
    pa = gl.convert_layout(sa.to(dtype), p_layout)
    pb = gl.convert_layout(sb.to(dtype), p_layout)
    pe = pb
    if TILES == 1:
        pe = gl.convert_layout(se.to(dtype), p_layout)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))
    # O of one chunk while the last one is written out
    copy: gl.constexpr = warp_rows()
    rc = row + gl.arange(0, 64, layout=gl.SliceLayout(1, copy))
    target = out + rc[:, None] * D + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, copy))[None, :]
    writes = (rc < row_end)[:, None]
    o_zero = gl.zeros([64, CHUNK], gl.float32, layout=o_layout)
    for g in range(D // CHUNK // 4):
        z = opaque_zero(z, g, zero, D)
        current = output_chunk(0, g, pa, pb, pe, o_zero, z, ring_a, ring_b, entry_s, ENTRIES)
        for c in gl.static_range(4):
            if c < 3:
                upcoming = output_chunk(c + 1, g, pa, pb, pe, o_zero, z, ring_a, ring_b, entry_s, ENTRIES)
                v = warpgroup_mma_wait(2 + TILES, deps=[current])
                current = upcoming
            else:
                v = warpgroup_mma_wait(0, deps=[current])
            if EARLY:
                v = v.to(dtype)
            else:
                v = (v * inverse[:, None]).to(dtype)
            gl.store(target + (g * 4 + c) * CHUNK, gl.convert_layout(v, copy), mask=writes)


@gluon.constexpr_function
def warp_rows():
    """[64, 64] of 16 bits, 16 bytes a thread and whole rows: those of the product that the same warp has made, so that it waits for no other."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]], [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]], [[16, 0], [32, 0]], [], [64, 64]
    )


@gluon.jit
def consumer(
    X: gl.constexpr, out, lse, sinks, places, rows, zero, scale2, ring_a, ring_b, entry_s, slots, full, empty, facts, told, k_full,
    k_empty, sink_s, N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, SINKS: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """Consumer X: every second tile of the program's steps."""
    query, last_query = queries_of_program(rows)
    tiles_before = 0
    turn = 0
    step = 0
    while query < last_query:
        last, low, cmp_begin = hear_step(step, facts, told)
        tiles = gl.cdiv((last - query) * N, 64)
        row_end = last.to(gl.int64) * N
        take_keys(step, k_full)
        for tile in range((tiles_before & 1) ^ X, tiles, 2):
            row = query.to(gl.int64) * N + tile * 64
            z = tile * zero  # added to `low` it keeps what depends on that alone out of registers across tiles
            tile_forward(
                row, row_end, query, step, low + z, cmp_begin, turn, z, zero, out, lse, sinks, places, scale2, ring_a, ring_b, entry_s, slots,
                full, empty, facts, sink_s, N, D, ENTRIES, SINKS, PAIRS,
            )  # fmt: skip
            turn += 1
        free_keys(step, k_empty)
        tiles_before += tiles
        step += 1
        query = last


@gluon.jit(do_not_specialize=["rows", "zero", "scale"])
def hopper_dense_fwd_kernel(
    q, ori_kv, cmp_kv, sinks, places, out, lse, rows, zero, scale, N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, SINKS: gl.constexpr
):  # fmt: skip
    PAIRS: gl.constexpr = 2 if ENTRIES or D < 512 else 4  # what shared memory has room for, and not more than a tile's chunks
    dtype: gl.constexpr = q.dtype.element_ty
    scale2 = scale * 1.4426950408889634
    ring_a, ring_b = new_ring(dtype, D)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CHUNK], dtype)
    slots = gl.allocate_shared_memory(dtype, [2 * PAIRS, 64, CHUNK], tile_layout)
    entry_s = slots  # stands in where there are none
    if ENTRIES > 0:
        entry_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ENTRIES, CHUNK], dtype)
        entry_s = gl.allocate_shared_memory(dtype, [D // CHUNK, ENTRIES, CHUNK], entry_layout)
    full_0, full_1, empty = new_pair_barriers(64, PAIRS), new_pair_barriers(64, PAIRS), new_pair_barriers(1, PAIRS)
    facts, told = new_facts(), new_step_barriers(1)
    sink_s = slots  # stands in where sinks are loaded with the rows
    if SINKS and one_query(N):
        sink_s = gl.allocate_shared_memory(gl.float32, [N // 64, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        for group in gl.static_range(N // 64):
            h = group * 64 + gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
            sink_s.index(group).store(load_sink(sinks, h, h < N, SINKS))
    k_full, k_empty = new_step_barriers(64), new_step_barriers(2)
    gl.warp_specialize(
        [
            (consumer, (
                0, out, lse, sinks, places, rows, zero, scale2, ring_a, ring_b, entry_s, slots, full_0, empty, facts, told, k_full,
                k_empty, sink_s, N, D, ENTRIES, SINKS, PAIRS,
            )),
            (consumer, (
                1, out, lse, sinks, places, rows, zero, scale2, ring_a, ring_b, entry_s, slots, full_1, empty, facts, told, k_full,
                k_empty, sink_s, N, D, ENTRIES, SINKS, PAIRS,
            )),
            (q_producer, (q, rows, zero, slots, full_0, full_1, empty, facts, told, N, D, PAIRS)),
            (key_producer, (ori_kv, cmp_kv, places, rows, ring_a, ring_b, entry_s, facts, told, k_full, k_empty, D, ENTRIES)),
        ],
        [4, 2, 2],
        [224, 56, 56],
    )  # fmt: skip


@cache
def dense_forward_spec(dtype: torch.dtype, N: int, D: int, compressed: bool, sinks: bool) -> Spec:
    x = f"*{TRITON_DTYPE[dtype]}"
    return Spec(
        hopper_dense_fwd_kernel,
        types={
            "q": x, "ori_kv": x, "cmp_kv": x, "sinks": "*fp32", "places": "*i32", "out": x, "lse": "*fp32", "rows": "i32", "zero": "i32",
            "scale": "fp32",
        },
        consts={"N": N, "D": D, "ENTRIES": ENTRIES_MAX if compressed else 0, "SINKS": sinks},
        targets=("cuda",),
    )  # fmt: skip


def dense_forward(
    q: torch.Tensor, ori_kv: torch.Tensor, cmp_kv: torch.Tensor | None, sinks: torch.Tensor | None, places: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, scale: float,
) -> None:  # fmt: skip
    """Writes out and lse. Tensors need not be contiguous, places are those of places_of, the scale is positive."""
    N, D = q.shape[-2:]
    rows = places.shape[0]
    q, ori_kv = laid_out(q), laid_out(ori_kv)
    spec = dense_forward_spec(q.dtype, N, D, cmp_kv is not None, sinks is not None)
    # a tensor that the mode does not read is stood in for by another of its type
    cmp_kv = q if cmp_kv is None else laid_out(cmp_kv)
    sinks = lse if sinks is None else sinks.contiguous()
    spec.launch((programs(triton.cdiv(rows, UNIT.value), q.device),), q, ori_kv, cmp_kv, sinks, places, out, lse, rows, 0, scale)
