"""What the Gluon kernels share: the plan of every query, the keys of a tile, barriers, and their Spec.

The kernels know neither batches nor documents: a small kernel in plain Triton first writes the plan [rows, 8] int32 (columns below), and
each program reads its row of it. Rows of keys are counted from the start of the flat tensor.

A query's tiles of BN keys are its window's, then its compressed ones'; the last tile of each kind is padded with keys that do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernel_runtime.launch import Spec
from sparse_attn.shared_kv.core import CMP_NONE, CMP_SELECTED, query_place, used_slots, visible_entries, window_range

HEADS = 64  # rows of a wgmma tile: the heads of one program; more heads are more programs, fewer are padded

# Columns of the plan
ORI_BEGIN = tl.constexpr(0)  # first original key of the window, and how many it has
ORI_COUNT = tl.constexpr(1)
CMP_BEGIN = tl.constexpr(2)  # first compressed entry of the document, and how many are visible
CMP_COUNT = tl.constexpr(3)
SLOTS = tl.constexpr(4)  # compressed slots to walk: one past the last that counts (selected), or all that are visible
PLAN_WIDTH = tl.constexpr(8)

_PLAN_NUMBERS = ["rows", "S", "S2", "S3", "K", "offset", "window", "ratio", "documents", "steps", "scale"]


@triton.jit(do_not_specialize=_PLAN_NUMBERS)
def plan_kernel(
    indices, cu_q, cu_ori, cu_cmp, offsets, plan, rows, S, S2, S3, K, offset, window, ratio, documents, steps, scale,
    PACKED: tl.constexpr, OFFSET: tl.constexpr, COMPRESSED: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    t, ori_start, ori_length, cmp_start, cmp_length = query_place(
        row, S, S2, S3, offset, cu_q, cu_ori, cu_cmp, offsets, documents, steps, PACKED, OFFSET, COMPRESSED
    )
    low, high = window_range(t, ori_length, window)
    low = tl.minimum(low, ori_length)
    ori_begin = ori_start.to(tl.int32) + low
    cmp_begin = cmp_start.to(tl.int32)
    if PACKED:
        # Rows after the last document see nothing. Both columns must not fall from row to row: owner_sum bisects them.
        after = row >= tl.load(cu_q + documents)
        ori_begin = tl.where(after, 2147483647, ori_begin)
        cmp_begin = tl.where(after, 2147483647, cmp_begin)
    visible = 0
    slots = 0
    if COMPRESSED != CMP_NONE:
        visible = visible_entries(t, cmp_length, ratio)
        slots = visible
        if COMPRESSED == CMP_SELECTED:
            slots = used_slots(indices, row.to(tl.int64) * K, K, visible, BK)
    column = plan + row.to(tl.int64) * PLAN_WIDTH
    tl.store(column + ORI_BEGIN, ori_begin)
    tl.store(column + ORI_COUNT, tl.maximum(high - low, 0))
    tl.store(column + CMP_BEGIN, cmp_begin)
    tl.store(column + CMP_COUNT, visible)
    tl.store(column + SLOTS, slots)


@dataclass(frozen=True)
class GluonSpec(Spec):
    """A Spec of a Gluon kernel. It is for sm_90 alone; Ascend has the plain kernels."""

    targets: tuple[str, ...] = ("cuda",)

    def source(self) -> Any:
        plain = super().source()
        return GluonASTSource(self.kernel, plain.signature, plain.constants, plain.attrs)


@cache
def plan_spec(packed: bool, offset: int, compressed: int) -> Spec:
    types = {name: "*i32" for name in ("indices", "cu_q", "cu_ori", "cu_cmp", "offsets", "plan")}
    types |= {name: "fp32" if name == "scale" else "i32" for name in _PLAN_NUMBERS}
    consts = {"PACKED": packed, "OFFSET": offset, "COMPRESSED": compressed, "BK": 512}
    return Spec(plan_kernel, types=types, consts=consts, num_warps=1, targets=("cuda",))


def make_plan(call: Any) -> torch.Tensor:
    """The plan [rows, 8] int32 of a prepared call (sparse_attn.shared_kv.fwd.prepare). Columns 5 to 7 are unused."""
    x = call.tensors
    plan = torch.empty(call.rows, PLAN_WIDTH.value, dtype=torch.int32, device=x["q"].device)
    spec = plan_spec(*call.form[2:])
    spec.launch((call.rows,), x["indices"], x["cu_q"], x["cu_ori"], x["cu_cmp"], x["offsets"], plan, *call.numbers)
    return plan


@gluon.constexpr_function
def copy_layout_for(DH, warps=4):
    """16 bytes a thread and whole rows of DH channels, so that every copy is a run of full cache lines."""
    across = min(32, DH // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def load_plan(plan, row):
    """first and number of window keys, first and number of visible entries, slots to walk: of one query"""
    column = plan + row.to(gl.int64) * 8
    return gl.load(column), gl.load(column + 1), gl.load(column + 2), gl.load(column + 3), gl.load(column + 4)


@gluon.jit
def tile_keys(
    indices, first_slot, tile, n, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots, SELECTED: gl.constexpr, BN: gl.constexpr
):  # fmt: skip
    """Rows of a tile's keys in ori_kv or cmp_kv, 0 where a slot does not count, and whether it does. Decided before an address is formed.

    first_slot is the int64 offset of this query's list; `tile` may lie past the last one.
    """
    window = tile < ori_tiles
    slot = gl.where(window, tile, tile - ori_tiles) * BN + n
    count = gl.where(window, ori_count, cmp_count)
    begin = gl.where(window, ori_begin, cmp_begin)
    entry = slot
    if SELECTED:
        chosen = gl.load(indices + first_slot + slot, mask=(slot < slots) & (tile >= ori_tiles), other=-1)
        entry = gl.where(window, slot, chosen)
    valid = (entry >= 0) & (entry < count)
    return gl.where(valid, begin + entry, 0), valid


@gluon.jit
def new_barrier(count: gl.constexpr):
    # One allocation a barrier. With bars.index(i) on one array the compiler sees a hazard between any two of them and puts a bar.sync
    # before every wait and arrive. The same holds for other small buffers: they are tuples of allocations.
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=count)
    return bar
