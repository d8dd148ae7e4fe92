"""The end of a task of the forwards for sm_90: the sink, the LSE, and the output on its way to device memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparse_attn.shared_kv.hopper.core import store_heads


@gluon.jit
def load_sink(sinks, h, on, SINKS: gl.constexpr):
    """Sinks of heads h in base 2; -inf where not `on` and without sinks."""
    sink = gl.where(on, float("-inf"), float("-inf"))
    if SINKS:
        sink = gl.load(sinks + h, mask=on, other=float("-inf")) * 1.4426950408889634
    return sink


@gluon.jit
def with_sink(m, l, sink, SINKS: gl.constexpr):
    """1 / sum and LSE (natural) of rows with running maximum m (base 2) and sum l, the sink (base 2) included. No keys: 0 and sink or -inf."""
    m = gl.where(l > 0.0, m, float("-inf"))
    top = m
    if SINKS:
        top = gl.maximum(m, sink)
    base = gl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    weight = gl.exp2(m - base)
    total = l * weight
    if SINKS:
        total += gl.exp2(gl.minimum(sink, 3.0e38) - base)  # a sink of +inf makes the total +inf, so the result 0
    inverse = gl.where(total > 0.0, weight / total, 0.0)
    lse = (base + gl.log2(total)) * 0.6931471805599453
    if SINKS:
        inverse = gl.where(sink == float("inf"), 0.0, inverse)
        lse = gl.where(sink == float("inf"), sink, lse)
    return inverse, lse


@gluon.jit
def finished(
    X: gl.constexpr, acc, m, l, row, group, parity, lse, sinks, sum_s, sum_full, dtype: gl.constexpr, N: gl.constexpr, SINKS: gl.constexpr
):
    """Warpgroup X's half of D of a task's output, in 16 bits; warpgroup 0 writes the LSE."""
    s_rows: gl.constexpr = m.type.layout
    o_rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    h = group * 64 + gl.arange(0, 64, layout=s_rows)
    sink = load_sink(sinks, h, h < N, SINKS)
    mbarrier.wait(sum_full[1 - X], parity)
    l += sum_s[1 - X].load(s_rows)
    inverse, total = with_sink(m, l, sink, SINKS)
    if X == 0:
        gl.store(lse + row.to(gl.int64) * N + h, total, mask=h < N)
    return (acc * gl.convert_layout(inverse, o_rows)[:, None]).to(dtype)


@gluon.jit
def halves(value, HALF: gl.constexpr):
    """value [64, 2 HALF] as its first and last HALF columns."""
    return value.reshape([64, 2, HALF]).permute((0, 2, 1)).split()


@gluon.jit
def store_pair(x, value, staged, other, row, group, first, N: gl.constexpr, D: gl.constexpr):
    """value [64, 128] as store_through."""
    left, right = halves(value, 64)
    staged.store(left)
    store_heads(x, staged, row, group, first, N, D, 64)
    other.store(right)
    store_heads(x, other, row, group, first + 64, N, D, 64)


@gluon.jit
def store_through(x, value, staged, other, row, group, first, N: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """value [64, WIDTH], WIDTH 64, 128 or 256, to channels from `first` on of 64 heads of x [rows, N, D], 64 at a time through staged and other
    [64, 64] in turn, so that the stores to device memory are whole rows."""
    if WIDTH == 256:
        left, right = halves(value, 128)
        store_pair(x, left, staged, other, row, group, first, N, D)
        store_pair(x, right, staged, other, row, group, first + 128, N, D)
    elif WIDTH == 128:
        store_pair(x, value, staged, other, row, group, first, N, D)
    else:
        staged.store(value)
        store_heads(x, staged, row, group, first, N, D, 64)
