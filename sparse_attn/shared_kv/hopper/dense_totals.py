"""What is left of the dense backward when its second kernel (dense_dkv.py) is done, in one launch: the keys' sums with their halos, the entries'
sums of all runs, and the sinks' shares, which a second, tiny launch adds up.

Both are put into the stream before what they wait for has ended (programmatic dependent launch), so that nothing but the wait is left.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernel_runtime import interpreting
from kernel_runtime.launch import TRITON_DTYPE, Spec
from sparse_attn.shared_kv.hopper.dense import RING
from sparse_attn.shared_kv.sinks import TILE, sink_share

SHARES = 128  # programs at most that go through the sinks' gradient


@triton.jit
def key_totals(program, sums, halo, bounds, dori, keys, runs, D: tl.constexpr, RING: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr):
    """dori of BM keys: the sum of the run that saw a key first, and the halos of the later ones in order; these runs are consecutive."""
    key = program * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    own = key.to(tl.int64)[:, None] * D + d[None, :]
    inside = (key < keys)[:, None]
    acc = tl.load(sums + own, mask=inside, other=0.0)
    first = tl.zeros([BM], tl.int32) + runs
    number = tl.zeros([BM], tl.int32)
    for r0 in range(0, runs, BR):
        r = r0 + tl.arange(0, BR)
        low = tl.load(bounds + r * 4, mask=r < runs, other=0)
        seen = tl.load(bounds + r * 4 + 1, mask=r < runs, other=0)
        has = (low[None, :] <= key[:, None]) & (seen[None, :] > key[:, None])
        first = tl.minimum(first, tl.min(tl.where(has, r[None, :], runs), 1))
        number += tl.sum(has.to(tl.int32), 1)
    for i in range(tl.max(number, 0)):
        at = ((first + i).to(tl.int64) * RING + key % RING)[:, None] * D + d[None, :]
        acc += tl.load(halo + at, mask=(i < number)[:, None], other=0.0)
    tl.store(dori + own, acc.to(dori.dtype.element_ty), mask=inside)


@triton.jit
def entry_totals(program, part, bounds, dcmp, entries, runs, D: tl.constexpr, ENTRIES: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """dcmp of BD channels of an entry: the sums [runs, ENTRIES, D] of its batch's runs, of which a run has the first ones."""
    entry = program // (D // BD)
    d = program % (D // BD) * BD + tl.arange(0, BD)
    first = (entry // entries).to(tl.int64) * runs
    acc = tl.zeros([BD], tl.float32)
    for r0 in range(0, runs, BR):
        r = r0 + tl.arange(0, BR)
        has = tl.load(bounds + (first + r) * 4 + 2, mask=r < runs, other=0) > entry % entries
        at = ((first + r) * ENTRIES + entry % entries)[:, None] * D + d[None, :]
        acc += tl.sum(tl.load(part + at, mask=has[:, None], other=0.0), 0)
    tl.store(dcmp + entry.to(tl.int64) * D + d, acc.to(dcmp.dtype.element_ty))


@triton.jit(do_not_specialize=["keys", "runs", "entries", "batch_runs", "rows", "shares"])
def dense_totals_kernel(
    sums, halo, bounds, dori, part, dcmp, sinks, lse, delta, share, keys, runs, entries, batch_runs, rows, shares,
    N: tl.constexpr, D: tl.constexpr, RING: tl.constexpr, ENTRIES: tl.constexpr, EARLY: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, NP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """bounds [runs, 4]: a run's first key, the end of what queries before it see, the number of its entries. `shares` programs of the sinks come
    first, then the keys', then those of `entries` entries of every batch, each with batch_runs runs."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    keyed = tl.cdiv(keys, BM)
    if program < shares:
        h = tl.arange(0, NP)
        acc = tl.zeros([NP], tl.float32)
        for block in range(program, tl.cdiv(rows, BS), shares):
            acc += sink_share(tl.cast(block, tl.int64), sinks, lse, delta, rows, N, NP, BS)
        tl.store(share + program * N + h, acc, mask=h < N)
    elif program < shares + keyed:
        key_totals(program - shares, sums, halo, bounds, dori, keys, runs, D, RING, BM, BR)
    elif ENTRIES > 0:
        entry_totals(program - shares - keyed, part, bounds, dcmp, entries, batch_runs, D, ENTRIES, BD, BE)


@cache
def dense_totals_spec(dtype: torch.dtype, N: int, D: int, entries: int) -> Spec:
    x, NP = f"*{TRITON_DTYPE[dtype]}", triton.next_power_of_2(N)
    early = not interpreting()
    return Spec(
        dense_totals_kernel,
        types={
            "sums": "*fp32", "halo": "*fp32", "bounds": "*i32", "dori": x, "part": "*fp32", "dcmp": x,
            **dict.fromkeys(("sinks", "lse", "delta", "share"), "*fp32"),
            **dict.fromkeys(("keys", "runs", "entries", "batch_runs", "rows", "shares"), "i32"),
        },
        consts={
            "N": N, "D": D, "RING": RING.value, "ENTRIES": entries, "EARLY": early, "BM": 4, "BR": 128, "BD": 128, "BE": 32, "NP": NP,
            "BS": min(64, TILE // NP),
        },
        targets=("cuda",),
        options={"launch_pdl": True} if early else {},
        arch=90,
    )  # fmt: skip


@triton.jit(do_not_specialize=["shares"])
def sink_total_kernel(share, dsinks, shares, N: tl.constexpr, NP: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr):
    """dsinks [N] from share [shares, N], at most SHARES of them."""
    if EARLY:
        gdc_wait()
    h = tl.arange(0, NP)
    p = tl.arange(0, SHARES)
    x = tl.load(share + p[:, None] * N + h[None, :], mask=(p < shares)[:, None] & (h < N)[None, :], other=0.0)
    tl.store(dsinks + h, tl.sum(x, 0), mask=h < N)


@cache
def sink_total_spec(N: int) -> Spec:
    early = not interpreting()
    return Spec(
        sink_total_kernel,
        types={"share": "*fp32", "dsinks": "*fp32", "shares": "i32"},
        consts={"N": N, "NP": triton.next_power_of_2(N), "SHARES": SHARES, "EARLY": early},
        num_warps=8,
        targets=("cuda",),
        options={"launch_pdl": True} if early else {},
        arch=90,
    )
