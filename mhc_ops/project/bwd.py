"""Backward of the projection, with what the collapse adds to dx, since both read the streams: kernels, specialisations, launchers.

    dx[n] = dx_in[n] + pre[n] * dy + sum_c dp[c] * fn[c, n] + crms * x[n]         dfn[c] = sum_t dp[t, c] * x[t]
    dp[c] = d(mixes)[c] * rstd,  crms = -rstd^2 / K * sum_c d(mixes)[c] * mixes[c]   (the way through rstd)

Where gates are behind the projection, with S scales, dz [T, L] fp32 holds the gradient of their logits in its first M columns and what
sums over tokens to dscale in columns M..M+S-1, so that one sum over tokens gives dbase and dscale.
Sums over tokens have two stages in a fixed order, no atomics: two runs are bit-equal.
"""

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernel_runtime.kernels import dot
from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from kernel_runtime.workspace import Layout, Scratch
from mhc_ops.library import mix_columns
from mhc_ops.project.core import PLANS, cdiv, dot_exact, hidden_zero, padded, parallelism, store_dp, zero_product
from mhc_ops.project.fwd import STREAM_DTYPE, forward_specs

REDUCE_BLOCK = 1024
DP_TOKENS = 32


@triton.jit(do_not_specialize=["T"])
def dp_kernel(dmixes, mixes, rstd, dp, pieces, crms, T, K: tl.constexpr, M: tl.constexpr, L: tl.constexpr, BT: tl.constexpr):
    """dp [T, L], its pieces and crms [T] of d(mixes) [T, M]"""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.arange(0, L)
    on = (t < T)[:, None] & (c < M)[None, :]
    at = t.to(tl.int64)[:, None] * M + c[None, :]
    g = tl.load(dmixes + at, mask=on, other=0.0)
    total = tl.sum(g * tl.load(mixes + at, mask=on, other=0.0), 1)
    r = tl.load(rstd + t, mask=t < T, other=0.0)
    store_dp(dp, pieces, T.to(tl.int64) * L, t.to(tl.int64)[:, None] * L + c[None, :], g * r[:, None], on)
    tl.store(crms + t, -total * r * r * (1.0 / K), mask=t < T)


@triton.jit
def gate_sums(g, groups, dz, dgate_part, T, M: tl.constexpr, S: tl.constexpr, L: tl.constexpr, BT: tl.constexpr):
    """First stage of d(base) and d(scale): row g of dgate_part [groups, L] sums every groups-th block of tokens of dz"""
    c = tl.arange(0, L)
    at = tl.arange(0, BT)[:, None] * L + c[None, :]
    on = (c < M + S)[None, :]
    acc = tl.zeros((BT, L), tl.float32)
    for block in range(tl.cdiv(tl.cdiv(T, BT) - g, groups)):
        first = (g + block * groups) * BT
        acc += tl.load(dz + first.to(tl.int64) * L + at, mask=on & (tl.arange(0, BT) < T - first)[:, None], other=0.0)
    tl.store(dgate_part + g * L + c, tl.sum(acc, 0), mask=c < M + S)


@triton.jit
def add_scaled_rows(v, factor, rows, eye):
    """v + factor[:, None] * rows as products with a diagonal matrix in two bf16 pieces (rows are bf16): for Ascend, where v then stays in the
    matrix unit until it is stored, in place of a way to a vector core and back through global memory"""
    diagonal = tl.where(eye, factor[:, None], 0.0)
    high = diagonal.to(tl.bfloat16)
    v = dot(high, rows, v)
    return dot((diagonal - high.to(tl.float32)).to(tl.bfloat16), rows, v)


@triton.jit(do_not_specialize=["T"])
def dx_dfn_kernel(
    dx_in, dy, x, pre, dz, dp, pieces, crms, fn, dx, dfn_part, dgate_part, T,
    N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, S: tl.constexpr, L: tl.constexpr, CRMS: tl.constexpr,
    ADD: tl.constexpr, DY: tl.constexpr, MODE: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, GATE_BT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns BN columns of ONE stream, keeps their part of fn, and walks over every num_programs(1)-th block of tokens: x is read
    once for both products. (All streams in one program would let the caller skip storing dx_in, but needs too many registers.)
    dp comes finished from memory, in fp32 and in two bf16 pieces [2, T, L], so that it is loaded straight into the operands of the
    products: one array with two uses is not staged ahead, and converting it between them costs barriers. With gates (S > 0) the first
    column of programs sums dz instead.

    MODE "tf32": dp @ fn as one tf32 product (beats three bf16 ones), dp^T @ x with dp in two bf16 pieces, for bf16 streams on a GPU.
    MODE "bf16": three bf16 products instead of the tf32 one, and the other terms of dx as products too (`add_scaled_rows`).
    MODE "exact": everything in fp32.
    """
    g = tl.program_id(1)
    groups = tl.num_programs(1)
    pid = tl.program_id(0)
    if S > 0:
        pid -= 1
    if pid < 0:
        if S > 0:
            gate_sums(g, groups, dz, dgate_part, T, M, S, L, GATE_BT)
    else:
        blocks: tl.constexpr = (D + BN - 1) // BN
        K: tl.constexpr = N * D
        n = pid // blocks
        d = (pid % blocks) * BN + tl.arange(0, BN)
        md = d < D
        col = n * D + d
        c = tl.arange(0, L)
        w = tl.load(fn + c[:, None] * K + col[None, :], mask=(c < M)[:, None] & md[None, :], other=0.0)
        if MODE == "bf16":
            w_high = w.to(tl.bfloat16)
            w_low = (w - w_high.to(tl.float32)).to(tl.bfloat16)
        row = tl.arange(0, BT)
        # offsets within a block of tokens do not change: only scalars advance in the loop
        at = row[:, None] * K + col[None, :]
        at_y = row[:, None] * D + d[None, :]
        at_p = row[:, None] * L + c[None, :]
        at_t = row[None, :] * L + c[:, None]
        plane = T.to(tl.int64) * L
        acc = tl.zeros((L, BN), tl.float32)
        if MODE == "exact":
            acc += hidden_zero()
        elif MODE == "bf16":
            acc = zero_product(L, BN, 30)
        for tb in tl.range(g, tl.cdiv(T, BT), groups, num_stages=STAGES):
            first = tb * BT
            first64 = tl.cast(first, tl.int64)
            mt = row < T - first
            on = mt[:, None] & md[None, :]
            xt = tl.load(x + first64 * K + at, mask=on, other=0.0)
            if ADD:
                add = tl.load(dx_in + first64 * K + at, mask=on, other=0.0)
            if DY:
                yt = tl.load(dy + first64 * D + at_y, mask=on, other=0.0)
            on_p = mt[:, None] & (c < M)[None, :]
            if MODE == "exact":
                p = tl.load(dp + first64 * L + at_p, mask=on_p, other=0.0)
                acc = dot_exact(tl.trans(p), xt, acc)
                v = dot_exact(p, w, tl.zeros((BT, BN), tl.float32))
            elif MODE == "bf16":
                # as they lie in memory: the matrix unit transposes on its own, a vector core would do it through global memory
                high = tl.load(pieces + first64 * L + at_p, mask=on_p, other=0.0)
                low = tl.load(pieces + plane + first64 * L + at_p, mask=on_p, other=0.0)
                acc = dot(tl.trans(high), xt, acc)
                acc = dot(tl.trans(low), xt, acc)
                v = dot(high, w_high, tl.zeros((BT, BN), tl.float32))
                v = dot(low, w_high, v)
                v = dot(high, w_low, v)
            else:
                # loaded as [L, BT]: a transposition after the load would not be staged ahead
                high = tl.load(pieces + first64 * L + at_t, mask=mt[None, :] & (c < M)[:, None], other=0.0)
                low = tl.load(pieces + plane + first64 * L + at_t, mask=mt[None, :] & (c < M)[:, None], other=0.0)
                acc = dot(high, xt, acc)
                acc = dot(low, xt, acc)
                v = tl.dot(tl.load(dp + first64 * L + at_p, mask=on_p, other=0.0), w, input_precision="tf32")
            cr = tl.load(crms + first + row, mask=mt, other=0.0)
            if CRMS == 2:
                cr += tl.load(crms + T + first + row, mask=mt, other=0.0)
            if MODE == "bf16":
                eye = row[:, None] == row[None, :]
                v = add_scaled_rows(v, cr, xt, eye)
                if DY:
                    v = add_scaled_rows(v, tl.load(pre + first64 * N + n + row * N, mask=mt, other=0.0), yt, eye)
                if ADD:
                    v = dot(tl.where(eye, 1.0, 0.0).to(tl.bfloat16), add, v)
            else:
                v += cr[:, None] * xt.to(tl.float32)
                if DY:
                    v += tl.load(pre + first64 * N + n + row * N, mask=mt, other=0.0)[:, None] * yt.to(tl.float32)
                if ADD:
                    v += add.to(tl.float32)
            tl.store(dx + first64 * K + at, v.to(dx.dtype.element_ty), mask=on)
        tl.store(dfn_part + (g * M + c)[:, None].to(tl.int64) * K + col[None, :], acc, mask=(c < M)[:, None] & md[None, :])


@triton.jit
def reduce_tile(
    p, dfn_part, dgate_part, dfn, dbase, dscale, groups,
    K: tl.constexpr, M: tl.constexpr, S: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Second stage of the sums over tokens; tile M * cdiv(K, BK) adds up d(gate), those before it d(fn)."""
    blocks: tl.constexpr = (K + BK - 1) // BK
    if p < M * blocks:
        at = (p // blocks).to(tl.int64) * K + (p % blocks) * BK + tl.arange(0, BK)
        on = (p % blocks) * BK + tl.arange(0, BK) < K
        acc = tl.zeros((BK,), tl.float32)
        for g in range(groups):
            acc += tl.load(dfn_part + tl.cast(g, tl.int64) * M * K + at, mask=on, other=0.0)
        tl.store(dfn + at, acc, mask=on)
    elif S > 0:
        c = tl.arange(0, L)
        gate = tl.zeros((L,), tl.float32)
        for g in range(groups):
            gate += tl.load(dgate_part + g * L + c, mask=c < M + S, other=0.0)
        tl.store(dbase + c, gate, mask=c < M)
        for i in tl.static_range(S):
            tl.store(dscale + i, tl.sum(tl.where(c == M + i, gate, 0.0), 0))


@triton.jit(do_not_specialize=["groups"])
def reduce_kernel(
    dfn_part, dgate_part, dfn, dbase, dscale, groups,
    K: tl.constexpr, M: tl.constexpr, S: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    reduce_tile(tl.program_id(0), dfn_part, dgate_part, dfn, dbase, dscale, groups, K, M, S, L, BK)


def crms_rows(scales: int) -> int:
    """A site's crms comes from two kinds of programs, see mhc_ops/pre/bwd.py."""
    return 2 if scales == 3 else 1


def gate_width(m: int, scales: int) -> int:
    """L, the row length of dz and dp: M columns and one for every scale"""
    return padded(m + scales)


@cache
def dx_dfn_spec(dtype: torch.dtype, n: int, d: int, m: int, scales: int, add: bool, dy: bool, npu: bool = False) -> Spec:
    """scales: 3 at a site, 1 at the head, 0 with no gates; add: there is a dx_in; dy: the collapse is part of it."""
    stream = f"*{TRITON_DTYPE[dtype]}"
    types = {"dx_in": stream, "dy": stream, "x": stream, **dict.fromkeys(("pre", "dz", "dp"), "*fp32")}
    types |= {"pieces": "*bf16", "crms": "*fp32", "fn": "*fp32"}
    types |= {"dx": stream, "dfn_part": "*fp32", "dgate_part": "*fp32", "T": "i32"}
    width = gate_width(m, scales)
    mode = "exact" if dtype != torch.bfloat16 else "bf16" if npu else "tf32"
    block_tokens, block_columns = 32 if mode == "bf16" else 16, 64 if mode == "exact" else min(256, max(64, 8192 // width))
    consts = {
        "N": n, "D": d, "M": m, "S": scales, "L": width, "CRMS": crms_rows(scales), "ADD": add, "DY": dy, "MODE": mode,
        "BT": block_tokens, "BN": block_columns, "GATE_BT": 2048 // width,
        "STAGES": 2 if npu or mode == "exact" else 3,
    }  # fmt: skip
    options = {"multibuffer": False} if npu else {}  # cube and vector results meet in this kernel
    tokens = {"x": block_tokens * min(block_columns, d) / (n * d), "dz": consts["GATE_BT"]}
    minimal = ((2 + add) * n * d + dy * d) * dtype.itemsize + 4 * (m + consts["CRMS"] + (m + scales if scales else 0) + (n if dy else 0))
    return Spec(
        dx_dfn_kernel, types=types, consts=consts, hot=True, targets=("ascend",) if npu else ("cuda", "hip"), options=options,
        tokens=tokens, minimal_bytes=minimal,
    )  # fmt: skip


@cache
def reduce_spec(m: int, k: int, scales: int) -> Spec:
    types = {**dict.fromkeys(("dfn_part", "dgate_part", "dfn", "dbase", "dscale"), "*fp32"), "groups": "i32"}
    consts = {"K": k, "M": m, "S": scales, "L": gate_width(m, scales), "BK": REDUCE_BLOCK}
    return Spec(reduce_kernel, types=types, consts=consts, hot=True)


@cache
def dp_spec(m: int, k: int) -> Spec:
    types = {**dict.fromkeys(("dmixes", "mixes", "rstd", "dp"), "*fp32"), "pieces": "*bf16", "crms": "*fp32", "T": "i32"}
    consts = {"K": k, "M": m, "L": gate_width(m, 0), "BT": DP_TOKENS}
    return Spec(dp_kernel, types=types, consts=consts, num_warps=2, hot=True, tokens=DP_TOKENS, minimal_bytes=4 * (4 * m + 2))


def reduce_tiles(m: int, k: int, scales: int) -> int:
    return m * cdiv(k, REDUCE_BLOCK) + (scales > 0)


def token_groups(tokens: int, column_programs: int, block_tokens: int, programs: int) -> int:
    """How many programs share one block of columns: one full wave, not one more."""
    return max(1, min(programs // column_programs, cdiv(tokens, block_tokens)))


class DxPlan(NamedTuple):
    """How dx_dfn launches. dfn_part [groups, M, K], dgate_part [groups, L]: numbers of elements"""

    spec: Spec
    grid: tuple[int, int]
    groups: int
    dfn_part: int
    dgate_part: int


@lru_cache(PLANS)
def dx_plan(device: torch.device, dtype: torch.dtype, n: int, d: int, m: int, tokens: int, scales: int, add: bool, dy: bool) -> DxPlan:
    spec = dx_dfn_spec(dtype, n, d, m, scales, add, dy, device.type == "npu")
    columns = n * cdiv(d, spec.consts["BN"]) + (scales > 0)
    groups = token_groups(tokens, columns, spec.consts["BT"], 2 * parallelism(device))
    return DxPlan(spec, (columns, groups), groups, groups * m * n * d, groups * spec.consts["L"] if scales else 0)


def dx_dfn(
    plan: DxPlan, dx_in: torch.Tensor | None, dy: torch.Tensor | None, x: torch.Tensor, pre: Scratch | None, dz: Scratch | None,
    dp: Scratch, pieces: Scratch, crms: Scratch, fn: torch.Tensor, dx: Scratch, dfn_part: Scratch, dgate_part: Scratch, tokens: int,
) -> None:  # fmt: skip
    """Launches dx_dfn_kernel: dx, and dfn_part and dgate_part for the second stage. dx_in, dy and, without gates, pre and dz may be None."""
    plan.spec.launch(
        plan.grid, x if dx_in is None else dx_in, x if dy is None else dy, x, dp if pre is None else pre, dp if dz is None else dz, dp,
        pieces, crms, fn, dx, dfn_part, dgate_part, tokens,
    )  # fmt: skip


def dp_sizes(tokens: int, width: int) -> tuple[tuple[int, torch.dtype], tuple[int, torch.dtype]]:
    """Scratch for dp [T, L] fp32 and its pieces [2, T, L] bf16"""
    return (tokens * width, torch.float32), (2 * tokens * width, torch.bfloat16)


def reduce(
    dfn_part: Scratch, dgate_part: Scratch, groups: int, fn: torch.Tensor, scales: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Second stage. Returns dfn, dbase, dscale; the last two are dfn where there are no gates."""
    m, k = fn.shape
    dfn = torch.empty_like(fn)
    dbase = fn.new_empty(m) if scales else dfn
    dscale = fn.new_empty(scales) if scales else dfn
    reduce_spec(m, k, scales).launch((reduce_tiles(m, k, scales),), dfn_part, dgate_part, dfn, dbase, dscale, groups)
    return dfn, dbase, dscale


@lru_cache(PLANS)
def _plan(device: torch.device, dtype: torch.dtype, n: int, d: int, m: int, tokens: int) -> tuple[DxPlan, Layout]:
    plan = dx_plan(device, dtype, n, d, m, tokens, 0, False, False)
    return plan, Layout(*dp_sizes(tokens, gate_width(m, 0)), (tokens, torch.float32), (plan.dfn_part, torch.float32))


def project_bwd(
    dmixes: torch.Tensor, x: torch.Tensor, fn: torch.Tensor, mixes: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dmixes, x, fn = dmixes.contiguous(), x.contiguous(), fn.contiguous()
    m, k = fn.shape
    tokens = x.numel() // k
    dx = torch.empty_like(x)
    if not tokens:
        return dx, torch.zeros_like(fn)
    plan, layout = _plan(x.device, x.dtype, *x.shape[-2:], m, tokens)
    dp, pieces, crms, dfn_part = layout.allocate(x.device)
    dp_spec(m, k).launch((cdiv(tokens, DP_TOKENS),), dmixes, mixes, rstd, dp, pieces, crms, tokens)
    dx_dfn(plan, None, None, x, None, None, dp, pieces, crms, fn, dx, dfn_part, dfn_part, tokens)
    return dx, reduce(dfn_part, dfn_part, plan.groups, fn, 0)[0]


def specs(shape: ModelShape) -> Iterator[Spec]:
    """hc_project in both directions"""
    n, d = shape.hc_mult, shape.hidden
    m = mix_columns(n)
    yield from forward_specs(shape)
    yield dp_spec(m, n * d)
    for npu in (False, True):
        yield dx_dfn_spec(STREAM_DTYPE[shape.dtype], n, d, m, 0, False, False, npu)
    yield reduce_spec(m, n * d, 0)
