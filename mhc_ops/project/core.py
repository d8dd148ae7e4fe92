"""What the fused mHC kernels share: sizes that they agree on, and device functions over the streams of one token. Imports Triton.

Letters: T tokens, N streams, D hidden size, K = N*D, M columns of the mix (N*N + 2N at a site, N at the head), P the power of two at
or above N, C the power of two that holds M columns and the extra ones named where it is used.
"""

import torch
import triton
import triton.language as tl

from kernel_runtime.device import device_properties, grid_size
from kernel_runtime.kernels import dot

PLANS = 1024  # launch plans (one a shape) that are kept


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b; triton.cdiv is made for kernels too and takes 1 us on the host"""
    return -(-a // b)


def padded(columns: int) -> int:
    """A tile width that holds so many columns; products need at least 16."""
    return max(16, triton.next_power_of_2(columns))


def parallelism(device: torch.device) -> int:
    """Cores that one wave of programs fills; 2 in the interpreter, so that a two-stage sum has two partial sums to add."""
    return max(2, device_properties(device).vector_cores)


def row_grid(device: torch.device, programs: int) -> int:
    """Launch size of a kernel that loops over its row programs: one each on a GPU, as many as cores on an NPU (65535 at most there)."""
    return grid_size(device, programs, device.type == "npu", vector=True)


@triton.jit
def load_streams(at, mask, N: tl.constexpr, D: tl.constexpr):
    """The N streams at the pointers `at`, `at + D`, ... as eight tensors in their own type; those past N repeat the first.

    Named one by one because Triton 3.2 has no tuples of tensors; every load is issued before the first use.
    """
    x0 = tl.load(at, mask=mask, other=0.0)
    x1 = tl.load(at + D, mask=mask, other=0.0)
    x2 = x0
    x3 = x0
    x4 = x0
    x5 = x0
    x6 = x0
    x7 = x0
    if N > 2:
        x2 = tl.load(at + 2 * D, mask=mask, other=0.0)
    if N > 3:
        x3 = tl.load(at + 3 * D, mask=mask, other=0.0)
    if N > 4:
        x4 = tl.load(at + 4 * D, mask=mask, other=0.0)
    if N > 5:
        x5 = tl.load(at + 5 * D, mask=mask, other=0.0)
    if N > 6:
        x6 = tl.load(at + 6 * D, mask=mask, other=0.0)
    if N > 7:
        x7 = tl.load(at + 7 * D, mask=mask, other=0.0)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def weighted_streams(x0, x1, x2, x3, x4, x5, x6, x7, w0, w1, w2, w3, w4, w5, w6, w7, N: tl.constexpr):
    """sum over the first N of x_j * w_j in fp32, contracted in this order by hand: wherever streams are summed, replays are bit-equal"""
    v = tl.fma(x1.to(tl.float32), w1, x0.to(tl.float32) * w0)
    if N > 2:
        v = tl.fma(x2.to(tl.float32), w2, v)
    if N > 3:
        v = tl.fma(x3.to(tl.float32), w3, v)
    if N > 4:
        v = tl.fma(x4.to(tl.float32), w4, v)
    if N > 5:
        v = tl.fma(x5.to(tl.float32), w5, v)
    if N > 6:
        v = tl.fma(x6.to(tl.float32), w6, v)
    if N > 7:
        v = tl.fma(x7.to(tl.float32), w7, v)
    return v


@triton.jit
def load_weights(at, STRIDE: tl.constexpr, N: tl.constexpr):
    """Scalars at `at`, `at + STRIDE`, ..., eight of them; those past N repeat the first."""
    w0 = tl.load(at)
    w1 = tl.load(at + STRIDE)
    w2 = w0
    w3 = w0
    w4 = w0
    w5 = w0
    w6 = w0
    w7 = w0
    if N > 2:
        w2 = tl.load(at + 2 * STRIDE)
    if N > 3:
        w3 = tl.load(at + 3 * STRIDE)
    if N > 4:
        w4 = tl.load(at + 4 * STRIDE)
    if N > 5:
        w5 = tl.load(at + 5 * STRIDE)
    if N > 6:
        w6 = tl.load(at + 6 * STRIDE)
    if N > 7:
        w7 = tl.load(at + 7 * STRIDE)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def pick_weights(v, N: tl.constexpr, P: tl.constexpr):
    """The elements of a vector [P] as eight scalars; those past N repeat the first."""
    i = tl.arange(0, P)
    w0 = tl.sum(tl.where(i == 0, v, 0.0), 0)
    w1 = tl.sum(tl.where(i == 1, v, 0.0), 0)
    w2 = w0
    w3 = w0
    w4 = w0
    w5 = w0
    w6 = w0
    w7 = w0
    if N > 2:
        w2 = tl.sum(tl.where(i == 2, v, 0.0), 0)
    if N > 3:
        w3 = tl.sum(tl.where(i == 3, v, 0.0), 0)
    if N > 4:
        w4 = tl.sum(tl.where(i == 4, v, 0.0), 0)
    if N > 5:
        w5 = tl.sum(tl.where(i == 5, v, 0.0), 0)
    if N > 6:
        w6 = tl.sum(tl.where(i == 6, v, 0.0), 0)
    if N > 7:
        w7 = tl.sum(tl.where(i == 7, v, 0.0), 0)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def collapse_tile(x, y, w0, w1, w2, w3, w4, w5, w6, w7, t, d, N: tl.constexpr, D: tl.constexpr):
    """y[d] = sum_n w_n * x[n, d] of token t (int64) for the columns d"""
    x0, x1, x2, x3, x4, x5, x6, x7 = load_streams(x + t * (N * D) + d, d < D, N, D)
    v = weighted_streams(x0, x1, x2, x3, x4, x5, x6, x7, w0, w1, w2, w3, w4, w5, w6, w7, N)
    tl.store(y + t * D + d, v.to(y.dtype.element_ty), mask=d < D)


@triton.jit
def gather_scalars(a0, a1, a2, a3, a4, a5, a6, a7, N: tl.constexpr, P: tl.constexpr):
    """Eight scalars as a vector [P], 0 past N"""
    i = tl.arange(0, P)
    v = tl.where(i == 0, a0, 0.0) + tl.where(i == 1, a1, 0.0)
    if N > 2:
        v += tl.where(i == 2, a2, 0.0)
    if N > 3:
        v += tl.where(i == 3, a3, 0.0)
    if N > 4:
        v += tl.where(i == 4, a4, 0.0)
    if N > 5:
        v += tl.where(i == 5, a5, 0.0)
    if N > 6:
        v += tl.where(i == 6, a6, 0.0)
    if N > 7:
        v += tl.where(i == 7, a7, 0.0)
    return v


@triton.jit
def stream_sums(
    dy, x, t, pre, dx, N: tl.constexpr, P: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
    STORE: tl.constexpr, ASCEND: tl.constexpr,
):  # fmt: skip
    """sum_d dy[d] * x[n, d] of token t for every stream, [P]; with STORE also dx[n, d] = pre[n] * dy[d].

    [R, W] tiles keep the sums in a thread until the end of D; loads are staged ahead although there is no product. ASCEND: columns are
    compared as floats; of integers ascendnpu-ir 1.0.0 makes a loop over elements.
    """
    at = tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
    column = at.to(tl.float32) if ASCEND else at
    row = t * (N * D) + at
    a0 = tl.zeros((R,), tl.float32)
    a1 = tl.zeros((R,), tl.float32)
    a2 = tl.zeros((R,), tl.float32)
    a3 = tl.zeros((R,), tl.float32)
    a4 = tl.zeros((R,), tl.float32)
    a5 = tl.zeros((R,), tl.float32)
    a6 = tl.zeros((R,), tl.float32)
    a7 = tl.zeros((R,), tl.float32)
    if STORE:
        w0, w1, w2, w3, w4, w5, w6, w7 = load_weights(pre + t * N, 1, N)
    for d in tl.range(0, D, R * W, num_stages=STAGES):
        on = column < D - d
        g = tl.load(dy + t * D + d + at, mask=on, other=0.0)
        x0, x1, x2, x3, x4, x5, x6, x7 = load_streams(x + row + d, on, N, D)
        g = g.to(tl.float32)
        a0 += tl.sum(g * x0.to(tl.float32), 1)
        a1 += tl.sum(g * x1.to(tl.float32), 1)
        if N > 2:
            a2 += tl.sum(g * x2.to(tl.float32), 1)
        if N > 3:
            a3 += tl.sum(g * x3.to(tl.float32), 1)
        if N > 4:
            a4 += tl.sum(g * x4.to(tl.float32), 1)
        if N > 5:
            a5 += tl.sum(g * x5.to(tl.float32), 1)
        if N > 6:
            a6 += tl.sum(g * x6.to(tl.float32), 1)
        if N > 7:
            a7 += tl.sum(g * x7.to(tl.float32), 1)
        if STORE:
            store_streams(dx + row + d, on, g, w0, w1, w2, w3, w4, w5, w6, w7, N, D)
    return gather_scalars(
        tl.sum(a0, 0), tl.sum(a1, 0), tl.sum(a2, 0), tl.sum(a3, 0), tl.sum(a4, 0), tl.sum(a5, 0), tl.sum(a6, 0), tl.sum(a7, 0), N, P
    )


@triton.jit
def store_streams(at, mask, v, w0, w1, w2, w3, w4, w5, w6, w7, N: tl.constexpr, D: tl.constexpr):
    """v * w_n to the pointers `at`, `at + D`, ...: the transpose of weighted_streams"""
    tl.store(at, (v * w0).to(at.dtype.element_ty), mask=mask)
    tl.store(at + D, (v * w1).to(at.dtype.element_ty), mask=mask)
    if N > 2:
        tl.store(at + 2 * D, (v * w2).to(at.dtype.element_ty), mask=mask)
    if N > 3:
        tl.store(at + 3 * D, (v * w3).to(at.dtype.element_ty), mask=mask)
    if N > 4:
        tl.store(at + 4 * D, (v * w4).to(at.dtype.element_ty), mask=mask)
    if N > 5:
        tl.store(at + 5 * D, (v * w5).to(at.dtype.element_ty), mask=mask)
    if N > 6:
        tl.store(at + 6 * D, (v * w6).to(at.dtype.element_ty), mask=mask)
    if N > 7:
        tl.store(at + 7 * D, (v * w7).to(at.dtype.element_ty), mask=mask)


@triton.jit
def dot_exact(a, b, acc):
    """acc + a @ b in full fp32 (no tf32), for streams whose values do not fit in bf16"""
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def store_dp(dp, pieces, plane, at, value, mask):
    """Stores fp32 `value` at offsets `at` of dp, and its two bf16 pieces, which add up to it, in the planes of pieces [2, plane]."""
    tl.store(dp + at, value, mask=mask)
    high = value.to(tl.bfloat16)
    tl.store(pieces + at, high, mask=mask)
    tl.store(pieces + plane + at, (value - high.to(tl.float32)).to(tl.bfloat16), mask=mask)


@triton.jit
def hidden_zero():
    """0.0 that the compiler does not know: ascendnpu-ir 1.0.0 crashes where the accumulator of a product starts as a constant in front of a
    loop. No grid has 2^30 programs."""
    return (tl.program_id(0) >> 30).to(tl.float32)


@triton.jit
def zero_product(R: tl.constexpr, C: tl.constexpr, BIT: tl.constexpr):
    """Zeros [R, C] as the result of a product: on Ascend an accumulator that starts so stays in the matrix unit's memory during a loop,
    with both compilers. As a constant it crashes ascendnpu-ir 1.0.0, and with `hidden_zero` it passes through global memory at every step.
    Each accumulator of a kernel has a BIT (28 to 30, no grid is so large) of its own, or equal shapes would share one and be copied."""
    zero = (tl.program_id(0) >> BIT).to(tl.bfloat16)
    return dot(tl.zeros((R, 16), tl.bfloat16) + zero, tl.zeros((16, C), tl.bfloat16) + zero, tl.zeros((R, C), tl.float32))
