"""hc_post_pre backward behind dp for sm_90: everything that reads streams in one kernel, the gradient between the sublayers never stored.

A program owns BN columns of all four streams and walks over every groups-th tile of 16 tokens. Of a tile it takes x and f of the sublayer that
ends, and the gradients of the new streams s and of y:

    s[k]   = post[k] * f + sum_j comb[j, k] * x[j]                            made again instead of read: 8D bytes a token less
    g[k]   = dstreams[k] + pre[k] * dy + crms * s[k] + dp @ fn[k]             the gradient between the sublayers (16D less)
    df     = sum_k post[k] * g[k]       dx[j] = sum_k comb[j, k] * g[k]
    dfn   += dp^T @ s                   held in registers until the end
    dpost[k] = sum_d g[k] * f           dcomb[j, k] = sum_d x[j] * g[k]       partial sums [D / BN, T, ...], added up by the next launch

dp, pre and crms come from the launch before (mhc_ops/pre/bwd.py). dp @ fn is a tf32 product with mma, whose result already lies as the
elementwise part wants it (core.py). Of its operands, which every tile reads from shared memory, only the 24 columns of the mix are read: as 16 and
8, the second padded with zeros in registers. dfn is wgmma with dp in two bf16 pieces and s from shared memory. The sums over d are wgmma as well:
g [4 x 16, BN] @ [x; f]^T, of which only the elements of equal tokens are kept; as reductions they would be 40 shuffles for eight columns of a
thread.

Four producer warps copy tiles into a ring of three with cp.async, four consumer warps do the rest. Two programs a multiprocessor: 105 KB of
shared memory (fn's part 24, ring 72, s 8) and 216 registers a consumer thread each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from mhc_ops.hopper.core import (
    TOKENS,
    coefficient_layout,
    columns_of_four,
    comb_rows,
    copy_coefficients,
    copy_rows,
    copy_streams,
    load_streams,
    mixed,
    new_barrier,
    new_coefficients,
    tile_layout,
    warp_bases,
)

STAGES = gl.constexpr(3)
CONSUMER_WARPS = gl.constexpr(4)
PRODUCER_WARPS = gl.constexpr(4)
PRODUCER_REGISTERS = gl.constexpr(40)
GATE_TOKENS = gl.constexpr(64)


@gluon.constexpr_function
def fn_layout(W, n):
    """fn's part of one stream for n columns of the mix (16, or the 8 after them), [16 W columns, n], as the B operand of the product holds it.
    Row 16w + 8i + 2q + b is column `column_at` of it"""
    registers = [[0, 1 << i] for i in range((n // 4).bit_length() - 1)] + [[8, 0]]
    return gl.DistributedLinearLayout(
        registers, [[0, n // 4], [0, n // 2], [1, 0], [2, 0], [4, 0]], warp_bases(W, 0, 16), [], [16 * W, n]
    )


@gluon.jit
def column_at(row):
    return (row // 16) * 16 + ((row // 2) % 4) * 4 + ((row // 8) % 2) * 2 + row % 2


@gluon.constexpr_function
def dp_layout(W, n):
    """n columns of dp of a tile, [16 tokens, n], as the A operand holds it: a thread has n / 4 neighbours"""
    registers = [[0, 1 << i] for i in range((n // 4).bit_length() - 1)] + [[8, 0]]
    return gl.DistributedLinearLayout(registers, [[0, n // 4], [0, n // 2], [2, 0], [4, 0], [1, 0]], warp_bases(W, 0, 0), [], [16, n])


@gluon.jit
def dp_operand(high, low, first: gl.constexpr, n: gl.constexpr, W: gl.constexpr):
    """n columns of dp [16, 32] fp32 from its two pieces in shared memory, as the A operand of an mma"""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    at: gl.constexpr = dp_layout(W, n)
    a = high.slice(first, n, dim=1).load(at).to(gl.float32) + low.slice(first, n, dim=1).load(at).to(gl.float32)
    if n == 8:  # products are of 16 columns
        a = gl.reshape(a, [2, 2, 2, 2, 4, 2])
        a = gl.permute(gl.join(a, gl.full_like(a, 0.0)), [0, 1, 2, 3, 4, 6, 5])
    a = gl.reshape(a, [2, 2, 2, 2, 4, 2, 2])  # token: h, then bits 2, 1, 0; column: q, step, half
    a = gl.reshape(gl.permute(a, [0, 3, 1, 2, 5, 6, 4]), [16, 16])
    return gl.convert_layout(a, gl.DotOperandLayout(0, mma, 1), assert_trivial=True)


@gluon.jit
def fn_operand(shared, BN: gl.constexpr, n: gl.constexpr, W: gl.constexpr):
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    w = shared.load(fn_layout(W, n))
    if n == 8:
        w = gl.reshape(w, [W, 2, 4, 2, 4, 2])
        w = gl.permute(gl.join(w, gl.full_like(w, 0.0)), [0, 1, 2, 3, 4, 6, 5])
    w = gl.reshape(w, [W, 2, 4, 2, 4, 2, 2])  # row: warp, i, q, b; column: q, step, half
    w = gl.reshape(gl.permute(w, [5, 6, 4, 1, 0, 2, 3]), [16, BN])
    return gl.convert_layout(w, gl.DotOperandLayout(1, mma, 1), assert_trivial=True)


@gluon.jit
def through_fn(dp, shared, k: gl.constexpr, BN: gl.constexpr, W: gl.constexpr):
    """dp @ fn of stream k, [16 tokens, BN] in tile_layout; M = 24 columns of the mix as 16 and 8"""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    v = mma_v2(dp[0], fn_operand(shared[0].index(k), BN, 16, W), gl.zeros([16, BN], gl.float32, layout=mma), input_precision="tf32")
    v = mma_v2(dp[1], fn_operand(shared[1].index(k), BN, 8, W), v, input_precision="tf32")
    v = gl.reshape(v, [2, 2, 2, 2, 2, W, 4, 2])  # row: h, then bits 2, 1, 0 of r; column: i, warp, q, b
    v = gl.reshape(gl.permute(v, [0, 2, 3, 1, 5, 6, 4, 7]), [16, BN])
    return gl.convert_layout(v, tile_layout(W), assert_trivial=True)


@gluon.jit
def fn_part(fn, column, k: gl.constexpr, first: gl.constexpr, n: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, W: gl.constexpr):
    """Columns first .. first + n of the mix of fn's part of stream k, [BN, n], its rows in the order of fn_layout"""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [W // 2, 2], [0, 1])
    d = column + column_at(gl.arange(0, BN, layout=gl.SliceLayout(1, layout)))
    c = first + gl.arange(0, n, layout=gl.SliceLayout(0, layout))
    return gl.load(fn + (c * (4 * D))[None, :] + (k * D + d)[:, None])


@gluon.jit
def keep_fn(fn, ws, column, D: gl.constexpr, BN: gl.constexpr, W: gl.constexpr):
    """This program's part of fn into shared memory; all loads are under way before the first is used"""
    a0 = fn_part(fn, column, 0, 0, 16, D, BN, W)
    a1 = fn_part(fn, column, 1, 0, 16, D, BN, W)
    a2 = fn_part(fn, column, 2, 0, 16, D, BN, W)
    a3 = fn_part(fn, column, 3, 0, 16, D, BN, W)
    b0 = fn_part(fn, column, 0, 16, 8, D, BN, W)
    b1 = fn_part(fn, column, 1, 16, 8, D, BN, W)
    b2 = fn_part(fn, column, 2, 16, 8, D, BN, W)
    b3 = fn_part(fn, column, 3, 16, 8, D, BN, W)
    ws[0].index(0).store(a0)
    ws[0].index(1).store(a1)
    ws[0].index(2).store(a2)
    ws[0].index(3).store(a3)
    ws[1].index(0).store(b0)
    ws[1].index(1).store(b1)
    ws[1].index(2).store(b2)
    ws[1].index(3).store(b3)


@gluon.jit
def store_sums(dcomb_part, dpost_part, at, left, with_x, with_f):
    """Elements of equal tokens of with_x [4 x 16, 4 x 16] and with_f [4 x 16, 16]. at: int64, first row of this tile and these columns"""
    wide: gl.constexpr = with_x.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, wide))
    on = ((row % 16)[:, None] == (column % 16)[None, :]) & (row % 16 < left)[:, None]
    gl.store(dcomb_part + at * 16 + ((row % 16) * 16 + row // 16)[:, None] + ((column // 16) * 4)[None, :], with_x, mask=on)
    narrow: gl.constexpr = with_f.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, narrow))
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, narrow))
    on = ((row % 16)[:, None] == column[None, :]) & (row % 16 < left)[:, None]
    gl.store(dpost_part + at * 4 + ((row % 16) * 4 + row // 16)[:, None] + (column * 0)[None, :], with_f, mask=on)


@gluon.jit
def gate_sums(g, groups, dz, dgate_part, T, M: gl.constexpr, L: gl.constexpr, W: gl.constexpr):
    """First stage of d(base) and d(scale), as in mhc_ops/project/bwd.py"""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [W, 1], [1, 0])
    t = gl.arange(0, GATE_TOKENS, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, L, layout=gl.SliceLayout(0, layout))
    acc = gl.zeros([GATE_TOKENS, L], gl.float32, layout=layout)
    for block in range(g, gl.cdiv(T, GATE_TOKENS), groups):
        first = block * GATE_TOKENS
        at = dz + first.to(gl.int64) * L + (t * L)[:, None] + c[None, :]
        acc += gl.load(at, mask=(t < T - first)[:, None] & (c < M + 3)[None, :], other=0.0)
    gl.store(dgate_part + g * L + c, gl.sum(acc, 0), mask=c < M + 3)


@gluon.jit
def tiles_of(g, groups, T, main):
    """How many tiles group g has; none for a program that sums dz"""
    return gl.where(main, gl.cdiv(gl.cdiv(T, TOKENS) - g, groups), 0)


@gluon.jit
def wait_for_place(empty, stage, phase, APART: gl.constexpr):
    if APART:
        for i in gl.static_range(STAGES):
            mbarrier.wait(empty[i], phase, pred=stage == i)
    else:
        mbarrier.wait(empty.index(stage), phase)


@gluon.jit
def give_back(empty, stage, APART: gl.constexpr):
    """The consumers are done with a place of the ring. APART: every thread says so for itself, so that they do not meet at a barrier"""
    if APART:
        for i in gl.static_range(STAGES):
            if stage == i:
                async_copy.mbarrier_arrive(empty[i], increment_count=False)
    else:
        mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def producer(
    dstreams, dy, f, x, post, comb, pre, pieces, crms, ring, full, empty, T, groups, D: gl.constexpr, M: gl.constexpr, L: gl.constexpr,
    BN: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    xs, dss, fs, dys, ps, combs, posts, pres, crs = ring
    W: gl.constexpr = PRODUCER_WARPS
    blocks: gl.constexpr = D // BN
    pid = gl.program_id(0)
    g = pid // blocks
    column = (pid % blocks) * BN
    stage = 0
    phase = 1
    p_layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [W, 1], [1, 0])
    p_row = gl.arange(0, 32, layout=gl.SliceLayout(1, p_layout))  # the two pieces one after the other
    p_column = gl.arange(0, L, layout=gl.SliceLayout(0, p_layout))
    p_at = ((p_row // 16).to(gl.int64) * T * L + (p_row % 16) * L)[:, None] + p_column[None, :]
    c_row = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [W], [0]))
    c_at = (c_row // 16).to(gl.int64) * T + c_row % 16
    for step in range(tiles_of(g, groups, T, pid < blocks * groups)):
        first = (g + step * groups) * TOKENS
        first64 = first.to(gl.int64)
        left = T - first
        wait_for_place(empty, stage, phase, APART)
        copy_streams(xs.index(stage), x, column, first64, left, D, BN, W)
        copy_streams(dss.index(stage), dstreams, column, first64, left, D, BN, W)
        copy_rows(fs.index(stage), f, column, first64, left, D, BN, W)
        copy_rows(dys.index(stage), dy, column, first64, left, D, BN, W)
        # columns from M on are whatever the memory held before
        p_on = (p_row % 16 < left)[:, None] & (p_column < M)[None, :]
        async_copy.async_copy_global_to_shared(ps.index(stage), pieces + first64 * L + p_at, mask=p_on)
        copy_coefficients(combs.index(stage), comb, first64, left, 16, W)
        copy_coefficients(posts.index(stage), post, first64, left, 4, W)
        copy_coefficients(pres.index(stage), pre, first64, left, 4, W)
        async_copy.async_copy_global_to_shared(crs.index(stage), crms + first64 + c_at, mask=c_row % 16 < left)
        for i in gl.static_range(STAGES):
            if stage == i:
                async_copy.mbarrier_arrive(full[i], increment_count=False)
        phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def consumer(
    fn, dz, df, dx, dfn_part, dgate_part, dcomb_part, dpost_part, ring, kept, full, empty, T, groups,
    D: gl.constexpr, M: gl.constexpr, L: gl.constexpr, BN: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    xs, dss, fs, dys, ps, combs, posts, pres, crs = ring
    ws, s0s, s1s, s2s, s3s = kept
    W: gl.constexpr = CONSUMER_WARPS
    K: gl.constexpr = 4 * D
    bf16: gl.constexpr = gl.bfloat16
    tile: gl.constexpr = tile_layout(W)
    V: gl.constexpr = gl.SliceLayout(1, tile)
    blocks: gl.constexpr = D // BN
    pid = gl.program_id(0)
    g = pid // blocks
    if pid >= blocks * groups:
        gate_sums(pid - blocks * groups, groups, dz, dgate_part, T, M, L, W)
    else:
        block = pid % blocks
        # fn's part, columns of the mix innermost
        w_layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [W // 2, 2], [0, 1])
        w_column = block * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, w_layout))
        c = gl.arange(0, L, layout=gl.SliceLayout(0, w_layout))
        keep_fn(fn, ws, block * BN, D, BN, W)
        acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, L, 16])
        x_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, 64, 16])
        f_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, 16, 16])
        acc0 = gl.zeros([BN, L], gl.float32, layout=acc_layout)
        acc1 = gl.zeros([BN, L], gl.float32, layout=acc_layout)
        acc2 = gl.zeros([BN, L], gl.float32, layout=acc_layout)
        acc3 = gl.zeros([BN, L], gl.float32, layout=acc_layout)
        x_zero = gl.zeros([64, 64], gl.float32, layout=x_layout)
        f_zero = gl.zeros([64, 16], gl.float32, layout=f_layout)
        t = gl.arange(0, 16, layout=V)
        d = block * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, tile))
        at_streams = (t * K)[:, None] + d[None, :]
        at_rows = (t * D)[:, None] + d[None, :]
        cr_layout: gl.constexpr = gl.DistributedLinearLayout([[8], [16]], [[0], [0], [2], [4], [1]], [[0], [0]], [], [32])
        stage = 0
        phase = 0
        for step in range(tiles_of(g, groups, T, True)):
            first = (g + step * groups) * TOKENS
            for i in gl.static_range(STAGES):
                mbarrier.wait(full[i], phase, pred=stage == i)
            high = ps.index(stage).slice(0, 16, dim=0)
            low = ps.index(stage).slice(16, 16, dim=0)
            dp = dp_operand(high, low, 0, 16, W), dp_operand(high, low, 16, 8, W)
            g0 = through_fn(dp, ws, 0, BN, W)
            g1 = through_fn(dp, ws, 1, BN, W)
            g2 = through_fn(dp, ws, 2, BN, W)
            g3 = through_fn(dp, ws, 3, BN, W)
            post = columns_of_four(posts.index(stage).load(coefficient_layout(W, 4)), V)
            pre = columns_of_four(pres.index(stage).load(coefficient_layout(W, 4)), V)
            comb = comb_rows(combs.index(stage).load(coefficient_layout(W, 16)), V)
            x_tile = xs.index(stage)
            f_tile = fs.index(stage)
            x0, x1, x2, x3 = load_streams(x_tile, tile)
            f = f_tile.load(tile).to(gl.float32)
            s0 = mixed(x0, x1, x2, x3, comb, 0, f, post[0])
            s1 = mixed(x0, x1, x2, x3, comb, 1, f, post[1])
            s2 = mixed(x0, x1, x2, x3, comb, 2, f, post[2])
            s3 = mixed(x0, x1, x2, x3, comb, 3, f, post[3])
            cr = gl.convert_layout(gl.sum(gl.reshape(crs.index(stage).load(cr_layout), [2, 16]), 0), V)[:, None]
            dy = dys.index(stage).load(tile).to(gl.float32)
            g_tile = dss.index(stage)
            d0, d1, d2, d3 = load_streams(g_tile, tile)
            g0 = gl.fma(cr, s0, gl.fma(dy, pre[0][:, None], g0 + d0))
            g1 = gl.fma(cr, s1, gl.fma(dy, pre[1][:, None], g1 + d1))
            g2 = gl.fma(cr, s2, gl.fma(dy, pre[2][:, None], g2 + d2))
            g3 = gl.fma(cr, s3, gl.fma(dy, pre[3][:, None], g3 + d3))
            # operands of the products: g in place of dstreams. One store, or the compiler would part them by barriers
            together = gl.join(gl.join(g0.to(bf16), g1.to(bf16)), gl.join(g2.to(bf16), g3.to(bf16)))
            together = gl.reshape(gl.permute(together, [3, 2, 0, 1]), [64, BN])
            s0s.store(s0.to(bf16))
            s1s.store(s1.to(bf16))
            s2s.store(s2.to(bf16))
            s3s.store(s3.to(bf16))
            g_tile.store(together)
            fence_async_shared()
            gl.thread_barrier()
            acc0 = warpgroup_mma(s0s.permute((1, 0)), high, acc0, is_async=True)
            acc1 = warpgroup_mma(s1s.permute((1, 0)), high, acc1, is_async=True)
            acc2 = warpgroup_mma(s2s.permute((1, 0)), high, acc2, is_async=True)
            acc3 = warpgroup_mma(s3s.permute((1, 0)), high, acc3, is_async=True)
            acc0 = warpgroup_mma(s0s.permute((1, 0)), low, acc0, is_async=True)
            acc1 = warpgroup_mma(s1s.permute((1, 0)), low, acc1, is_async=True)
            acc2 = warpgroup_mma(s2s.permute((1, 0)), low, acc2, is_async=True)
            acc3 = warpgroup_mma(s3s.permute((1, 0)), low, acc3, is_async=True)
            with_x = warpgroup_mma(g_tile, x_tile.permute((1, 0)), x_zero, use_acc=False, is_async=True)
            with_f = warpgroup_mma(g_tile, f_tile.permute((1, 0)), f_zero, use_acc=False, is_async=True)
            # meanwhile
            first64 = first.to(gl.int64)
            on = (t < T - first)[:, None]
            v = g0 * post[0][:, None] + g1 * post[1][:, None] + g2 * post[2][:, None] + g3 * post[3][:, None]
            gl.store(df + first64 * D + at_rows, v.to(bf16), mask=on)
            for j in gl.static_range(4):
                v = g0 * comb[j][0][:, None] + g1 * comb[j][1][:, None] + g2 * comb[j][2][:, None] + g3 * comb[j][3][:, None]
                gl.store(dx + first64 * K + j * D + at_streams, v.to(bf16), mask=on)
            acc0, acc1, acc2, acc3, x_sums, f_sums = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2, acc3, with_x, with_f])
            give_back(empty, stage, APART)
            phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            store_sums(dcomb_part, dpost_part, block.to(gl.int64) * T + first, T - first, x_sums, f_sums)
        out = dfn_part + (g * M).to(gl.int64) * K + (c * K)[None, :] + w_column[:, None]
        gl.store(out, gl.convert_layout(acc0, w_layout), mask=(c < M)[None, :])
        gl.store(out + D, gl.convert_layout(acc1, w_layout), mask=(c < M)[None, :])
        gl.store(out + 2 * D, gl.convert_layout(acc2, w_layout), mask=(c < M)[None, :])
        gl.store(out + 3 * D, gl.convert_layout(acc3, w_layout), mask=(c < M)[None, :])


@gluon.jit(do_not_specialize=["T", "groups"])
def boundary_bwd_kernel(
    dstreams, dy, f, x, post, comb, pre, dz, pieces, crms, fn, df, dx, dfn_part, dgate_part, dcomb_part, dpost_part, T, groups,
    D: gl.constexpr, M: gl.constexpr, L: gl.constexpr, BN: gl.constexpr,
    APART: gl.constexpr,
):  # fmt: skip
    """Programs: groups x (D / BN), then one a group that sums dz. APART: see give_back"""
    bf16: gl.constexpr = gl.bfloat16
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ring = (
        gl.allocate_shared_memory(bf16, [STAGES, 64, BN], rows),
        gl.allocate_shared_memory(bf16, [STAGES, 64, BN], rows),
        gl.allocate_shared_memory(bf16, [STAGES, 16, BN], rows),
        gl.allocate_shared_memory(bf16, [STAGES, 16, BN], rows),
        gl.allocate_shared_memory(bf16, [STAGES, 32, L], gl.NVMMASharedLayout(64, 16)),
        new_coefficients(STAGES, TOKENS, 16),
        new_coefficients(STAGES, TOKENS, 4),
        new_coefficients(STAGES, TOKENS, 4),
        gl.allocate_shared_memory(gl.float32, [STAGES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    # s in four allocations: stores to parts of one are parted by barriers
    kept = (
        (
            gl.allocate_shared_memory(gl.float32, [4, BN, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0])),
            gl.allocate_shared_memory(gl.float32, [4, BN, 8], gl.SwizzledSharedLayout(4, 4, 2, [1, 0])),
        ),
        gl.allocate_shared_memory(bf16, [16, BN], rows),
        gl.allocate_shared_memory(bf16, [16, BN], rows),
        gl.allocate_shared_memory(bf16, [16, BN], rows),
        gl.allocate_shared_memory(bf16, [16, BN], rows),
    )
    full = (new_barrier(32 * PRODUCER_WARPS), new_barrier(32 * PRODUCER_WARPS), new_barrier(32 * PRODUCER_WARPS))
    if APART:
        empty = (new_barrier(32 * CONSUMER_WARPS), new_barrier(32 * CONSUMER_WARPS), new_barrier(32 * CONSUMER_WARPS))
    else:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (consumer, (fn, dz, df, dx, dfn_part, dgate_part, dcomb_part, dpost_part, ring, kept, full, empty, T, groups, D, M, L, BN, APART)),
            (producer, (dstreams, dy, f, x, post, comb, pre, pieces, crms, ring, full, empty, T, groups, D, M, L, BN, APART)),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )
