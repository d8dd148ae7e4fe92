"""hc_post_pre forward up to the gates for sm_90: the new streams, their product with fn and their squares in one kernel.

A program owns C = 64 SUBS columns of all four streams and walks over every groups-th block of 64 tokens. Of a step of 64 columns it takes x and f
and stores the new streams s (18D bytes a token in all, D bytes of a row of D); s in bf16 goes back where x lay and is multiplied from there, so
that the streams are never read again for the projection. Of a block of tokens each program leaves a row of partial sums a token, [D / C, T, 32],
as mhc_ops/project/fwd.py does for pieces of K:

    part[c] = sum over its columns of s * fn[c]  (c < M)       part[M] = sum of s * s

With COLLAPSE also y = sum_k pre_mix[k] * s[k] of s as it is stored.

fn's part stays in shared memory in two bf16 pieces (128 KB at C = 256), so that the product is wgmma with M = 64 tokens whose accumulator is kept
over all columns of the block. The elementwise part is that of core.mixed and of mhc_ops/post/core.py: streams and y are bit for bit those of hc_post
and pre_bmm.

Four producer warps copy steps into a ring of two with cp.async, eight consumer warps do the rest. One program a multiprocessor: 223 KB of shared
memory, 224 registers a consumer thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from mhc_ops.hopper import FORWARD_ALIGNED
from mhc_ops.hopper.core import columns_of_four, comb_rows, copy_coefficients, mixed, new_barrier, new_coefficients

TOKENS = gl.constexpr(64)  # of a block, and columns of a step
SUBS = gl.constexpr(FORWARD_ALIGNED // 64)  # steps that a program's columns are
STAGES = gl.constexpr(2)
CONSUMER_WARPS = gl.constexpr(8)
PRODUCER_WARPS = gl.constexpr(4)
PRODUCER_REGISTERS = gl.constexpr(56)
WIDTH = gl.constexpr(32)  # of a row of partial sums


@gluon.constexpr_function
def step_layout():
    """[64 tokens, 64 columns] on 8 warps: a thread has eight neighbouring columns of tokens t and t + 32"""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [32, 0]], [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]], [[4, 0], [8, 0], [16, 0]], [], [64, 64]
    )


@gluon.constexpr_function
def token_layout(n):
    """[64 tokens, n coefficients]: a thread has all n of its two tokens"""
    registers = [[0, 1 << i] for i in range(n.bit_length() - 1)] + [[32, 0]]
    return gl.DistributedLinearLayout(registers, [[0, 0], [0, 0], [0, 0], [1, 0], [2, 0]], [[4, 0], [8, 0], [16, 0]], [], [64, n])


@gluon.jit
def narrow(v):
    """To bf16, two elements in one instruction: as casts ptxas leaves them apart, at a sixteenth of the rate"""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [v], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def copy_step(target, x, left, STRIDE: gl.constexpr, W: gl.constexpr):
    """Starts copying 64 columns of 64 tokens at x, STRIDE elements apart; zeros from token `left` on"""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(target, x + (t * STRIDE)[:, None] + d[None, :], mask=(t < left)[:, None])


@gluon.jit
def load_step(tile):
    return tile.load(step_layout()).to(gl.float32)


@gluon.jit
def add_squares(total, s):
    v = s.to(gl.float32)
    return gl.fma(v, v, total)


@gluon.jit
def fn_step(fn, column, D: gl.constexpr, M: gl.constexpr):
    """64 columns of fn's four parts [4 streams x 32 rows, 64], rows from M on 0"""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [CONSUMER_WARPS, 1], [1, 0])
    row = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    d = column + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    at = ((row % 32) * (4 * D) + (row // 32) * D)[:, None] + d[None, :]
    return gl.load(fn + at, mask=(row % 32 < M)[:, None], other=0.0)


@gluon.jit
def keep_pieces(target, w):
    high = narrow(w)
    both = gl.reshape(gl.join(high, narrow(w - high.to(gl.float32))), [4, 2, 16, 64, 2])
    target.store(gl.reshape(gl.permute(both, [0, 1, 4, 2, 3]), [256, 64]))


@gluon.jit
def split_fn(fn, fns, column, D: gl.constexpr, M: gl.constexpr):
    """This program's part of fn into shared memory, a step at a time as [4 streams x 64, 64 columns]: of the 64 rows of a stream, which are the
    columns of the product, 16 are the high pieces of fn's first 16 rows, 16 their low pieces, then those of the next 16. A warpgroup computes 32
    columns of the product, so that both pieces of a row meet in one thread. All loads are under way before the first is used."""
    w0 = fn_step(fn, column, D, M)
    w1 = fn_step(fn, column + 64, D, M)
    w2 = fn_step(fn, column + 128, D, M)
    w3 = fn_step(fn, column + 192, D, M)
    keep_pieces(fns.index(0), w0)
    keep_pieces(fns.index(1), w1)
    keep_pieces(fns.index(2), w2)
    keep_pieces(fns.index(3), w3)


@gluon.jit
def store_sums(at, left, acc, square, M: gl.constexpr):
    """acc [64, 64], both pieces of a column beside each other, and squares [64, 64] to 64 rows of partial sums"""
    high, low = gl.split(gl.permute(gl.reshape(acc, [64, 2, 2, 16]), [0, 1, 3, 2]))
    total = gl.reshape(high + low, [64, WIDTH])
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, total.type.layout))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, total.type.layout))
    gl.store(at + (t * WIDTH)[:, None] + c[None, :], total, mask=(t < left)[:, None] & (c < M)[None, :])
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, square.type.layout))
    gl.store(at + t * WIDTH + M, gl.sum(square, 1), mask=t < left)


@gluon.jit
def producer(f, x, post, comb, pre_mix, ring, full, empty, T, groups, D: gl.constexpr, COLLAPSE: gl.constexpr):
    xs, fs, combs, posts, pres = ring
    W: gl.constexpr = PRODUCER_WARPS
    blocks: gl.constexpr = D // (64 * SUBS)
    pid = gl.program_id(0)
    column = (pid % blocks) * (64 * SUBS)
    stage = 0
    phase = 1
    for block in range(pid // blocks, gl.cdiv(T, TOKENS), groups):
        first = block.to(gl.int64) * TOKENS
        left = T - block * TOKENS
        for i in range(SUBS):
            d = column + i * 64
            mbarrier.wait(empty.index(stage), phase)
            for k in gl.static_range(4):
                copy_step(xs[k].index(stage), x + first * (4 * D) + k * D + d, left, 4 * D, W)
            copy_step(fs.index(stage), f + first * D + d, left, D, W)
            copy_coefficients(combs.index(stage), comb, first, left, 16, W)
            copy_coefficients(posts.index(stage), post, first, left, 4, W)
            if COLLAPSE:
                copy_coefficients(pres.index(stage), pre_mix, first, left, 4, W)
            for j in gl.static_range(STAGES):
                if stage == j:
                    async_copy.mbarrier_arrive(full[j], increment_count=False)
            phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def consumer(
    fn, streams, y, part, ring, fns, full, empty, T, groups, D: gl.constexpr, M: gl.constexpr, COLLAPSE: gl.constexpr
):  # fmt: skip
    xs, fs, combs, posts, pres = ring
    K: gl.constexpr = 4 * D
    tile: gl.constexpr = step_layout()
    V: gl.constexpr = gl.SliceLayout(1, tile)
    blocks: gl.constexpr = D // (64 * SUBS)
    pid = gl.program_id(0)
    column = (pid % blocks) * (64 * SUBS)
    split_fn(fn, fns, column, D, M)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, CONSUMER_WARPS // 4], [16, 32, 16])
    t = gl.arange(0, 64, layout=V)
    d = column + gl.arange(0, 64, layout=gl.SliceLayout(0, tile))
    at = (t * K)[:, None] + d[None, :]
    stage = 0
    phase = 0
    for block in range(pid // blocks, gl.cdiv(T, TOKENS), groups):
        first = block.to(gl.int64) * TOKENS
        left = T - block * TOKENS
        on = (t < left)[:, None]
        square = gl.zeros([64, 64], gl.float32, layout=tile)
        acc = gl.zeros([64, 64], gl.float32, layout=acc_layout)
        for i in range(SUBS):
            for j in gl.static_range(STAGES):
                mbarrier.wait(full[j], phase, pred=stage == j)
            c = comb_rows(combs.index(stage).load(token_layout(16)), V)
            post = columns_of_four(posts.index(stage).load(token_layout(4)), V)
            if COLLAPSE:
                pre = columns_of_four(pres.index(stage).load(token_layout(4)), V)
            x0 = load_step(xs[0].index(stage))
            x1 = load_step(xs[1].index(stage))
            x2 = load_step(xs[2].index(stage))
            x3 = load_step(xs[3].index(stage))
            fv = load_step(fs.index(stage))
            s0 = narrow(mixed(x0, x1, x2, x3, c, 0, fv, post[0]))
            s1 = narrow(mixed(x0, x1, x2, x3, c, 1, fv, post[1]))
            s2 = narrow(mixed(x0, x1, x2, x3, c, 2, fv, post[2]))
            s3 = narrow(mixed(x0, x1, x2, x3, c, 3, fv, post[3]))
            # x in one allocation a stream, or the compiler would part these stores by barriers
            xs[0].index(stage).store(s0)
            xs[1].index(stage).store(s1)
            xs[2].index(stage).store(s2)
            xs[3].index(stage).store(s3)
            fence_async_shared()
            gl.thread_barrier()
            for k in gl.static_range(4):
                acc = warpgroup_mma(xs[k].index(stage), fns.index(i).slice(k * 64, 64, dim=0).permute((1, 0)), acc, is_async=True)
            # meanwhile; the squares first, or they would wait for registers that the stores still read
            square = add_squares(add_squares(add_squares(add_squares(square, s0), s1), s2), s3)
            out = streams + first * K + i * 64 + at
            gl.store(out, s0, mask=on)
            gl.store(out + D, s1, mask=on)
            gl.store(out + 2 * D, s2, mask=on)
            gl.store(out + 3 * D, s3, mask=on)
            if COLLAPSE:
                v = gl.fma(s1.to(gl.float32), pre[1][:, None], s0.to(gl.float32) * pre[0][:, None])
                v = gl.fma(s2.to(gl.float32), pre[2][:, None], v)
                v = gl.fma(s3.to(gl.float32), pre[3][:, None], v)
                gl.store(y + first * D + i * 64 + (t * D)[:, None] + d[None, :], narrow(v), mask=on)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage), count=1)
            phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        store_sums(part + ((pid % blocks).to(gl.int64) * T + first) * WIDTH, left, acc, square, M)


@gluon.jit(do_not_specialize=["T", "groups"])
def expand_project_kernel(
    f, x, post, comb, pre_mix, fn, streams, y, part, T, groups, D: gl.constexpr, M: gl.constexpr, COLLAPSE: gl.constexpr
):  # fmt: skip
    """Programs: groups x (D / C)"""
    bf16: gl.constexpr = gl.bfloat16
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    posts = new_coefficients(STAGES, TOKENS, 4)
    ring = (
        (
            gl.allocate_shared_memory(bf16, [STAGES, 64, 64], rows),
            gl.allocate_shared_memory(bf16, [STAGES, 64, 64], rows),
            gl.allocate_shared_memory(bf16, [STAGES, 64, 64], rows),
            gl.allocate_shared_memory(bf16, [STAGES, 64, 64], rows),
        ),
        gl.allocate_shared_memory(bf16, [STAGES, 64, 64], rows),
        new_coefficients(STAGES, TOKENS, 16),
        posts,
        new_coefficients(STAGES, TOKENS, 4) if COLLAPSE else posts,
    )
    fns = gl.allocate_shared_memory(bf16, [SUBS, 256, 64], rows)
    full = (new_barrier(32 * PRODUCER_WARPS), new_barrier(32 * PRODUCER_WARPS))
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (consumer, (fn, streams, y, part, ring, fns, full, empty, T, groups, D, M, COLLAPSE)),
            (producer, (f, x, post, comb, pre_mix, ring, full, empty, T, groups, D, COLLAPSE)),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )
