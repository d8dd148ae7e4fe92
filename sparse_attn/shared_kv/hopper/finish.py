"""The end of a task of the forwards for sm_90: the sink, the LSE, and the output on its way to device memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


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


@gluon.constexpr_function
def warp_rows(WIDTH):
    """[64, WIDTH] of 16 bits on four warps, 16 bytes a thread and whole rows: those of a product's result that the same warp has made."""
    across = WIDTH // 8  # lanes of a row
    lanes, registers = [], [[0, 1], [0, 2], [0, 4]]
    step = 8
    while step < 8 * across:
        lanes.append([0, step])
        step *= 2
    step = 1
    while len(lanes) < 5:
        lanes.append([step, 0])
        step *= 2
    while step < 16:
        registers.append([step, 0])
        step *= 2
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, WIDTH])


@gluon.jit
def store_rows(x, v, row, group, first, N: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """v [64, WIDTH], a product's result in 16 bits, to channels from `first` on of 64 heads of x [rows, N, D]. Its layout changes within a warp,
    which waits for no other one."""
    layout: gl.constexpr = warp_rows(WIDTH)
    h = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    ptrs = x + (row.to(gl.int64) * N + group * 64) * D + first + h[:, None] * D + d[None, :]
    v = gl.convert_layout(v, layout)
    if N % 64 == 0:
        gl.store(ptrs, v)
    else:
        gl.store(ptrs, v, mask=(group * 64 + h < N)[:, None])
