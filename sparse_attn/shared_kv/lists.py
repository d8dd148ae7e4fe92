"""Lists of selected entries in the form that the portable kernels walk through on a GPU.

A pass of its own, 8 K bytes a query: with rows in place of entries, -1 in place of whatever does not count and a length that is a multiple
of a tile, a program reads its list in vectors, without masks, and knows before its first tile how far it goes.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import Spec

UNIT = 64  # slots that lists are padded to
BK = 512


@triton.jit(do_not_specialize=["row0", "K", "units"])
def list_kernel(indices, places, lists, used, row0, K, units, UNIT: tl.constexpr, BK: tl.constexpr):
    """lists [queries, units * UNIT]: row of cmp_kv of every slot of queries row0, ..., -1 where it does not count; used [queries]."""
    local = tl.program_id(0).to(tl.int64)
    row = row0 + local
    begin = tl.load(places + row * 4 + 2)
    visible = tl.load(places + row * 4 + 3) - begin
    last = 0
    for slot0 in range(0, units * UNIT, BK):
        slot = slot0 + tl.arange(0, BK)
        entry = tl.load(indices + row * K + slot, mask=slot < K, other=-1)
        counts = (entry >= 0) & (entry < visible)
        tl.store(lists + local * units * UNIT + slot, tl.where(counts, begin + entry, -1), mask=slot < units * UNIT)
        last = tl.maximum(last, tl.max(tl.where(counts, slot + 1, 0), 0))
    tl.store(used + local, last)


@triton.jit(do_not_specialize=["row0", "K", "entries"])
def occurrence_kernel(indices, places, counts, first, row0, K, entries, BK: tl.constexpr):
    """counts and first [queries, entries]: adds how often a list names an entry that is visible, lowers to the first slot that does."""
    local = tl.program_id(0).to(tl.int64)
    row = row0 + local
    visible = tl.load(places + row * 4 + 3) - tl.load(places + row * 4 + 2)
    for slot0 in range(0, K, BK):
        slot = slot0 + tl.arange(0, BK)
        entry = tl.load(indices + row * K + slot, mask=slot < K, other=-1)
        seen = (entry >= 0) & (entry < visible)
        target = local * entries + tl.where(seen, entry, 0)
        tl.atomic_add(counts + target, 1, mask=seen, sem="relaxed")
        tl.atomic_min(first + target, slot, mask=seen, sem="relaxed")


@triton.jit(do_not_specialize=["row0", "units", "entries"])
def single_kernel(places, counts, first, lists, log_counts, row0, units, entries, UNIT: tl.constexpr, BK: tl.constexpr):
    """Leaves an entry in the first of the slots that name it alone; log_counts [queries, units * UNIT] fp32: log2 of how many do."""
    local = tl.program_id(0).to(tl.int64)
    begin = tl.load(places + (row0 + local) * 4 + 2)
    for slot0 in range(0, units * UNIT, BK):
        slot = slot0 + tl.arange(0, BK)
        inside = slot < units * UNIT
        offset = local * units * UNIT + slot
        row = tl.load(lists + offset, mask=inside, other=-1)
        target = local * entries + tl.where(row >= 0, row - begin, 0)
        kept = (row >= 0) & (tl.load(first + target, mask=row >= 0, other=-1) == slot)
        times = tl.load(counts + target, mask=kept, other=1)
        tl.store(lists + offset, tl.where(kept, row, -1), mask=inside)
        tl.store(log_counts + offset, tl.log2(times.to(tl.float32)), mask=inside)


_GPU = ("cuda", "hip")


@cache
def list_spec() -> Spec:
    types = {**dict.fromkeys(("indices", "places", "lists", "used"), "*i32"), **dict.fromkeys(("row0", "K", "units"), "i32")}
    return Spec(list_kernel, types=types, consts={"UNIT": UNIT, "BK": BK}, num_warps=1, targets=_GPU)


@cache
def occurrence_spec() -> Spec:
    types = {**dict.fromkeys(("indices", "places", "counts", "first"), "*i32"), **dict.fromkeys(("row0", "K", "entries"), "i32")}
    return Spec(occurrence_kernel, types=types, consts={"BK": BK}, targets=_GPU)


@cache
def single_spec() -> Spec:
    types = {**dict.fromkeys(("places", "counts", "first", "lists"), "*i32"), "log_counts": "*fp32"}
    types |= dict.fromkeys(("row0", "units", "entries"), "i32")
    return Spec(single_kernel, types=types, consts={"UNIT": UNIT, "BK": BK}, targets=_GPU)


def lists_of(indices: torch.Tensor, places: torch.Tensor, row0: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """lists [count, K rounded up to UNIT] and used [count] int32 (one past the last slot that counts) of queries row0, ..."""
    K = indices.shape[-1]
    units = triton.cdiv(K, UNIT)
    lists = torch.empty((count, units * UNIT), dtype=torch.int32, device=indices.device)
    used = torch.empty(count, dtype=torch.int32, device=indices.device)
    list_spec().launch((count,), indices, places, lists, used, row0, K, units)
    return lists, used


def single_lists(
    indices: torch.Tensor, places: torch.Tensor, lists: torch.Tensor, row0: int, entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """counts [count, entries] int32, how often a list names an entry, and log_counts, shaped as lists; changes lists, see single_kernel."""
    count, length = lists.shape
    counts = torch.zeros((count, entries), dtype=torch.int32, device=lists.device)
    first = torch.full((count, entries), length, dtype=torch.int32, device=lists.device)
    log_counts = torch.empty(lists.shape, dtype=torch.float32, device=lists.device)
    occurrence_spec().launch((count,), indices, places, counts, first, row0, indices.shape[-1], entries)
    single_spec().launch((count,), places, counts, first, lists, log_counts, row0, length // UNIT, entries)
    return counts, log_counts
