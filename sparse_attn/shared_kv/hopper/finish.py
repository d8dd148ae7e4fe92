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
    X: gl.constexpr, a, b, m, l, row, group, parity, lse, sinks, sum_s, sum_full, dtype: gl.constexpr, N: gl.constexpr, SINKS: gl.constexpr
):
    """Warpgroup X's two parts of D of a task's output, in 16 bits; warpgroup 0 writes the LSE."""
    s_rows: gl.constexpr = m.type.layout
    o_rows: gl.constexpr = gl.SliceLayout(1, a.type.layout)
    h = group * 64 + gl.arange(0, 64, layout=s_rows)
    sink = load_sink(sinks, h, h < N, SINKS)
    mbarrier.wait(sum_full[1 - X], parity)
    l += sum_s[1 - X].load(s_rows)
    inverse, total = with_sink(m, l, sink, SINKS)
    if X == 0:
        gl.store(lse + row.to(gl.int64) * N + h, total, mask=h < N)
    inverse = gl.convert_layout(inverse, o_rows)[:, None]
    return (a * inverse).to(dtype), (b * inverse).to(dtype)


@gluon.jit
def store_pair(x, a, b, staged, other, row, group, first, N: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """As store_through, WIDTH at most 64."""
    if WIDTH < 64:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], staged.dtype)
        staged = staged._reinterpret(staged.dtype, [64, WIDTH], layout)
        other = other._reinterpret(other.dtype, [64, WIDTH], layout)
    staged.store(a)
    store_heads(x, staged, row, group, first, N, D, WIDTH)
    other.store(b)
    store_heads(x, other, row, group, first + WIDTH, N, D, WIDTH)


@gluon.jit
def store_halves(x, a, staged, other, row, group, first, N: gl.constexpr, D: gl.constexpr):
    """a [64, 128] as store_through."""
    left, right = a.reshape([64, 2, 64]).permute((0, 2, 1)).split()
    store_pair(x, left, right, staged, other, row, group, first, N, D, 64)


@gluon.jit
def store_through(x, a, b, staged, other, row, group, first, N: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """a and b [64, WIDTH], WIDTH 32, 64 or 128, to channels from `first` on of 64 heads of x [rows, N, D], at most 64 at a time through staged
    and other [64, 64] in turn, so that the stores to device memory are whole rows."""
    if WIDTH == 128:
        store_halves(x, a, staged, other, row, group, first, N, D)
        store_halves(x, b, staged, other, row, group, first + WIDTH, N, D)
    else:
        store_pair(x, a, b, staged, other, row, group, first, N, D, WIDTH)
