"""What the Gluon kernels share: a query's tiles of keys, 64 of its heads in device memory, barriers.

The kernels know neither batches nor documents: every program reads its query's ranges from `places` (sparse_attn/shared_kv/places.py).
A query's tiles of BN keys are its window's, then its compressed ones'; the last tile of each kind is padded with keys that do not count.
`ranges` of a query, what tells its tiles:
    ori_tiles               tiles of the window
    ori_begin, ori_count    first and number of the window's keys
    cmp_begin, cmp_count    first and number of the visible entries
    slots                   slots to walk through: of its list up to the last one that counts, or cmp_count where there are no lists
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from kernel_runtime.device import device_properties

HEADS = 64  # rows of a wgmma tile: the heads of one program; more heads are more programs, fewer are padded


def programs(tasks: int, device: torch.device) -> int:
    """The grid of kernels that loop over tasks: one program a multiprocessor."""
    return min(tasks, device_properties(device).cube_cores)


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where it is not contiguous or does not lie at a multiple of 16 bytes, as copies of 16 bytes want it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@gluon.constexpr_function
def copy_layout_for(DH, warps=4):
    """16 bytes a thread and whole rows of DH channels, so that every copy is a run of full cache lines."""
    across = min(32, DH // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def load_ranges(places, used, row, COMPRESSED: gl.constexpr):
    """ori_begin, ori_count, cmp_begin, cmp_count, slots of a query"""
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
def tile_keys(indices, first_slot, tile, n, ranges, SELECTED: gl.constexpr, BN: gl.constexpr):
    """Rows of a tile's keys in ori_kv or cmp_kv, 0 where a slot does not count, and whether it does. Decided before an address is formed.

    first_slot is the int64 offset of this query's list; `tile` may lie past the last one.
    """
    ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots = ranges
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
def tile_pointers(ori_kv, cmp_kv, indices, first_slot, tile, n, d, ranges, D: gl.constexpr, SELECTED: gl.constexpr, BN: gl.constexpr):
    """Channels d of a tile's keys as pointers [BN, d], and whether a key counts [BN, 1]."""
    key, valid = tile_keys(indices, first_slot, tile, n, ranges, SELECTED, BN)
    keys = ori_kv if tile < ranges[0] else cmp_kv
    return keys + key.to(gl.int64)[:, None] * D + d[None, :], valid[:, None]


@gluon.jit
def head_pointers(x, row, group, first, N: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """WIDTH channels from `first` on of 64 heads of a query in x [rows, N, D]: pointers [64, WIDTH] in copy_layout_for(WIDTH), and which
    heads there are [64, 1]."""
    layout: gl.constexpr = copy_layout_for(WIDTH)
    h = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    return x + (row.to(gl.int64) * N + group * 64) * D + first + h[:, None] * D + d[None, :], (group * 64 + h < N)[:, None]


@gluon.jit
def copy_heads(x, row, group, first, x_s, at, full, N: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """head_pointers' tile into x_s[at], which the barrier `full` hears of; heads past N are zeros."""
    ptrs, on = head_pointers(x, row, group, first, N, D, WIDTH)
    if N % 64 == 0:
        async_copy.async_copy_global_to_shared(x_s.index(at), ptrs)
    else:
        async_copy.async_copy_global_to_shared(x_s.index(at), ptrs, mask=on)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def store_heads(x, staged, row, group, first, N: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """A tile staged in shared memory to where head_pointers says, as whole rows."""
    ptrs, on = head_pointers(x, row, group, first, N, D, WIDTH)
    if N % 64 == 0:
        gl.store(ptrs, staged.load(copy_layout_for(WIDTH)))
    else:
        gl.store(ptrs, staged.load(copy_layout_for(WIDTH)), mask=on)


@gluon.jit
def new_barrier(count: gl.constexpr):
    # One allocation a barrier. With bars.index(i) on one array the compiler sees a hazard between any two of them and puts a bar.sync
    # before every wait and arrive. The same holds for other small buffers: they are tuples of allocations.
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=count)
    return bar
