"""Forward for sm_90 in Gluon where a query's ranges are contiguous and short: SWA, and CFA with few entries. See dense.py.

    two consumers    a tile of 64 rows each, in turn: S of all keys, softmax, then O = P V chunk by chunk of channels. P stays in registers
                     and no accumulator outlives its chunk, so a consumer has registers to spare and the two overlap each other's phases.
    two producers    of two warps: q (and compressed entries) for their consumer, half of the new keys of every step

Shared memory at D = 512, 224 KB: keys 144, two streams 64, staging of the output 16.

Barriers: full / empty of each slot of a stream; k_full (every thread of both producers) and k_empty (both consumers) once a step, a pair
for even steps and one for odd ones, since producers may be two steps ahead of a consumer.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernel_runtime.device import device_properties
from kernel_runtime.launch import TRITON_DTYPE, Spec
from sparse_attn.shared_kv.hopper.core import copy_layout_for
from sparse_attn.shared_kv.hopper.dense import (
    ALIGN,
    CHUNK,
    ENTRIES_MAX,
    RING_A,
    RING_B,
    free_keys,
    new_key_barriers,
    new_ring,
    new_stream,
    producer,
    queries_of_program,
    slot_keys,
    step_of,
    take,
    take_keys,
)
from sparse_attn.shared_kv.hopper.fwd import with_sink


@gluon.jit
def score_chunk(c: gl.constexpr, g, sa, sb, se, turn, z, ring_a, ring_b, slots, full, empty, ENTRIES: gl.constexpr):
    """S += q K^T over chunk c of a group of four. The products of a chunk run on while the next one is issued; only then are they waited for
    and their slots free."""
    TILES: gl.constexpr = 1 if ENTRIES else 0
    j: gl.constexpr = c * (1 + TILES)
    at = g * 4 + c + z
    take(j, turn, full)
    x = slots.index(z + j % 4)
    sa = warpgroup_mma(x, ring_a.index(at).permute((1, 0)), sa, is_async=True)
    sb = warpgroup_mma(x, ring_b.index(at).permute((1, 0)), sb, is_async=True)
    if TILES == 1:
        take(j + 1, turn, full)
        se = warpgroup_mma(x, slots.index(z + (j + 1) % 4).slice(0, ENTRIES, dim=0).permute((1, 0)), se, is_async=True)
    LEFT: gl.constexpr = 0 if c == 3 else 2 + TILES  # products of this chunk; none may run on into the next pass of the loop
    if TILES == 0:
        sa, sb = warpgroup_mma_wait(LEFT, deps=[sa, sb])
    else:
        sa, sb, se = warpgroup_mma_wait(LEFT, deps=[sa, sb, se])
    if c > 0:
        for i in gl.static_range(1 + TILES):
            mbarrier.arrive(empty[(j - 1 - TILES + i) % 4], count=1)
    if LEFT == 0:
        for i in gl.static_range(1 + TILES):
            mbarrier.arrive(empty[(j + i) % 4], count=1)
    return sa, sb, se


@gluon.jit
def output_chunk(c: gl.constexpr, g, pa, pb, pe, o_zero, turn, z, ring_a, ring_b, slots, full, ENTRIES: gl.constexpr):
    at = g * 4 + c + z
    o = warpgroup_mma(pa, ring_a.index(at), o_zero, use_acc=False, is_async=True)
    o = warpgroup_mma(pb, ring_b.index(at), o, is_async=True)
    if ENTRIES > 0:
        take(c, turn, full)
        o = warpgroup_mma(pe, slots.index(z + c).slice(0, ENTRIES, dim=0), o, is_async=True)
    return o


@gluon.jit
def tile_forward(
    row, row_end, low, cmp_begin, turn, z, out, lse, sinks, places, scale2, ring_a, ring_b, slots, full, empty, staged,
    N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """One tile of 64 rows; returns the turn of the next one."""
    TILES: gl.constexpr = 1 if ENTRIES else 0
    BE: gl.constexpr = max(16, ENTRIES)
    dtype: gl.constexpr = out.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RING_A, 16])
    b_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RING_B, 16])
    e_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    a_rows: gl.constexpr = gl.SliceLayout(1, a_layout)
    # ranges and sinks of the rows, asked for before they are needed
    r = row + gl.arange(0, 64, layout=a_rows)
    on = r < row_end
    query = r // N
    begin = gl.load(places + query * 4, mask=on, other=0)
    stop = gl.load(places + query * 4 + 1, mask=on, other=0)
    seen = stop
    if ENTRIES > 0:
        seen = gl.load(places + query * 4 + 3, mask=on, other=0) - cmp_begin
    # S, chunk after chunk; a slot is free again when the product after it has been issued and its own is done
    sa = gl.zeros([64, RING_A], gl.float32, layout=a_layout)
    sb = gl.zeros([64, RING_B], gl.float32, layout=b_layout)
    se = gl.zeros([64, BE], gl.float32, layout=e_layout)
    for g in range(D // CHUNK // 4):
        for c in gl.static_range(4):
            sa, sb, se = score_chunk(c, g, sa, sb, se, turn, z, ring_a, ring_b, slots, full, empty, ENTRIES)
        turn += 1 + TILES
    # softmax over all keys at once
    ka = slot_keys(gl.arange(0, RING_A, layout=gl.SliceLayout(0, a_layout)), low)
    kb = slot_keys(RING_A + gl.arange(0, RING_B, layout=gl.SliceLayout(0, b_layout)), low)
    b_rows: gl.constexpr = gl.SliceLayout(1, b_layout)
    e_rows: gl.constexpr = gl.SliceLayout(1, e_layout)
    begin_b, stop_b = gl.convert_layout(begin, b_rows), gl.convert_layout(stop, b_rows)
    sa = gl.where((ka[None, :] >= begin[:, None]) & (ka[None, :] < stop[:, None]), sa * scale2, float("-inf"))
    sb = gl.where((kb[None, :] >= begin_b[:, None]) & (kb[None, :] < stop_b[:, None]), sb * scale2, float("-inf"))
    m = gl.maximum(gl.maximum(gl.max(sa, 1), gl.convert_layout(gl.max(sb, 1), a_rows)), -1.0e30)
    if TILES == 1:
        e = gl.arange(0, BE, layout=gl.SliceLayout(0, e_layout))
        seen_e = gl.convert_layout(seen, e_rows)
        se = gl.where(e[None, :] < seen_e[:, None], se * scale2, float("-inf"))
        m = gl.maximum(m, gl.convert_layout(gl.max(se, 1), a_rows))
    sa = gl.exp2(sa - m[:, None])
    sb = gl.exp2(sb - gl.convert_layout(m, b_rows)[:, None])
    l = gl.sum(sa, 1) + gl.convert_layout(gl.sum(sb, 1), a_rows)
    pa = gl.convert_layout(sa.to(dtype), p_layout)
    pb = gl.convert_layout(sb.to(dtype), p_layout)
    pe = pb
    if TILES == 1:
        me = gl.convert_layout(m, e_rows)
        se = gl.exp2(se - me[:, None])
        l += gl.convert_layout(gl.sum(se, 1), a_rows)
        pe = gl.convert_layout(se.to(dtype), p_layout)
    inverse, total = with_sink(m, l, sinks, (r % N).to(gl.int32), on, SINKS)
    gl.store(lse + r, total, mask=on)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))
    # O of one chunk while the last one is written out
    copy: gl.constexpr = copy_layout_for(CHUNK)
    rc = row + gl.arange(0, 64, layout=gl.SliceLayout(1, copy))
    target = out + rc[:, None] * D + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, copy))[None, :]
    writes = (rc < row_end)[:, None]
    o_zero = gl.zeros([64, CHUNK], gl.float32, layout=o_layout)
    for g in range(D // CHUNK // 4):
        current = output_chunk(0, g, pa, pb, pe, o_zero, turn, z, ring_a, ring_b, slots, full, ENTRIES)
        for c in gl.static_range(4):
            if c < 3:
                upcoming = output_chunk(c + 1, g, pa, pb, pe, o_zero, turn, z, ring_a, ring_b, slots, full, ENTRIES)
                v = warpgroup_mma_wait(2 + TILES, deps=[current])
                current = upcoming
            else:
                v = warpgroup_mma_wait(0, deps=[current])
            if TILES == 1:
                mbarrier.arrive(empty[c], count=1)
            staged.store((v * inverse[:, None]).to(dtype))
            gl.store(target + (g * 4 + c) * CHUNK, staged.load(copy), mask=writes)
        turn += TILES
    return turn


@gluon.jit
def consumer(
    X: gl.constexpr, out, lse, sinks, places, rows, zero, scale2, ring_a, ring_b, slots, full, empty, staged, k_full, k_empty,
    N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    query, last_query = queries_of_program(rows)
    tiles_before = 0
    turn = 0
    step = 0
    while query < last_query:
        last, low, _, cmp_begin, _ = step_of(query, last_query, places, ENTRIES > 0, 4)
        tiles = gl.cdiv((last - query) * N, 64)
        row_end = last.to(gl.int64) * N
        take_keys(step, k_full)
        for tile in range((tiles_before & 1) ^ X, tiles, 2):
            # Opaque zero, as in fwd.py; without it what depends on `low` alone is kept in registers across tiles, 36 of them
            row = query.to(gl.int64) * N + tile * 64
            z = tile * zero
            turn = tile_forward(
                row, row_end, low + z, cmp_begin, turn, z, out, lse, sinks, places, scale2, ring_a, ring_b, slots, full, empty, staged,
                N, D, ENTRIES, SINKS,
            )  # fmt: skip
        free_keys(step, k_empty)
        tiles_before += tiles
        step += 1
        query = last


@gluon.jit(do_not_specialize=["rows", "zero", "scale"])
def hopper_dense_fwd_kernel(
    q, ori_kv, cmp_kv, sinks, places, out, lse, rows, zero, scale, N: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, SINKS: gl.constexpr
):  # fmt: skip
    dtype: gl.constexpr = q.dtype.element_ty
    scale2 = scale * 1.4426950408889634
    ring_a, ring_b = new_ring(dtype, D)
    slots0, full0, empty0 = new_stream(dtype, 64)
    slots1, full1, empty1 = new_stream(dtype, 64)
    stage_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CHUNK], dtype)
    staged0 = gl.allocate_shared_memory(dtype, [64, CHUNK], stage_layout)
    staged1 = gl.allocate_shared_memory(dtype, [64, CHUNK], stage_layout)
    k_full, k_empty = new_key_barriers()
    gl.warp_specialize(
        [
            (consumer, (
                0, out, lse, sinks, places, rows, zero, scale2, ring_a, ring_b, slots0, full0, empty0, staged0, k_full, k_empty,
                N, D, ENTRIES, SINKS,
            )),
            (consumer, (
                1, out, lse, sinks, places, rows, zero, scale2, ring_a, ring_b, slots1, full1, empty1, staged1, k_full, k_empty,
                N, D, ENTRIES, SINKS,
            )),
            (producer, (
                0, q, ori_kv, cmp_kv, places, rows, zero, ring_a, ring_b, slots0, full0, empty0, k_full, k_empty, N, D, ENTRIES,
            )),
            (producer, (
                1, q, ori_kv, cmp_kv, places, rows, zero, ring_a, ring_b, slots1, full1, empty1, k_full, k_empty, N, D, ENTRIES,
            )),
        ],
        [4, 2, 2],
        [216, 72, 72],
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
    """Writes out and lse. Tensors need not be contiguous, places are those of places_of."""
    N, D = q.shape[-2:]
    rows = places.shape[0]
    q, ori_kv = q.contiguous(), ori_kv.contiguous()
    spec = dense_forward_spec(q.dtype, N, D, cmp_kv is not None, sinks is not None)
    # a tensor that the mode does not read is stood in for by another of its type
    cmp_kv = q if cmp_kv is None else cmp_kv.contiguous()
    sinks = lse if sinks is None else sinks.contiguous()
    grid = (min(triton.cdiv(rows, ALIGN.value), device_properties(q.device).cube_cores),)
    spec.launch(grid, q, ori_kv, cmp_kv, sinks, places, out, lse, rows, 0, scale)
