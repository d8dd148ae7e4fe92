"""The attention's backward in portable Triton: kernels and launcher.

With P = exp(z - LSE), delta = sum_d dO * O, dP = dO . kv and dZ = P * (dP - delta):
    dq = scale * dZ @ kv,   dkv = scale * dZ^T @ q + P^T @ dO,   dsink = -sum exp(sink - LSE) * delta
In one kernel this needs more registers than there are, so there are two steps, on chunks of queries that bound the memory:
    1. a program per query and block of heads: dq, delta, and P^T and scale * dZ^T of every slot, [queries, slots, N]
    2. dkv from those. A key of a contiguous range (window, or all compressed entries) is seen by a contiguous range of queries, so a
       program owns a tile of keys and runs over its queries: no atomics. Selected entries have no such order: atomic additions in fp32,
       or, deterministic, one partial row a slot that the entry's owner adds up in a fixed order (sparse_attn/shared_kv/owner.py).
Ascend always takes the latter: it would add element by element. Its tiles are smaller and its programs loop over tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.device import grid_size, on_npu
from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from sparse_attn.shared_kv.core import load_rows, product, range_rows, selected_rows, store_rows, used_slots, used_slots_ascend
from sparse_attn.shared_kv.fwd import (
    ALL,
    GPU,
    INDEX_BLOCK,
    NONE,
    NPU,
    SELECTED,
    Tiles,
    ascend_tiles,
    forward_spec,
    forward_tiles,
    mode_of,
    probs_spec,
)
from sparse_attn.shared_kv.owner import owner_lists, owner_spec, owner_sum
from sparse_attn.shared_kv.places import NUMBER, RIGHT_ALIGNED, places_of, places_spec
from sparse_attn.shared_kv.sinks import sink_gradient, sink_gradient_spec

# P^T, dZ^T and partial rows of a chunk of queries stay below this
CHUNK_BYTES = 1 << 30


@triton.jit
def gradient_tile(
    keys, key_rows, seen, q0, q1, do0, do1, delta, lse2, acc0, acc1, p_out, dz_out, slot_row, h, on, scale,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HALVES: tl.constexpr, EVEN: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    k0 = load_rows(keys, key_rows, seen, d, D, EVEN)
    s = product(q0, tl.trans(k0), tl.zeros([BH, BN], tl.float32))
    dp = product(do0, tl.trans(k0), tl.zeros([BH, BN], tl.float32))
    if HALVES == 2:
        k1 = load_rows(keys, key_rows, seen, BD + d, D, EVEN)
        s = product(q1, tl.trans(k1), s)
        dp = product(do1, tl.trans(k1), dp)
    p = tl.where(seen[None, :], tl.exp2(s * (scale * 1.4426950408889634) - lse2[:, None]), 0.0)
    dz = (p * (dp - delta[:, None]) * scale).to(k0.dtype)
    acc0 = product(dz, k0, acc0)
    if HALVES == 2:
        acc1 = product(dz, k1, acc1)
    # keys past the range or the list have no slot of their own: nothing may be written for them
    mask = seen[:, None] & on[None, :]
    offset = slot_row[:, None] * N + h[None, :]
    tl.store(p_out + offset, tl.trans(p.to(k0.dtype)), mask=mask)
    tl.store(dz_out + offset, tl.trans(dz), mask=mask)
    return acc0, acc1


@triton.jit(do_not_specialize=["tasks", "row0", "rows", "K", "window_slots", "slots", "scale"])
def attention_dq_kernel(
    q, ori_kv, cmp_kv, indices, places, out, dout, lse, dq, delta_out, p_out, dz_out, tasks, row0, rows, K, window_slots, slots, scale,
    N: tl.constexpr, D: tl.constexpr, COMPRESSED: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HALVES: tl.constexpr, BK: tl.constexpr, ASCEND: tl.constexpr,
):  # fmt: skip
    """Queries row0 to row0 + rows - 1. Slots of a query: window_slots for its window, then those of its compressed entries."""
    EVEN: tl.constexpr = D == BD * HALVES
    HEAD_BLOCKS: tl.constexpr = (N + BH - 1) // BH
    n = tl.arange(0, BN)
    d = tl.arange(0, BD)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        local = (rows - 1 - task // HEAD_BLOCKS).to(tl.int64)
        row = row0 + local
        h = (task % HEAD_BLOCKS) * BH + tl.arange(0, BH)
        on = h < N
        heads = row * N + h
        do0 = load_rows(dout, heads, on, d, D, EVEN)
        delta = tl.sum(do0.to(tl.float32) * load_rows(out, heads, on, d, D, EVEN).to(tl.float32), 1)
        q0 = load_rows(q, heads, on, d, D, EVEN)
        acc0 = tl.zeros([BH, BD], tl.float32)
        if HALVES == 2:
            do1 = load_rows(dout, heads, on, BD + d, D, EVEN)
            delta += tl.sum(do1.to(tl.float32) * load_rows(out, heads, on, BD + d, D, EVEN).to(tl.float32), 1)
            q1 = load_rows(q, heads, on, BD + d, D, EVEN)
            acc1 = tl.zeros([BH, BD], tl.float32)
        else:
            do1 = do0
            q1 = q0
            acc1 = tl.zeros([BH, 1], tl.float32)
        if ASCEND:
            # a zero that the compiler does not know: ascendnpu-ir 1.0.0 crashes where a product's accumulator starts as a constant
            acc0 += scale - scale
            acc1 += scale - scale
        tl.store(delta_out + heads, delta, mask=on)
        lse2 = tl.load(lse + heads, mask=on, other=float("inf")) * 1.4426950408889634
        slot_row = local * slots

        begin = tl.load(places + row * 4)
        end = tl.load(places + row * 4 + 1)
        for key in range(begin, end, BN):
            key_rows, seen = range_rows(begin, key + n, end)
            acc0, acc1 = gradient_tile(
                ori_kv, key_rows, seen, q0, q1, do0, do1, delta, lse2, acc0, acc1, p_out, dz_out, slot_row + (key - begin) + n, h, on,
                scale, N, D, BD, HALVES, EVEN, BH, BN,
            )  # fmt: skip
        slot_row += window_slots
        if COMPRESSED == 1:
            begin = tl.load(places + row * 4 + 2)
            end = tl.load(places + row * 4 + 3)
            for key in range(begin, end, BN):
                key_rows, seen = range_rows(begin, key + n, end)
                acc0, acc1 = gradient_tile(
                    cmp_kv, key_rows, seen, q0, q1, do0, do1, delta, lse2, acc0, acc1, p_out, dz_out, slot_row + (key - begin) + n, h, on,
                    scale, N, D, BD, HALVES, EVEN, BH, BN,
                )  # fmt: skip
        if COMPRESSED == 2:
            begin = tl.load(places + row * 4 + 2)
            end = tl.load(places + row * 4 + 3)
            if ASCEND:
                used = used_slots_ascend(indices, row * K, K, end - begin, BK)
            else:
                used = used_slots(indices, row * K, K, end - begin, BK)
            for slot in range(0, used, BN):
                key_rows, seen = selected_rows(indices, row * K, slot + n, used, begin, end)
                acc0, acc1 = gradient_tile(
                    cmp_kv, key_rows, seen, q0, q1, do0, do1, delta, lse2, acc0, acc1, p_out, dz_out, slot_row + slot + n, h, on,
                    scale, N, D, BD, HALVES, EVEN, BH, BN,
                )  # fmt: skip
        store_rows(dq, heads, on, d, acc0, D, EVEN)
        if HALVES == 2:
            store_rows(dq, heads, on, BD + d, acc1, D, EVEN)


@triton.jit
def rows_up_to(bounds, row0, rows, limit, steps):
    """How many of the queries row0, ... have their bound (non-decreasing, 4 apart) at or below `limit`."""
    low = 0
    high = rows
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        below = tl.load(bounds + (row0 + tl.minimum(middle, rows - 1)).to(tl.int64) * 4) <= limit
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & (below == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["tasks", "keys", "row0", "rows", "first_slot", "slots", "steps"])
def range_dkv_kernel(
    q, dout, places, p, dz, dkv, tasks, keys, row0, rows, first_slot, slots, steps,
    N: tl.constexpr, D: tl.constexpr, COLUMN: tl.constexpr, NH: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Adds to dkv [keys, D] fp32 what queries row0, ... give to a tile of BM keys and BD channels; COLUMN is the range's in places."""
    SLICES: tl.constexpr = (D + BD - 1) // BD
    EVEN: tl.constexpr = D % BD == 0
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        key0 = (task // SLICES) * BM
        key = key0 + tl.arange(0, BM)
        d = (task % SLICES) * BD + tl.arange(0, BD)
        h = tl.arange(0, NH)
        on = h < N
        inside = key < keys
        acc = load_rows(dkv, key.to(tl.int64), inside, d, D, EVEN)
        first = rows_up_to(places + COLUMN + 1, row0, rows, key0, steps)  # before it ranges end at or before the tile
        last = rows_up_to(places + COLUMN, row0, rows, key0 + BM - 1, steps)  # from it on they begin after the tile
        for local in range(first, last):
            row = (row0 + local).to(tl.int64)
            begin = tl.load(places + row * 4 + COLUMN)
            end = tl.load(places + row * 4 + COLUMN + 1)
            seen = (key >= begin) & (key < end)
            slot = tl.where(seen, (row - row0) * slots + first_slot + key - begin, 0)
            mask = seen[:, None] & on[None, :]
            heads = row * N + h
            weight = tl.load(p + slot[:, None] * N + h[None, :], mask=mask, other=0.0)
            acc = product(weight, load_rows(dout, heads, on, d, D, EVEN), acc)
            weight = tl.load(dz + slot[:, None] * N + h[None, :], mask=mask, other=0.0)
            acc = product(weight, load_rows(q, heads, on, d, D, EVEN), acc)
        store_rows(dkv, key.to(tl.int64), inside, d, acc, D, EVEN)


@triton.jit(do_not_specialize=["tasks", "row0", "rows", "K", "first_slot", "slots"])
def selected_dkv_kernel(
    q, dout, indices, places, p, dz, target, tasks, row0, rows, K, first_slot, slots,
    N: tl.constexpr, D: tl.constexpr, PARTIAL: tl.constexpr, NH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    ASCEND: tl.constexpr,
):  # fmt: skip
    """One query and BD channels. PARTIAL: target [queries, K, D] gets a row for every slot that counts; else target [entries, D] fp32 is
    added to."""
    SLICES: tl.constexpr = (D + BD - 1) // BD
    EVEN: tl.constexpr = D % BD == 0
    n = tl.arange(0, BN)
    h = tl.arange(0, NH)
    on = h < N
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        d = (task % SLICES) * BD + tl.arange(0, BD)
        local = (rows - 1 - task // SLICES).to(tl.int64)
        row = row0 + local
        heads = row * N + h
        q_tile = load_rows(q, heads, on, d, D, EVEN)
        do_tile = load_rows(dout, heads, on, d, D, EVEN)
        begin = tl.load(places + row * 4 + 2)
        end = tl.load(places + row * 4 + 3)
        if ASCEND:
            used = used_slots_ascend(indices, row * K, K, end - begin, BK)
        else:
            used = used_slots(indices, row * K, K, end - begin, BK)
        for slot0 in range(0, used, BN):
            slot = slot0 + n
            key_rows, seen = selected_rows(indices, row * K, slot, used, begin, end)
            offset = (local * slots + first_slot + slot)[:, None] * N + h[None, :]
            mask = seen[:, None] & on[None, :]
            v = product(tl.load(p + offset, mask=mask, other=0.0), do_tile, tl.zeros([BN, BD], tl.float32))
            v = product(tl.load(dz + offset, mask=mask, other=0.0), q_tile, v)
            if PARTIAL:
                store_rows(target, local * K + slot, seen, d, v, D, EVEN)
            else:
                mask = seen[:, None] if EVEN else seen[:, None] & (d < D)[None, :]
                tl.atomic_add(target + key_rows[:, None] * D + d[None, :], v, mask=mask, sem="relaxed")


def gradient_tiles(dtype: torch.dtype, N: int, D: int) -> Tiles:
    """On a GPU: as in the forward, but q and dO both stay in shared memory: at D above 256 just one tile of keys fits beside them."""
    tiles = forward_tiles(dtype, N, D)
    return Tiles(tiles.BH, tiles.BN, tiles.BD, tiles.HALVES, tiles.num_warps, 1 if D > 128 else tiles.num_stages)


@cache
def dq_spec(dtype: torch.dtype, N: int, D: int, compressed: int, npu: bool = False) -> Spec:
    x, tiles = f"*{TRITON_DTYPE[dtype]}", (ascend_tiles if npu else gradient_tiles)(dtype, N, D)
    return Spec(
        attention_dq_kernel,
        types={
            "q": x, "ori_kv": x, "cmp_kv": x, "indices": "*i32", "places": "*i32", "out": x, "dout": x, "lse": "*fp32", "dq": x,
            "delta_out": "*fp32", "p_out": x, "dz_out": x,
            **dict.fromkeys(("tasks", "row0", "rows", "K", "window_slots", "slots"), "i32"), "scale": "fp32",
        },
        consts={
            "N": N, "D": D, "COMPRESSED": compressed, "BH": tiles.BH, "BN": tiles.BN, "BD": tiles.BD, "HALVES": tiles.HALVES,
            "BK": INDEX_BLOCK, "ASCEND": npu,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        targets=NPU if npu else GPU,
    )  # fmt: skip


def _padded_heads(N: int) -> int:
    return max(16, triton.next_power_of_2(N))


def _channels(dtype: torch.dtype, D: int) -> int:
    """Channels of a dkv tile: 128 in 16-bit types; fp32 products take operands from registers and want less."""
    return min(128 if dtype != torch.float32 else 32, max(16, triton.next_power_of_2(D)))


@cache
def range_spec(dtype: torch.dtype, N: int, D: int, column: int) -> Spec:
    x = f"*{TRITON_DTYPE[dtype]}"
    return Spec(
        range_dkv_kernel,
        types={
            "q": x, "dout": x, "places": "*i32", "p": x, "dz": x, "dkv": "*fp32",
            **dict.fromkeys(("tasks", "keys", "row0", "rows", "first_slot", "slots", "steps"), "i32"),
        },
        consts={"N": N, "D": D, "COLUMN": column, "NH": _padded_heads(N), "BM": 64, "BD": _channels(dtype, D)},
        num_warps=4,
        num_stages=2 if dtype != torch.float32 else 1,
    )  # fmt: skip


@cache
def selected_spec(dtype: torch.dtype, N: int, D: int, partial: bool, npu: bool = False) -> Spec:
    x = f"*{TRITON_DTYPE[dtype]}"
    return Spec(
        selected_dkv_kernel,
        types={
            "q": x, "dout": x, "indices": "*i32", "places": "*i32", "p": x, "dz": x, "target": x if partial else "*fp32",
            **dict.fromkeys(("tasks", "row0", "rows", "K", "first_slot", "slots"), "i32"),
        },
        consts={
            "N": N, "D": D, "PARTIAL": partial, "NH": _padded_heads(N), "BN": 64, "BD": _channels(dtype, D), "BK": INDEX_BLOCK,
            "ASCEND": npu,
        },
        num_warps=4,
        num_stages=2 if dtype != torch.float32 else 1,
        targets=NPU if npu else GPU,
    )  # fmt: skip


def attention_bwd(
    dout: torch.Tensor, q: torch.Tensor, ori_kv: torch.Tensor, cmp_kv: torch.Tensor | None, cmp_indices: torch.Tensor | None,
    sinks: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, cu_q: torch.Tensor | None, cu_ori: torch.Tensor | None,
    cu_cmp: torch.Tensor | None, q_offsets: torch.Tensor | None, q_offset: int | None, scale: float, cmp_ratio: int, window: int | None,
    deterministic: bool, npu: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dori_kv, dcmp_kv, dsinks of the op shared_kv_bwd; an empty tensor for what was not given. npu: see `on_npu`."""
    npu = on_npu(q.device, npu)
    N, D = q.shape[-2:]
    dtype, mode = q.dtype, mode_of(cmp_kv, cmp_indices)
    q, dout, out, lse, ori_kv = (x.contiguous() for x in (q, dout, out, lse, ori_kv))
    rows = lse.numel() // N
    dq = torch.empty_like(q)
    delta = torch.empty_like(lse)
    dsinks = q.new_empty(0) if sinks is None else torch.zeros_like(sinks)
    dori = torch.zeros(ori_kv.shape, dtype=torch.float32, device=q.device)
    dcmp = torch.zeros(0 if cmp_kv is None else cmp_kv.shape, dtype=torch.float32, device=q.device)
    if rows:
        places = places_of(q, ori_kv, cmp_kv, cu_q, cu_ori, cu_cmp, q_offsets, q_offset, cmp_ratio, window)
        cmp = q if cmp_kv is None else cmp_kv.contiguous()
        indices = places if cmp_indices is None else cmp_indices.contiguous()
        K = cmp_indices.shape[-1] if cmp_indices is not None else 0
        window_slots = ori_kv.shape[-2] if window is None else min(window, ori_kv.shape[-2])
        slots = window_slots + (K if mode == SELECTED else cmp.shape[-2] if mode == ALL else 0)
        partial = (deterministic or npu) and mode == SELECTED
        row_bytes = (2 * slots * N + (K * D if partial else 0)) * dtype.itemsize
        chunk = min(rows, max(1, CHUNK_BYTES // max(1, row_bytes)))
        p = torch.empty((chunk, slots, N), dtype=dtype, device=q.device)
        dz = torch.empty_like(p)
        part = torch.empty((chunk, K, D), dtype=dtype, device=q.device) if partial else None
        first = dq_spec(dtype, N, D, mode, npu)
        for row0 in range(0, rows, chunk):
            count = min(chunk, rows - row0)
            tasks = count * triton.cdiv(N, first.consts["BH"])
            grid = (grid_size(q.device, tasks, npu),)
            first.launch(
                grid, q, ori_kv, cmp, indices, places, out, dout, lse, dq, delta, p, dz, tasks, row0, count, K, window_slots, slots, scale
            )
            _add_range(q, dout, places, p, dz, dori, row0, count, 0, 0, slots, npu)
            if mode == ALL:
                _add_range(q, dout, places, p, dz, dcmp, row0, count, 2, window_slots, slots, npu)
            elif mode == SELECTED:
                spec = selected_spec(dtype, N, D, partial, npu)
                tasks = count * triton.cdiv(D, spec.consts["BD"])
                target = dcmp if part is None else part
                grid = (grid_size(q.device, tasks, npu),)
                spec.launch(grid, q, dout, indices, places, p, dz, target, tasks, row0, count, K, window_slots, slots)
                if part is not None:
                    entries = dcmp.numel() // D
                    owner_sum(part, *owner_lists(indices, places, row0, count, K, entries), dcmp, npu)
        if sinks is not None:
            dsinks = sink_gradient(sinks, lse, delta)
    return dq, dori.to(dtype), q.new_empty(0) if cmp_kv is None else dcmp.to(dtype), dsinks


def _add_range(
    q: torch.Tensor, dout: torch.Tensor, places: torch.Tensor, p: torch.Tensor, dz: torch.Tensor, dkv: torch.Tensor, row0: int,
    count: int, column: int, first_slot: int, slots: int, npu: bool,
) -> None:  # fmt: skip
    N, D = q.shape[-2:]
    keys = dkv.numel() // D
    if keys:
        spec = range_spec(q.dtype, N, D, column)
        tasks = triton.cdiv(keys, spec.consts["BM"]) * triton.cdiv(D, spec.consts["BD"])
        grid = (grid_size(q.device, tasks, npu),)
        spec.launch(grid, q, dout, places, p, dz, dkv, tasks, keys, row0, count, first_slot, slots, count.bit_length())


def specs(shape: ModelShape) -> Iterator[Spec]:
    """What layers of this model launch, forward and backward: window alone, all entries, or selected ones, with sinks; one sequence a
    row or packed documents, right aligned."""
    dtype = next(d for d, name in TRITON_DTYPE.items() if name == shape.dtype)
    N, D = shape.heads, shape.head_dim
    for compressed in (False, True):
        yield places_spec(False, NUMBER, compressed)
        yield places_spec(True, RIGHT_ALIGNED, compressed)
    for npu in (False, True):
        for mode in (NONE, ALL, SELECTED):
            yield forward_spec(dtype, N, D, mode, True, npu)
            yield dq_spec(dtype, N, D, mode, npu)
        yield probs_spec(dtype, N, D, npu)
    for column in (0, 2):
        yield range_spec(dtype, N, D, column)
    for partial, npu in ((False, False), (True, False), (True, True)):
        yield selected_spec(dtype, N, D, partial, npu)
    yield owner_spec(dtype, D)
    yield sink_gradient_spec(N)
