"""The gates of a block of tokens in registers: device functions shared by the gates kernels and by the fused ones.

A block is three fp32 tensors of mixes, each already times r: m_pre and m_post [BT, P], m_comb [BT, P, P]; P is the power of two at or
above N. `live` [BT] marks tokens that exist. Pointers point at one site's scale [3] and base [M]. Padding (streams N..P-1, tokens that
are not live) comes in as anything finite; it leaves as garbage in pre and post, as 0 in comb and in every gradient.
"""

import triton
import triton.language as tl

from kernel_runtime.kernels import sigmoid
from mhc_ops.sinkhorn.core import sinkhorn_block, sinkhorn_block_bwd


@triton.jit
def token_mask(live, N: tl.constexpr, P: tl.constexpr):
    """[BT, P]: the live tokens' streams"""
    return live[:, None] & (tl.arange(0, P) < N)[None, :]


@triton.jit
def comb_mask(live, N: tl.constexpr, P: tl.constexpr):
    """[BT, P, P]: the live tokens' N x N part"""
    i = tl.arange(0, P)
    return live[:, None, None] & (i < N)[None, :, None] & (i < N)[None, None, :]


@triton.jit
def load_block(row, live, STRIDE: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BT: tl.constexpr):
    """m_pre, m_post, m_comb of BT consecutive rows of fp32 mixes, STRIDE apart; `row` points at the first. Padding reads 0."""
    t = tl.arange(0, BT)
    i = tl.arange(0, P)
    on = token_mask(live, N, P)
    two = row + t[:, None] * STRIDE + i[None, :]
    three = row + t[:, None, None] * STRIDE + 2 * N + i[None, :, None] * N + i[None, None, :]
    m_pre = tl.load(two, mask=on, other=0.0)
    m_post = tl.load(two + N, mask=on, other=0.0)
    return m_pre, m_post, tl.load(three, mask=comb_mask(live, N, P), other=0.0)


@triton.jit
def store_block(row, live, m_pre, m_post, m_comb, STRIDE: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BT: tl.constexpr):
    """The inverse of load_block, for mixes and for their gradient."""
    t = tl.arange(0, BT)
    i = tl.arange(0, P)
    on = token_mask(live, N, P)
    two = row + t[:, None] * STRIDE + i[None, :]
    three = row + t[:, None, None] * STRIDE + 2 * N + i[None, :, None] * N + i[None, None, :]
    tl.store(two, m_pre, mask=on)
    tl.store(two + N, m_post, mask=on)
    tl.store(three, m_comb, mask=comb_mask(live, N, P))


@triton.jit
def load_base(base, N: tl.constexpr, P: tl.constexpr):
    """base as b_pre [P], b_post [P], b_comb [P, P]; padding reads 0"""
    i = tl.arange(0, P)
    on = (i < N)[:, None] & (i < N)[None, :]
    b_pre = tl.load(base + i, mask=i < N, other=0.0)
    b_post = tl.load(base + N + i, mask=i < N, other=0.0)
    return b_pre, b_post, tl.load(base + 2 * N + i[:, None] * N + i[None, :], mask=on, other=0.0)


@triton.jit
def gate_pre(z, eps, PAPER: tl.constexpr):
    """pre of its logit z = mix * scale[0] + base, of any shape"""
    v = sigmoid(z)
    if not PAPER:
        v += eps
    return v


@triton.jit
def gate_bwd(g, z):
    """Gradient of the logits z of sigmoid(z) + eps, for the gradient g of its value"""
    v = sigmoid(z)
    return g * v * (1.0 - v)


@triton.jit
def gates_block(m_pre, m_post, m_comb, live, scale, base, eps, N: tl.constexpr, P: tl.constexpr, ITERS: tl.constexpr, PAPER: tl.constexpr):
    """pre [BT, P], post [BT, P], comb [BT, P, P] of a block of mixes"""
    b_pre, b_post, b_comb = load_base(base, N, P)
    pre = gate_pre(m_pre * tl.load(scale) + b_pre[None, :], eps, PAPER)
    post = 2.0 * sigmoid(m_post * tl.load(scale + 1) + b_post[None, :])
    logits = m_comb * tl.load(scale + 2) + b_comb[None, :, :]
    return pre, post, sinkhorn_block(logits, comb_mask(live, N, P), eps, ITERS, PAPER)


@triton.jit
def gates_block_bwd(
    m_pre, m_post, m_comb, dpre, dpost, dcomb, live, scale, base, eps,
    N: tl.constexpr, P: tl.constexpr, ITERS: tl.constexpr, H: tl.constexpr, PAPER: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits, z_pre [BT, P], z_post [BT, P], z_comb [BT, P, P], from those of the coefficients.

    dpre, dpost and dcomb are 0 in the padding. H >= ITERS is a power of two. d(mixes) = z * scale, d(base) = sum over tokens of z,
    d(scale) = sum over tokens of z * mixes, group by group.
    """
    b_pre, b_post, b_comb = load_base(base, N, P)
    z_pre = gate_bwd(dpre, m_pre * tl.load(scale) + b_pre[None, :])
    z_post = gate_bwd(2.0 * dpost, m_post * tl.load(scale + 1) + b_post[None, :])
    logits = m_comb * tl.load(scale + 2) + b_comb[None, :, :]
    return z_pre, z_post, sinkhorn_block_bwd(logits, dcomb, comb_mask(live, N, P), eps, ITERS, H, PAPER, BT, P)


@triton.jit
def store_partial(row, z_pre, z_post, z_comb, m_pre, m_post, m_comb, N: tl.constexpr, P: tl.constexpr):
    """One program's sums over its tokens, M + 3 fp32 values at `row`: d(base) in its own order, then d(scale)."""
    i = tl.arange(0, P)
    on = (i < N)[:, None] & (i < N)[None, :]
    tl.store(row + i, tl.sum(z_pre, 0), mask=i < N)
    tl.store(row + N + i, tl.sum(z_post, 0), mask=i < N)
    tl.store(row + 2 * N + i[:, None] * N + i[None, :], tl.sum(z_comb, 0), mask=on)
    tl.store(row + N * N + 2 * N, tl.sum(tl.sum(z_pre * m_pre, 1), 0))
    tl.store(row + N * N + 2 * N + 1, tl.sum(tl.sum(z_post * m_post, 1), 0))
    tl.store(row + N * N + 2 * N + 2, tl.sum(tl.sum(tl.sum(z_comb * m_comb, 2), 1), 0))
