"""What the Gluon kernels share: which slots of a list are used, the keys of a tile, barriers.

The kernels know neither batches nor documents: every program reads its query's ranges from `places` (sparse_attn/shared_kv/places.py).
A query's tiles of BN keys are its window's, then its compressed ones'; the last tile of each kind is padded with keys that do not count.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparse_attn.shared_kv.used import used_of as used_of
from sparse_attn.shared_kv.used import used_spec as used_spec

HEADS = 64  # rows of a wgmma tile: the heads of one program; more heads are more programs, fewer are padded


@gluon.constexpr_function
def copy_layout_for(DH, warps=4):
    """16 bytes a thread and whole rows of DH channels, so that every copy is a run of full cache lines."""
    across = min(32, DH // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def load_ranges(places, used, row, COMPRESSED: gl.constexpr):
    """first and number of window keys, first and number of visible entries, slots to walk: of one query"""
    ptr = places + row.to(gl.int64) * 4
    ori_begin = gl.load(ptr)
    ori_count = gl.load(ptr + 1) - ori_begin
    cmp_begin = 0
    cmp_count = 0
    slots = 0
    if COMPRESSED != 0:
        cmp_begin = gl.load(ptr + 2)
        cmp_count = gl.load(ptr + 3) - cmp_begin
        slots = cmp_count
    if COMPRESSED == 2:
        slots = gl.load(used + row)
    return ori_begin, ori_count, cmp_begin, cmp_count, slots


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
