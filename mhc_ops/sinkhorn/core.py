"""The Sinkhorn iterations of a block of tokens, in registers: device functions shared by the sinkhorn and the gates kernels.

Tensors are [BT, P, P] with P the power of two at or above N; `on` marks the N x N part. Padding holds 0 in scale space and -inf in the
log domain, so it adds nothing to a sum, and the guarded divisions below keep it there. On Ascend a block is turned to [P, P, BT] for the
iterations: P floats fill a sixteenth of a vector register, BT of them a whole one, and every sum is one of registers. A block that is
turned has no padding, and None for `on`: what it computes of tokens that do not exist is finite, and stored by nobody. ROW and COL are
the axes along which the entries of a row and of a column lie.
Only sums are kept for the backward (2 * iters * P values a token), never a matrix: each matrix is rebuilt from the next one by
multiplying by the sums ("v4"), or from the logits and the accumulated log sums ("paper"). The gradient that is carried back is that of
the matrix's logarithm, h = m * d(m): a step m = a / s, s = sum(a) + eps along one index, takes it to h_a = h - m * sum(h), without a division
and with little that depends on the step before. The sums live in tensors
[H, BT, P], H the power of two at or above iters, written one slot at a time with `where`: rolled loops, no scratch memory. Where a GPU
has the registers, tuples hold factors instead (`_bwd_factors`); of a turned block the sums are values of nested calls, as Ascend's
Triton 3.2 has no tuples (`_turned_step`). `history` decides.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kernel_runtime.impl import interpreting
from kernel_runtime.launch import ON_ASCEND

MAX_UNROLLED = 32  # iterations
PLAIN_DIVISION = tl.constexpr(interpreting() or ON_ASCEND)
TOKENS_LAST = tl.constexpr(64)  # blocks of so many tokens are turned: 256 bytes of fp32, Ascend's vector register; on a GPU they are smaller


def tokens_last(n: int, iters: int, convention: str, npu: bool) -> int:
    """Tokens of a block that is turned, 0 where none is: 8 streams would exceed the unified buffer, and 3 have padding."""
    return TOKENS_LAST.value if npu and n in (1, 2, 4) and convention == "v4" and iters <= MAX_UNROLLED else 0


@triton.jit
def _turn(x):
    return tl.permute(x, (1, 2, 0))


@triton.jit
def _turn_back(x):
    return tl.permute(x, (2, 0, 1))


@triton.jit
def _inside(on, x, OTHER: tl.constexpr):
    if on is None:
        return x
    else:
        return tl.where(on, x, OTHER)


@triton.jit
def _padded_eps(on, eps, AXIS: tl.constexpr):
    """What is added to the sums along AXIS: eps, and 1 where a sum is of padding alone, or it would be 0 with eps = 0"""
    if on is None:
        return eps
    else:
        return tl.where(tl.max(on.to(tl.int32), AXIS) > 0, eps, 1.0)


@triton.jit
def _softmax_start(logits, on, ROW: tl.constexpr):
    z = _inside(on, logits, float("-inf"))
    z = tl.exp(z - tl.expand_dims(tl.max(_inside(on, logits, -3.0e38), ROW), ROW))
    z = _inside(on, z, 0.0)
    s = tl.sum(z, ROW)
    s = tl.where(s > 0.0, s, 1.0)
    return z * tl.expand_dims(1.0 / s, ROW)


@triton.jit
def _log_sum(z, on, AXIS: tl.constexpr):
    """logsumexp along AXIS over the N x N part; 0 for a padding row or column"""
    z = tl.where(on, z, -3.0e38)
    top = tl.max(z, AXIS)
    s = tl.sum(tl.where(on, tl.exp(z - tl.expand_dims(top, AXIS)), 0.0), AXIS)
    return tl.where(s > 0.0, top + tl.log(tl.where(s > 0.0, s, 1.0)), 0.0)


@triton.jit
def sinkhorn_block(logits, on, eps, ITERS: tl.constexpr, PAPER: tl.constexpr):
    """comb [BT, P, P] of logits [BT, P, P]; 0 in the padding"""
    if PAPER:
        # log comb = logits - u (rows) - v (columns): subtracting from the logits themselves keeps +-1e4 exact
        u = tl.sum(tl.where(on, 0.0, 0.0), 2)
        v = tl.sum(tl.where(on, 0.0, 0.0), 1)
        for _ in range(ITERS):
            v = _log_sum(logits - u[:, :, None], on, 1)
            u = _log_sum(logits - v[:, None, :], on, 2)
        m = tl.where(on, tl.exp(logits - v[:, None, :] - u[:, :, None]), 0.0)
    elif logits.shape[0] >= TOKENS_LAST:
        m = _turn_back(_v4(_turn(logits), None, eps, ITERS, 1, 0))
    else:
        m = _v4(logits, on, eps, ITERS, 2, 1)
    return m


@triton.jit
def _v4(logits, on, eps, ITERS: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr):
    column_eps = _padded_eps(on, eps, COL)
    row_eps = _padded_eps(on, eps, ROW)
    m = _inside(on, _softmax_start(logits, on, ROW) + eps, 0.0)
    m = m * tl.expand_dims(1.0 / (tl.sum(m, COL) + column_eps), COL)
    for _ in range(ITERS - 1):
        m = m * tl.expand_dims(1.0 / (tl.sum(m, ROW) + row_eps), ROW)
        m = m * tl.expand_dims(1.0 / (tl.sum(m, COL) + column_eps), COL)
    return m


@triton.jit
def sinkhorn_block_bwd(logits, dm, on, eps, ITERS: tl.constexpr, H: tl.constexpr, PAPER: tl.constexpr, BT: tl.constexpr, P: tl.constexpr):
    """dlogits [BT, P, P] from dm = d(loss)/d(comb). H: see `history`."""
    if H < 0:
        return _turn_back(_bwd_turned(_turn(logits), _turn(dm), eps, ITERS, 1, 0))
    elif H == 0:
        return _bwd_factors(logits, dm, on, eps, ITERS)
    else:
        return _bwd_rolled(logits, dm, on, eps, ITERS, H, PAPER, BT, P)


def history(n: int, iters: int, convention: str, npu: bool, alone: bool = True) -> int:
    """H. 0: nothing is stored, and all is unrolled, which is a fifth to a third faster and takes seconds to compile; on a GPU, in a kernel
    of its own (beside other programs the registers are missing there). -1: the same on Ascend, the block turned. Else the power of two at
    or above `iters`."""
    if tokens_last(n, iters, convention, npu):
        return -1
    return 0 if alone and not npu and convention == "v4" and iters <= MAX_UNROLLED else triton.next_power_of_2(iters)


@triton.jit
def _from_log_gradient(h, soft, eps, ROW: tl.constexpr):
    """dlogits of h, the gradient of the logarithm of soft + eps: d(soft) = h / (soft + eps), then through the softmax over rows"""
    a = soft + eps
    r = h * (soft * (1.0 / tl.where(a > 0.0, a, 1.0)))
    return r - soft * tl.expand_dims(tl.sum(r, ROW), ROW)


@triton.jit
def _turned_step(m, dm, eps, LEFT: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, INNER: tl.constexpr):
    """m after LEFT more iterations, and back: m again and h. What is kept of an iteration, its sums, are the values of a call. INNER, this
    function as an argument, does the iterations between: were it called by name, Triton 3.2 would look for the function's key without end."""
    if LEFT == 0:
        h = dm * m
    else:
        r = tl.sum(m, ROW) + eps
        m = m * tl.expand_dims(1.0 / r, ROW)
        c = tl.sum(m, COL) + eps
        m = m * tl.expand_dims(1.0 / c, COL)
        m, h = INNER(m, dm, eps, LEFT - 1, ROW, COL, INNER)
        h = h - m * tl.expand_dims(tl.sum(h, COL), COL)
        m = m * tl.expand_dims(c, COL)
        h = h - m * tl.expand_dims(tl.sum(h, ROW), ROW)
        m = m * tl.expand_dims(r, ROW)
    return m, h


@triton.jit
def _bwd_turned(logits, dm, eps, ITERS: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr):
    """For Ascend"""
    soft = _softmax_start(logits, None, ROW)
    m = soft + eps
    m = m * tl.expand_dims(1.0 / (tl.sum(m, COL) + eps), COL)
    m, h = _turned_step(m, dm, eps, ITERS - 1, ROW, COL, _turned_step)
    h = h - m * tl.expand_dims(tl.sum(h, COL), COL)
    return _from_log_gradient(h, soft, eps, ROW)


@triton.jit
def _over(x):
    """1 / x, on a GPU in one instruction and within 1 ulp of a normal number"""
    if PLAIN_DIVISION:
        return 1.0 / x
    else:
        return libdevice.fast_dividef(1.0, x)


@triton.jit
def _bwd_factors(logits, dm, on, eps, ITERS: tl.constexpr):
    """For a GPU. The matrices are a * u * v with a = soft + eps, u a factor of every row and v of every column, so that sums are those of
    products; k = h / a ends as the gradient of a."""
    column_eps = _padded_eps(on, eps, 1)
    row_eps = _padded_eps(on, eps, 2)
    soft = _softmax_start(logits, on, 2)
    a = tl.where(on, soft + eps, 0.0)
    u = tl.where(row_eps > 0.5, 1.0, 1.0)
    v = _over(tl.sum(a, 1) + column_eps)
    us = (u,)
    vs = (v,)
    for _ in tl.static_range(1, ITERS):
        u = u * _over(u * tl.sum(a * v[:, None, :], 2) + row_eps)
        v = v * _over(v * tl.sum(a * u[:, :, None], 1) + column_eps)
        us = us + (u,)
        vs = vs + (v,)
    k = tl.where(on, dm, 0.0) * (u[:, :, None] * v[:, None, :])
    for j in tl.static_range(ITERS - 1):
        u = us[ITERS - 1 - j]
        v = vs[ITERS - 1 - j]
        k = k - u[:, :, None] * (v * tl.sum(a * k, 1))[:, None, :]
        v = vs[ITERS - 2 - j]
        k = k - (u * tl.sum(a * k, 2))[:, :, None] * v[:, None, :]
    k = k - (vs[0] * tl.sum(a * k, 1))[:, None, :]
    return soft * (k - tl.sum(soft * k, 2)[:, :, None])


@triton.jit
def _bwd_rolled(logits, dm, on, eps, ITERS: tl.constexpr, H: tl.constexpr, PAPER: tl.constexpr, BT: tl.constexpr, P: tl.constexpr):
    h = tl.arange(0, H)[:, None, None]
    row_hist = tl.zeros((H, BT, P), tl.float32)
    col_hist = tl.zeros((H, BT, P), tl.float32)
    dm = tl.where(on, dm, 0.0)
    if PAPER:
        # u, v are what _log_sum gave: log comb = logits - u - v at every half step. Gradients below are those of log comb.
        u = tl.zeros((BT, P), tl.float32)
        v = tl.zeros((BT, P), tl.float32)
        for i in range(ITERS):
            v = _log_sum(logits - u[:, :, None], on, 1)
            u = _log_sum(logits - v[:, None, :], on, 2)
            row_hist = tl.where(h == i, u[None, :, :], row_hist)
            col_hist = tl.where(h == i, v[None, :, :], col_hist)
        g = dm * tl.where(on, tl.exp(logits - v[:, None, :] - u[:, :, None]), 0.0)
        for j in range(ITERS):
            i = ITERS - 1 - j
            u = tl.sum(tl.where(h == i, row_hist, 0.0), 0)
            v = tl.sum(tl.where(h == i, col_hist, 0.0), 0)
            m = tl.where(on, tl.exp(logits - v[:, None, :] - u[:, :, None]), 0.0)
            g -= m * tl.sum(g, 2)[:, :, None]
            before = tl.sum(tl.where(h == i - 1, row_hist, 0.0), 0)  # u of the previous iteration, 0 before the first
            m = tl.where(on, tl.exp(logits - v[:, None, :] - before[:, :, None]), 0.0)
            g -= m * tl.sum(g, 1)[:, None, :]
        return tl.where(on, g, 0.0)
    else:
        column_eps = _padded_eps(on, eps, 1)
        row_eps = _padded_eps(on, eps, 2)
        soft = _softmax_start(logits, on, 2)
        m = tl.where(on, soft + eps, 0.0)
        c = tl.sum(m, 1) + column_eps
        m = m * (1.0 / c)[:, None, :]
        col_hist = tl.where(h == 0, c[None, :, :], col_hist)
        for i in range(1, ITERS):
            r = tl.sum(m, 2) + row_eps
            m = m * (1.0 / r)[:, :, None]
            c = tl.sum(m, 1) + column_eps
            m = m * (1.0 / c)[:, None, :]
            row_hist = tl.where(h == i, r[None, :, :], row_hist)
            col_hist = tl.where(h == i, c[None, :, :], col_hist)
        g = dm * m
        for j in range(ITERS - 1):
            i = ITERS - 1 - j
            g = g - m * tl.sum(g, 1)[:, None, :]
            m = m * tl.sum(tl.where(h == i, col_hist, 0.0), 0)[:, None, :]
            g = g - m * tl.sum(g, 2)[:, :, None]
            m = m * tl.sum(tl.where(h == i, row_hist, 0.0), 0)[:, :, None]
        g = g - m * tl.sum(g, 1)[:, None, :]
        return _from_log_gradient(g, soft, eps, 2)
