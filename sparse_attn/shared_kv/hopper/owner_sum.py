"""Deterministic gradient of the keys from partial rows: every key adds up the rows that were written for it, in the order of the queries.

Keys of a contiguous range (a window, or all compressed entries) are seen by a contiguous range of queries, so they need no lists: two
bisections a key (`range_bounds`) give its queries, and the slot is key - begin of that query. Selected entries have lists, made by one
stable sort for many chunks of queries at once, since a sort costs 80 us however short it is.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import TRITON_DTYPE, Spec

LIST_SLOTS = 1 << 23  # slots sorted at once: 28 bytes each


@triton.jit(do_not_specialize=["rows", "keys", "steps"])
def range_bounds_kernel(places, bounds, rows, keys, steps, COLUMN: tl.constexpr, BLOCK: tl.constexpr):
    """bounds [keys, 2]: first query whose range ends after the key, first query whose range begins after it."""
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = key < keys
    for side in tl.static_range(2):
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + rows
        for _ in range(steps):
            middle = (low + high) // 2
            searching = low < high
            at = tl.minimum(middle, rows - 1).to(tl.int64)
            before = tl.load(places + at * 4 + COLUMN + 1 - side) <= key
            low = tl.where(searching & before, middle + 1, low)
            high = tl.where(searching & ~before, middle, high)
        tl.store(bounds + key.to(tl.int64) * 2 + side, low, mask=inside)


@triton.jit(do_not_specialize=["row0", "count", "slots"])
def range_sum_kernel(
    part, places, bounds, dkv, row0, count, slots, COLUMN: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BL: tl.constexpr,
):  # fmt: skip
    """Adds to dkv [keys, D] fp32 the rows of part [groups, count, slots, D], for the keys that queries row0, ... see."""
    SLICES: tl.constexpr = D // BD
    d = (tl.program_id(0) % SLICES) * BD + tl.arange(0, BD)
    n = tl.arange(0, BL)
    first = tl.load(places + row0.to(tl.int64) * 4 + COLUMN)
    last = tl.load(places + (row0 + count - 1).to(tl.int64) * 4 + COLUMN + 1)
    for key in range(first + tl.program_id(0) // SLICES, last, tl.num_programs(0) // SLICES):
        begin = tl.maximum(tl.load(bounds + key * 2) - row0, 0)
        end = tl.minimum(tl.load(bounds + key * 2 + 1) - row0, count)
        acc = tl.zeros([BL, BD], tl.float32)
        for i in tl.range(begin, end, BL, num_stages=2):
            on = i + n < end
            local = tl.where(on, i + n, begin).to(tl.int64)
            slot = key - tl.load(places + (row0 + local) * 4 + COLUMN)
            for group in tl.static_range(GROUPS):
                at = (group * count + local) * slots + slot
                acc += tl.load(part + at[:, None] * D + d[None, :], mask=on[:, None], other=0.0).to(tl.float32)
        target = dkv + (tl.zeros([BD], tl.int64) + key) * D + d
        tl.store(target, tl.load(target) + tl.sum(acc, 0))


@triton.jit(do_not_specialize=["row0", "slots", "K", "chunk", "entries", "lowest"])
def owner_kernel(indices, places, owner, row0, slots, K, chunk, entries, lowest, BLOCK: tl.constexpr):
    """Owner of every slot of queries row0, ...: entry + entries * (chunk of its query), counted from `lowest`; the highest where none."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    on = at < slots
    local = at // K
    row = row0 + local
    entry = tl.load(indices + row0.to(tl.int64) * K + at, mask=on, other=-1)
    begin = tl.load(places + row * 4 + 2, mask=on, other=0)
    end = tl.load(places + row * 4 + 3, mask=on, other=0)
    counts = (entry >= 0) & (entry < end - begin)
    chunks = (slots // K + chunk - 1) // chunk
    key = tl.where(counts, begin + entry + (local // chunk).to(tl.int32) * entries, chunks * entries)
    tl.store(owner + at, (key + lowest).to(owner.dtype.element_ty), mask=on)


@triton.jit(do_not_specialize=["first", "slot0", "count", "K"])
def list_sum_kernel(
    part, starts, order, dkv, first, slot0, count, K, GROUPS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr
):  # fmt: skip
    """Adds to dkv [entries, D] fp32 the rows of part [groups, count, K, D] that each entry owns. `first` is the chunk's in starts, slot0
    its first slot in `order`."""
    SLICES: tl.constexpr = D // BD
    entry = tl.program_id(0) // SLICES
    d = (tl.program_id(0) % SLICES) * BD + tl.arange(0, BD)
    n = tl.arange(0, BL)
    begin = tl.load(starts + first + entry)
    end = tl.load(starts + first + entry + 1)
    acc = tl.zeros([BL, BD], tl.float32)
    for i in tl.range(begin, end, BL, num_stages=2):
        on = i + n < end
        slot = tl.load(order + i + n, mask=on, other=0) - slot0
        for group in tl.static_range(GROUPS):
            at = group * count * K + slot
            acc += tl.load(part + at[:, None] * D + d[None, :], mask=on[:, None], other=0.0).to(tl.float32)
    if end > begin:
        target = dkv + entry.to(tl.int64) * D + d
        tl.store(target, tl.load(target) + tl.sum(acc, 0))


@cache
def bounds_spec(column: int) -> Spec:
    types = {"places": "*i32", "bounds": "*i32", "rows": "i32", "keys": "i32", "steps": "i32"}
    return Spec(range_bounds_kernel, types=types, consts={"COLUMN": column, "BLOCK": 128}, targets=("cuda",))


@cache
def range_sum_spec(dtype: torch.dtype, groups: int, D: int, column: int) -> Spec:
    types = {"part": f"*{TRITON_DTYPE[dtype]}", "places": "*i32", "bounds": "*i32", "dkv": "*fp32"}
    return Spec(
        range_sum_kernel,
        types={**types, "row0": "i32", "count": "i32", "slots": "i32"},
        consts={"COLUMN": column, "GROUPS": groups, "D": D, "BD": D, "BL": 16},
        targets=("cuda",),
    )


@cache
def owner_spec(short: bool) -> Spec:
    numbers = dict.fromkeys(("row0", "slots", "K", "chunk", "entries", "lowest"), "i32")
    types = {"indices": "*i32", "places": "*i32", "owner": "*i16" if short else "*i32", **numbers}
    return Spec(owner_kernel, types=types, consts={"BLOCK": 1024}, targets=("cuda",))


@cache
def list_sum_spec(dtype: torch.dtype, groups: int, D: int) -> Spec:
    types = {"part": f"*{TRITON_DTYPE[dtype]}", "starts": "*i32", "order": "*i64", "dkv": "*fp32"}
    return Spec(
        list_sum_kernel,
        types={**types, **dict.fromkeys(("first", "slot0", "count", "K"), "i32")},
        consts={"GROUPS": groups, "D": D, "BD": min(D, 256), "BL": 32},
        targets=("cuda",),
    )


def range_bounds(places: torch.Tensor, keys: int, column: int) -> torch.Tensor:
    """[keys, 2] int32: begin and end of the queries that see each key of a contiguous range; `column` is the range's in places."""
    rows = places.shape[0]
    bounds = torch.empty((keys, 2), dtype=torch.int32, device=places.device)
    if keys:
        bounds_spec(column).launch((triton.cdiv(keys, 128),), places, bounds, rows, keys, rows.bit_length())
    return bounds


def range_sum(part: torch.Tensor, places: torch.Tensor, bounds: torch.Tensor, dkv: torch.Tensor, row0: int, column: int) -> None:
    """Adds part [groups, count, slots, D] to dkv [keys, D] fp32, in the order of the queries."""
    groups, count, slots, D = part.shape
    keys = bounds.shape[0]
    if keys and slots:
        spec = range_sum_spec(part.dtype, groups, D, column)
        grid = min(keys, count + slots) * (D // spec.consts["BD"])
        spec.launch((grid,), part, places, bounds, dkv, row0, count, slots)


def owner_lists(
    indices: torch.Tensor, places: torch.Tensor, row0: int, rows: int, chunk: int, K: int, entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """starts [chunks * entries + 1] int32 and order [rows * K] int64: in chunk c of queries row0 + c * chunk, ..., entry j owns the slots
    order[starts[c * entries + j] : starts[c * entries + j + 1]], counted from slot 0 of query row0."""
    chunks, slots = triton.cdiv(rows, chunk), rows * K
    short = chunks * entries < 1 << 16  # 16-bit keys take half of the sort's passes
    owner = torch.empty(slots, dtype=torch.int16 if short else torch.int32, device=places.device)
    lowest = -(1 << 15) if short else 0
    owner_spec(short).launch((triton.cdiv(slots, 1024),), indices, places, owner, row0, slots, K, chunk, entries, lowest)
    owner, order = torch.sort(owner, stable=True)
    bounds = torch.arange(chunks * entries + 1, dtype=torch.int32, device=places.device) + lowest
    return torch.searchsorted(owner, bounds.to(owner.dtype), out_int32=True), order


def list_sum(part: torch.Tensor, starts: torch.Tensor, order: torch.Tensor, dkv: torch.Tensor, index: int, slot0: int) -> None:
    """Adds part [groups, count, K, D] to dkv [entries, D] fp32: chunk `index` of the lists, whose first slot in `order` is slot0."""
    groups, count, K, D = part.shape
    spec = list_sum_spec(part.dtype, groups, D)
    entries = dkv.shape[0]
    spec.launch((entries * (D // spec.consts["BD"]),), part, starts, order, dkv, index * entries, slot0, count, K)
