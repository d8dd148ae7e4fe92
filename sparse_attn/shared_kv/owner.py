"""Deterministic gradient of selected entries: every entry adds up the partial rows that were written for it, in a fixed order."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.device import grid_size
from kernel_runtime.launch import TRITON_DTYPE, Spec
from sparse_attn.shared_kv.core import load_rows


def owner_lists(
    indices: torch.Tensor, places: torch.Tensor, row0: int, count: int, K: int, entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """starts [entries + 1] and order [count * K]: entry j owns the slots order[starts[j] : starts[j + 1]] of queries row0, ...

    A stable sort, so the order within an entry is that of the slots, on every run. Slots that do not count sort last.
    """
    index = indices.reshape(-1, K)[row0 : row0 + count]
    begin, end = places[row0 : row0 + count, 2:3], places[row0 : row0 + count, 3:4]
    owner = torch.where((index >= 0) & (index < end - begin), begin + index, entries).reshape(-1)
    owner, order = torch.sort(owner, stable=True)
    starts = torch.searchsorted(owner, torch.arange(entries + 1, dtype=owner.dtype, device=owner.device), out_int32=True)
    return starts, order.to(torch.int32)


@triton.jit(do_not_specialize=["tasks"])
def owner_sum_kernel(part, starts, order, dkv, tasks, D: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr):
    """A task is an entry and BD channels: dkv [entries, D] fp32 += the rows of part [slots, D] that the entry owns."""
    SLICES: tl.constexpr = (D + BD - 1) // BD
    EVEN: tl.constexpr = D % BD == 0
    n = tl.arange(0, BL)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        entry = task // SLICES
        d = (task % SLICES) * BD + tl.arange(0, BD)
        begin = tl.load(starts + entry)
        end = tl.load(starts + entry + 1)
        acc = tl.zeros([BL, BD], tl.float32)
        for i in range(begin, end, BL):
            on = i + n < end
            rows = tl.load(order + i + n, mask=on, other=0).to(tl.int64)
            acc += load_rows(part, rows, on, d, D, EVEN).to(tl.float32)
        target = dkv + (tl.zeros([BD], tl.int64) + entry) * D + d
        tl.store(target, tl.load(target, mask=d < D) + tl.sum(acc, 0), mask=d < D)


@cache
def owner_spec(dtype: torch.dtype, D: int) -> Spec:
    return Spec(
        owner_sum_kernel,
        types={"part": f"*{TRITON_DTYPE[dtype]}", "starts": "*i32", "order": "*i32", "dkv": "*fp32", "tasks": "i32"},
        consts={"D": D, "BD": min(128, max(16, triton.next_power_of_2(D))), "BL": 32},
    )


def owner_sum(part: torch.Tensor, starts: torch.Tensor, order: torch.Tensor, dkv: torch.Tensor, npu: bool) -> None:
    """Adds to dkv [..., D] fp32 the rows of part [..., D] that each entry owns."""
    D = part.shape[-1]
    spec = owner_spec(part.dtype, D)
    tasks = (dkv.numel() // D) * triton.cdiv(D, spec.consts["BD"])
    spec.launch((grid_size(part.device, tasks, npu, vector=True),), part, starts, order, dkv, tasks)
