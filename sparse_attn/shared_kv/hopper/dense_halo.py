"""The sums of keys that several runs of the dense backward's second kernel have seen (dense_dkv.py), in the order of the runs."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from kernel_runtime.launch import Spec
from sparse_attn.shared_kv.hopper.dense import RING, WINDOW_MAX
from sparse_attn.shared_kv.hopper.dense_dkv import RUN_UNIT


@triton.jit
def run_begin(run, places, length, runs, before, UNIT: tl.constexpr):
    """First key of a run's first query, and the end of what queries before that one see."""
    units = tl.cdiv(length, UNIT)
    part = run % runs
    first = tl.minimum((part * (units // runs) + tl.minimum(part, units % runs)) * UNIT, length)
    at = places + (run // runs * length + first).to(tl.int64) * 4
    seen = 0
    if run + before > 0:
        seen = tl.load(at - 3)
    return tl.load(at), seen


@triton.jit(do_not_specialize=["length", "runs", "count", "before"])
def halo_sum_kernel(
    halo, places, dori, length, runs, count, before, D: tl.constexpr, RING: tl.constexpr, UNIT: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Adds to dori [keys, D] what the halos [count, RING, D] hold. A run's has the keys from its first query's first one to the end of what the query
    before it sees, at most KEYS. Both ends grow with the run, so the runs of a key are consecutive; the first of them adds them up in order."""
    run = tl.program_id(0) // KEYS
    low, high = run_begin(run, places, length, runs, before, UNIT)
    key = low + tl.program_id(0) % KEYS
    first = key < high
    if run > 0:
        _, seen = run_begin(run - 1, places, length, runs, before, UNIT)
        first = first & (key >= seen)
    if first:
        d = tl.arange(0, D)
        target = dori + (tl.zeros([D], tl.int64) + key) * D + d
        part = halo + ((tl.zeros([D], tl.int64) + run) * RING + key % RING) * D + d
        own = tl.load(target)  # on their way while the end of the key's runs is looked for
        acc = tl.load(part)
        end = run + 1
        more = end < count
        while more:  # on its own, as a while loop that carries a tensor does not compile
            low, _ = run_begin(end, places, length, runs, before, UNIT)
            end = tl.where(low <= key, end + 1, end)
            more = (low <= key) & (end < count)
        acc += own
        for i in range(1, end - run):
            acc += tl.load(part + i * RING * D)
        tl.store(target, acc)


@cache
def halo_sum_spec(D: int) -> Spec:
    types = {"halo": "*fp32", "places": "*i32", "dori": "*fp32", **dict.fromkeys(("length", "runs", "count", "before"), "i32")}
    consts = {"D": D, "RING": RING.value, "UNIT": RUN_UNIT.value, "KEYS": WINDOW_MAX}
    return Spec(halo_sum_kernel, types=types, consts=consts, num_warps=1, targets=("cuda",))
