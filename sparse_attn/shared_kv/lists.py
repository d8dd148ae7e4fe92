"""Lists of selected entries for the dense form of the portable backward: every entry once, with how often the list named it."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import Spec

BK = 512


@triton.jit(do_not_specialize=["row0", "K", "entries"])
def occurrence_kernel(indices, places, counts, first, row0, K, entries, BK: tl.constexpr):
    """counts and first [queries, entries]: adds how often the lists of queries row0, ... name an entry that is visible, and lowers to the
    first slot that does."""
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


@triton.jit(do_not_specialize=["row0", "K", "entries"])
def single_kernel(indices, places, counts, first, lists, log_counts, row0, K, entries, BK: tl.constexpr):
    """lists [queries, K]: an entry in the first of the slots that name it alone, -1 elsewhere; log_counts: log2 of how many name it."""
    local = tl.program_id(0).to(tl.int64)
    row = row0 + local
    visible = tl.load(places + row * 4 + 3) - tl.load(places + row * 4 + 2)
    for slot0 in range(0, K, BK):
        slot = slot0 + tl.arange(0, BK)
        inside = slot < K
        entry = tl.load(indices + row * K + slot, mask=inside, other=-1)
        seen = (entry >= 0) & (entry < visible)
        target = local * entries + tl.where(seen, entry, 0)
        kept = seen & (tl.load(first + target, mask=seen, other=-1) == slot)
        times = tl.load(counts + target, mask=kept, other=1)
        tl.store(lists + local * K + slot, tl.where(kept, entry, -1), mask=inside)
        tl.store(log_counts + local * K + slot, tl.log2(times.to(tl.float32)), mask=inside)


_NUMBERS = dict.fromkeys(("row0", "K", "entries"), "i32")


@cache
def occurrence_spec() -> Spec:
    types = {**dict.fromkeys(("indices", "places", "counts", "first"), "*i32"), **_NUMBERS}
    return Spec(occurrence_kernel, types=types, consts={"BK": BK}, targets=("cuda", "hip"))


@cache
def single_spec() -> Spec:
    types = {**dict.fromkeys(("indices", "places", "counts", "first", "lists"), "*i32"), "log_counts": "*fp32", **_NUMBERS}
    return Spec(single_kernel, types=types, consts={"BK": BK}, targets=("cuda", "hip"))


def single_lists(
    indices: torch.Tensor, places: torch.Tensor, row0: int, count: int, entries: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of queries row0, ...: lists [count, K] and counts [count, entries] int32, how often a list named an entry, and log_counts [count, K]
    fp32. In a fixed order, so the same on every run."""
    K, device = indices.shape[-1], indices.device
    counts = torch.zeros((count, entries), dtype=torch.int32, device=device)
    first = torch.full((count, entries), K, dtype=torch.int32, device=device)
    lists = torch.empty((count, K), dtype=torch.int32, device=device)
    log_counts = torch.empty((count, K), dtype=torch.float32, device=device)
    occurrence_spec().launch((count,), indices, places, counts, first, row0, K, entries)
    single_spec().launch((count,), indices, places, counts, first, lists, log_counts, row0, K, entries)
    return lists, counts, log_counts
