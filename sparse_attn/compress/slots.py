"""Which tokens the slot of a compressor's kernel works on: the one place that knows about batches, documents and remainders.

A slot is one window of one sequence. Slot i of a document of n windows stands for entry i, i < n. The backward has one more slot for the
tail of every document, i = n: no entry, but the tokens of the remainder, and with overlap the first series of window n - 1, which no
entry takes up; their gradients are zero. So each element of a gradient is written by exactly one slot. What lies behind the last document
of a pack counts as a document without entries.

A slot has four numbers, in a pack a row of slots [count, 4] int32 (one kernel, run before the others: no other one searches):
    own     first token of its window, a row of the flat [tokens, C * D]
    tokens  of that window that exist: ratio where there is an entry
    entry   row of the result, -1 where there is none
    last    1 if the window before it is one of the same document that its first series comes from, else 0
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import Spec
from sparse_attn.shared_kv.api import compressed_cu_seqlens

BLOCK = 128


@triton.jit
def slot_of(slots, slot, n, S, E, R: tl.constexpr, PACKED: tl.constexpr):
    """own, tokens, entry, last of a slot; n slots and E entries to each of a batch's sequences of S tokens"""
    if PACKED:
        row = slots + tl.cast(slot, tl.int64) * 4
        own = tl.load(row)
        tokens = tl.load(row + 1)
        entry = tl.load(row + 2)
        last = tl.load(row + 3) > 0
    else:
        b = slot // n
        i = slot - b * n
        own = b * S + i * R
        tokens = tl.minimum(S - i * R, R)
        entry = tl.where(i < E, b * E + i, -1)
        last = i > 0
    return own, tokens, entry, last


@triton.jit(do_not_specialize=["count", "T", "ratio", "documents", "steps"])
def slots_kernel(slots, cu, cu_cmp, count, T, ratio, documents, steps, TAILS: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.zeros([BLOCK], tl.int32)  # number of documents whose slots end at or before this one
    high = tl.zeros([BLOCK], tl.int32) + documents
    for _ in range(steps):
        middle = (g + high) // 2
        searching = g < high
        at = tl.minimum(middle, documents - 1) + 1
        ends_before = tl.load(cu_cmp + at) + at * TAILS <= slot
        g = tl.where(searching & ends_before, middle + 1, g)
        high = tl.where(searching & ~ends_before, middle, high)
    inside = g < documents
    i = slot - tl.load(cu_cmp + g) - g * TAILS
    entry = tl.load(cu_cmp + g) + i
    following = tl.minimum(g + 1, documents)
    has_entry = inside & (entry < tl.load(cu_cmp + following))
    begin = tl.load(cu + g)
    end = tl.where(inside, tl.load(cu + following), T)
    # i <= T // ratio + 1, so the product stays below T + 2 * ratio
    own = tl.minimum(begin + i * ratio, T)
    real = slot < count
    tl.store(slots + slot * 4, own, mask=real)
    tl.store(slots + slot * 4 + 1, tl.minimum(tl.maximum(end - own, 0), ratio), mask=real)
    tl.store(slots + slot * 4 + 2, tl.where(has_entry, entry, -1), mask=real)
    tl.store(slots + slot * 4 + 3, tl.where(inside & (i > 0), 1, 0), mask=real)


@cache
def slots_spec(tails: bool) -> Spec:
    return Spec(
        slots_kernel,
        types={**dict.fromkeys(("slots", "cu", "cu_cmp"), "*i32"), **dict.fromkeys(("count", "T", "ratio", "documents", "steps"), "i32")},
        consts={"TAILS": int(tails), "BLOCK": BLOCK},
    )


def slots_of(kv: torch.Tensor, ratio: int, cu_seqlens: torch.Tensor | None, tails: bool) -> tuple[torch.Tensor | None, int, int, int, int]:
    """slots (None for a batch), then count, n, S, E as `slot_of` and the kernels' loops take them.

    kv [B, S, C * D], or a pack [T, C * D] with cu_seqlens. Without tails there are as many slots as rows of the result; with them a
    sequence's tail gets a slot, and a pack as many as any cut of T tokens into its documents can need.
    """
    S = kv.shape[-2]
    E = S // ratio
    if cu_seqlens is None:
        n = E + int(tails)
        return None, kv.shape[0] * n, n, S, E
    documents = cu_seqlens.shape[0] - 1
    count = E + (documents + 1 if tails else 0)
    slots = torch.empty((count, 4), dtype=torch.int32, device=kv.device)
    if count:
        cu = cu_seqlens.contiguous()
        spec = slots_spec(tails)
        spec.launch(
            (triton.cdiv(count, BLOCK),), slots, cu, compressed_cu_seqlens(cu, ratio), count, S, ratio, documents, documents.bit_length()
        )
    return slots, count, 1, S, E
