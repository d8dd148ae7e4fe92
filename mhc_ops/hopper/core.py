"""What the Gluon kernels for sm_90 share: register layouts of a tile, coefficients of its tokens. Imports Triton.

A tile is 16 tokens x 16 W columns of the hidden size, W warps, with all four streams of a (token, column) in one thread, so that mixing them
needs no exchange. The layout is that of an mma result [16, n] whose rows and columns have been renamed:

    row of the product    8h + r, r in 0..7 = lane / 4      is token  8h + 4 (r / 2 % 2) + 2 (r % 2) + r / 4
    column of the product 8W i + 8w + 2q + b, q = lane % 4  is column 16w + 4q + 2i + b

A thread then has four columns in a row (8 bytes of bf16) of tokens t and t + 8, and a half-warp's accesses to a tile in 128-byte swizzled
shared memory meet no bank twice. Renaming is a reshape and a permutation of registers, which `assert_trivial` checks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

TOKENS = gl.constexpr(16)  # of a tile


@gluon.constexpr_function
def warp_bases(W, axis, first):
    """Bases of W warps along an axis of a matrix, the first one apart; [0, 0] each with first = 0"""
    bases, step, count = [], first, 1
    while count < W:
        bases.append([step, 0] if axis == 0 else [0, step])
        step, count = 2 * step, 2 * count
    return bases


@gluon.constexpr_function
def tile_layout(W):
    """[16 tokens, 16 W columns]"""
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [2, 0], [4, 0], [1, 0]], warp_bases(W, 1, 16), [], [16, 16 * W])


@gluon.constexpr_function
def coefficient_layout(W, n):
    """[16 tokens, n coefficients]: a thread has all n of its two tokens"""
    registers = [[0, 1 << i] for i in range(n.bit_length() - 1)] + [[8, 0]]
    return gl.DistributedLinearLayout(registers, [[0, 0], [0, 0], [2, 0], [4, 0], [1, 0]], warp_bases(W, 0, 0), [], [16, n])


@gluon.jit
def columns_of_four(m, V: gl.constexpr):
    """The columns of [R, 4] as four vectors [R] in layout V"""
    even, odd = gl.split(gl.reshape(m, [m.shape[0], 2, 2]))
    c0, c2 = gl.split(even)
    c1, c3 = gl.split(odd)
    return (
        gl.convert_layout(c0, V, assert_trivial=True),
        gl.convert_layout(c1, V, assert_trivial=True),
        gl.convert_layout(c2, V, assert_trivial=True),
        gl.convert_layout(c3, V, assert_trivial=True),
    )


@gluon.jit
def comb_rows(comb, V: gl.constexpr):
    """comb [R, 4 x 4] as four rows of four vectors [R] in layout V: the first index is contracted in the forward pass"""
    even, odd = gl.split(gl.permute(gl.reshape(comb, [comb.shape[0], 2, 2, 4]), [0, 3, 1, 2]))
    row0, row2 = gl.split(even)
    row1, row3 = gl.split(odd)
    return columns_of_four(row0, V), columns_of_four(row1, V), columns_of_four(row2, V), columns_of_four(row3, V)


@gluon.jit
def mixed(x0, x1, x2, x3, c, k: gl.constexpr, f, post):
    """Stream k after a sublayer, fp32, in the order of mhc_ops/post/core.py, so that rounded it is the stream that was stored; c: comb_rows"""
    v = gl.fma(x1, c[1][k][:, None], x0 * c[0][k][:, None])
    v = gl.fma(x2, c[2][k][:, None], v)
    v = gl.fma(x3, c[3][k][:, None], v)
    return gl.fma(f, post[:, None], v)


@gluon.jit
def load_streams(tile, layout: gl.constexpr):
    """The four streams of a tile [4 x 16, columns] (stream by stream) in shared memory, fp32"""
    return (
        tile.slice(0, 16, dim=0).load(layout).to(gl.float32),
        tile.slice(16, 16, dim=0).load(layout).to(gl.float32),
        tile.slice(32, 16, dim=0).load(layout).to(gl.float32),
        tile.slice(48, 16, dim=0).load(layout).to(gl.float32),
    )


@gluon.jit
def copy_streams(target, x, column, first64, left, D: gl.constexpr, BN: gl.constexpr, W: gl.constexpr):
    """Starts copying BN columns of 16 tokens of x [T, 4, D] into [4 x 16, BN], stream by stream; zeros from token `left` on"""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [W, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    d = column + gl.arange(0, BN, layout=gl.SliceLayout(0, wide))
    at = ((row % 16) * (4 * D) + (row // 16) * D)[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(target, x + first64 * (4 * D) + at, mask=(row % 16 < left)[:, None])


@gluon.jit
def copy_rows(target, x, column, first64, left, D: gl.constexpr, BN: gl.constexpr, W: gl.constexpr):
    """As copy_streams, of x [T, D]"""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [W, 1], [1, 0])
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, wide))
    d = column + gl.arange(0, BN, layout=gl.SliceLayout(0, wide))
    async_copy.async_copy_global_to_shared(target, x + first64 * D + (row * D)[:, None] + d[None, :], mask=(row < left)[:, None])


@gluon.jit
def copy_coefficients(target, x, first64, left, n: gl.constexpr, W: gl.constexpr):
    """As copy_streams, of fp32 coefficients [T, n], as many tokens as target has rows"""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // n, n // 4], [W, 1], [1, 0])
    row = gl.arange(0, target.shape[0], layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, n, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(target, x + first64 * n + (row * n)[:, None] + c[None, :], mask=(row < left)[:, None])


@gluon.jit
def new_coefficients(stages: gl.constexpr, rows: gl.constexpr, n: gl.constexpr):
    """Shared memory for [rows, n] a stage; rows of 16 are swizzled so that loads by rows meet no bank twice"""
    layout: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 4, [1, 0]) if n == 16 else gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [stages, rows, n], layout)


@gluon.jit
def new_barrier(count: gl.constexpr):
    # one allocation a barrier: the compiler parts accesses to elements of one by barriers
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=count)
    return bar
