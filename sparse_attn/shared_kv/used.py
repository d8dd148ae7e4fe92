"""How far a query's list of entries reaches: a pass of its own, 4 K bytes a query, so that a program need not read its whole list before
its first tile."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import Spec
from sparse_attn.shared_kv.core import used_slots


@triton.jit(do_not_specialize=["K"])
def used_kernel(indices, places, used, K, BK: tl.constexpr):
    """A program a query: indices [rows, K], used [rows]."""
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(places + row * 4 + 3) - tl.load(places + row * 4 + 2)
    tl.store(used + row, used_slots(indices, row * K, K, visible, BK))


@cache
def used_spec() -> Spec:
    types = {"indices": "*i32", "places": "*i32", "used": "*i32", "K": "i32"}
    return Spec(used_kernel, types=types, consts={"BK": 512}, num_warps=1, targets=("cuda", "hip"))


def used_of(indices: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[rows] int32: one past the last slot that counts of every query."""
    used = torch.empty(places.shape[0], dtype=torch.int32, device=places.device)
    used_spec().launch((places.shape[0],), indices, places, used, indices.shape[-1])
    return used
