"""Backward of the projection, with what the collapse adds to dx, since both read the streams: kernels, specialisations, launchers.

    dx[n] = dx_in[n] + pre[n] * dy + sum_c dp[c] * fn[c, n] + crms * x[n]         dfn[c] = sum_t dp[t, c] * x[t]
    dp[c] = dz[c] * scale[group of c] * rstd,  crms = -rstd^2 / K * sum_c d(mixes)[c] * mixes[c]   (the way through rstd)

dz [T, L] fp32 holds the gradient of the logits of the gates in its first M columns and, for S scales, what sums over tokens to dscale in
columns M..M+S-1, so that one sum over tokens gives dbase and dscale. S = 0: no gates behind the projection, dz is d(mixes).
Sums over tokens have two stages in a fixed order, no atomics: two runs are bit-equal.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.kernels import dot
from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from mhc_ops.library import mix_columns
from mhc_ops.project.core import dot_exact, padded, parallelism
from mhc_ops.project.fwd import STREAM_DTYPE, forward_specs

REDUCE_BLOCK = 1024
CRMS_TOKENS = 32


@triton.jit(do_not_specialize=["T"])
def crms_kernel(dmixes, mixes, rstd, crms, T, K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BT: tl.constexpr):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.arange(0, C)
    on = (t < T)[:, None] & (c < M)[None, :]
    at = t.to(tl.int64)[:, None] * M + c[None, :]
    total = tl.sum(tl.load(dmixes + at, mask=on, other=0.0) * tl.load(mixes + at, mask=on, other=0.0), 1)
    r = tl.load(rstd + t, mask=t < T, other=0.0)
    tl.store(crms + t, -total * r * r * (1.0 / K), mask=t < T)


@triton.jit(do_not_specialize=["T"])
def dx_dfn_kernel(
    dx_in, dy, x, pre, dz, crms, rstd, scale, fn, dx, dfn_part, dgate_part, T,
    N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, S: tl.constexpr, L: tl.constexpr, C: tl.constexpr, CRMS: tl.constexpr,
    ADD: tl.constexpr, DY: tl.constexpr, MODE: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns BN columns of ONE stream, keeps their part of fn, and walks over every num_programs(1)-th block of tokens: x is read
    once for both products. (All streams in one program would let the caller skip storing dx_in, but needs too many registers.)

    MODE "tf32": dp @ fn as one tf32 product (beats three bf16 ones), dp^T @ x with dp in two bf16 pieces, for bf16 streams on a GPU.
    MODE "bf16": three bf16 products instead of the tf32 one.  MODE "exact": everything in fp32.
    """
    g = tl.program_id(1)
    blocks: tl.constexpr = (D + BN - 1) // BN
    K: tl.constexpr = N * D
    n = tl.program_id(0) // blocks
    d = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    md = d < D
    col = n * D + d
    c = tl.arange(0, C)
    w = tl.load(fn + c[:, None] * K + col[None, :], mask=(c < M)[:, None] & md[None, :], other=0.0)
    if MODE == "bf16":
        w_high = w.to(tl.bfloat16)
        w_low = (w - w_high.to(tl.float32)).to(tl.bfloat16)
    if S == 3:
        factor = tl.where(c < N, tl.load(scale), tl.where(c < 2 * N, tl.load(scale + 1), tl.load(scale + 2)))
        factor = tl.where(c < M, factor, 0.0)
    elif S == 1:
        factor = tl.where(c < M, tl.load(scale), 0.0)
    acc = tl.zeros((C, BN), tl.float32)
    gate = tl.zeros((BT, C), tl.float32)
    for tb in tl.range(g, tl.cdiv(T, BT), tl.num_programs(1), num_stages=STAGES):
        t = tb * BT + tl.arange(0, BT)
        mt = t < T
        on = mt[:, None] & md[None, :]
        at = t.to(tl.int64)[:, None] * K + col[None, :]
        xt = tl.load(x + at, mask=on, other=0.0)
        if ADD:
            add = tl.load(dx_in + at, mask=on, other=0.0)
        if DY:
            yt = tl.load(dy + t.to(tl.int64)[:, None] * D + d[None, :], mask=on, other=0.0)
        zt = tl.load(dz + t.to(tl.int64)[:, None] * L + c[None, :], mask=mt[:, None] & (c < M + S)[None, :], other=0.0)
        r = tl.load(rstd + t, mask=mt, other=0.0)
        if S > 0:
            gate += zt
            p = zt * (factor[None, :] * r[:, None])
        else:
            p = zt * r[:, None]
        if MODE == "exact":
            acc = dot_exact(tl.trans(p), xt, acc)
            v = dot_exact(p, w, tl.zeros((BT, BN), tl.float32))
        else:
            high = p.to(tl.bfloat16)
            low = (p - high.to(tl.float32)).to(tl.bfloat16)
            acc = dot(tl.trans(high), xt, acc)
            acc = dot(tl.trans(low), xt, acc)
            if MODE == "tf32":
                v = tl.dot(p, w, input_precision="tf32")
            else:
                v = dot(high, w_high, tl.zeros((BT, BN), tl.float32))
                v = dot(low, w_high, v)
                v = dot(high, w_low, v)
        cr = tl.load(crms + t, mask=mt, other=0.0)
        if CRMS == 2:
            cr += tl.load(crms + T + t, mask=mt, other=0.0)
        v += cr[:, None] * xt.to(tl.float32)
        if DY:
            v += tl.load(pre + t.to(tl.int64) * N + n, mask=mt, other=0.0)[:, None] * yt.to(tl.float32)
        if ADD:
            v += add.to(tl.float32)
        tl.store(dx + at, v.to(dx.dtype.element_ty), mask=on)
    tl.store(dfn_part + (g * M + c)[:, None].to(tl.int64) * K + col[None, :], acc, mask=(c < M)[:, None] & md[None, :])
    if S > 0:
        tl.store(dgate_part + g * C + c, tl.sum(gate, 0), mask=(c < M + S) & (tl.program_id(0) == 0))


@triton.jit
def reduce_tile(
    p, dfn_part, dgate_part, dfn, dbase, dscale, groups,
    K: tl.constexpr, M: tl.constexpr, S: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
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
        c = tl.arange(0, C)
        gate = tl.zeros((C,), tl.float32)
        for g in range(groups):
            gate += tl.load(dgate_part + g * C + c, mask=c < M + S, other=0.0)
        tl.store(dbase + c, gate, mask=c < M)
        for i in tl.static_range(S):
            tl.store(dscale + i, tl.sum(tl.where(c == M + i, gate, 0.0), 0))


@triton.jit(do_not_specialize=["groups"])
def reduce_kernel(
    dfn_part, dgate_part, dfn, dbase, dscale, groups,
    K: tl.constexpr, M: tl.constexpr, S: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    reduce_tile(tl.program_id(0), dfn_part, dgate_part, dfn, dbase, dscale, groups, K, M, S, C, BK)


def gate_width(m: int, scales: int) -> int:
    """C of the backward: M columns of dz and one for every scale"""
    return padded(m + scales)


@cache
def dx_dfn_spec(dtype: torch.dtype, n: int, d: int, m: int, scales: int, width: int, crms: int, add: bool, dy: bool, npu: bool = False) -> Spec:
    """width: L, the row length of dz; crms: rows of crms to add up; add: there is a dx_in; dy: the collapse is part of it."""
    stream = f"*{TRITON_DTYPE[dtype]}"
    types = {"dx_in": stream, "dy": stream, "x": stream, **dict.fromkeys(("pre", "dz", "crms", "rstd", "scale", "fn"), "*fp32")}
    types |= {"dx": stream, "dfn_part": "*fp32", "dgate_part": "*fp32", "T": "i32"}
    c = gate_width(m, scales)
    mode = "exact" if dtype != torch.bfloat16 else "bf16" if npu else "tf32"
    block_n = 64 if npu or mode == "exact" or c > 64 else 128
    consts = {
        "N": n, "D": d, "M": m, "S": scales, "L": width, "C": c, "CRMS": crms, "ADD": add, "DY": dy, "MODE": mode,
        "BT": 16, "BN": block_n, "STAGES": 2 if npu or mode == "exact" else 3,
    }  # fmt: skip
    options = {"multibuffer": False} if npu else {}  # cube and vector results meet in this kernel
    return Spec(dx_dfn_kernel, types=types, consts=consts, hot=True, targets=("ascend",) if npu else ("cuda", "hip"), options=options)


@cache
def reduce_spec(m: int, k: int, scales: int) -> Spec:
    types = {**dict.fromkeys(("dfn_part", "dgate_part", "dfn", "dbase", "dscale"), "*fp32"), "groups": "i32"}
    consts = {"K": k, "M": m, "S": scales, "C": gate_width(m, scales), "BK": REDUCE_BLOCK}
    return Spec(reduce_kernel, types=types, consts=consts, hot=True)


@cache
def crms_spec(m: int, k: int) -> Spec:
    types = {**dict.fromkeys(("dmixes", "mixes", "rstd", "crms"), "*fp32"), "T": "i32"}
    return Spec(crms_kernel, types=types, consts={"K": k, "M": m, "C": padded(m), "BT": CRMS_TOKENS}, num_warps=2, hot=True)


def reduce_tiles(m: int, k: int, scales: int) -> int:
    return m * triton.cdiv(k, REDUCE_BLOCK) + (scales > 0)


@cache
def token_groups(tokens: int, column_programs: int, block_tokens: int, programs: int) -> int:
    """How many programs share one block of columns: one full wave, not one more."""
    return max(1, min(programs // column_programs, triton.cdiv(tokens, block_tokens)))


def dx_dfn(dx_in, dy, x, pre, dz, crms, rstd, scale, fn, scales):
    """Launches dx_dfn_kernel. Returns dx, dfn_part [groups, M, K] and dgate_part [groups, C] for the second stage. dx_in, dy may be None."""
    n, d = x.shape[-2:]
    m, k = fn.shape
    tokens = x.numel() // k
    spec = dx_dfn_spec(x.dtype, n, d, m, scales, dz.shape[-1], crms.shape[0], dx_in is not None, dy is not None, x.device.type == "npu")
    block_n, block_t, c = spec.consts["BN"], spec.consts["BT"], spec.consts["C"]
    columns = n * triton.cdiv(d, block_n)
    groups = token_groups(tokens, columns, block_t, 3 * parallelism(x.device))
    dx = torch.empty_like(x)
    dfn_part = torch.empty((groups, m, k), dtype=torch.float32, device=x.device)
    dgate_part = torch.empty((groups, c), dtype=torch.float32, device=x.device) if scales else dfn_part
    spec.launch(
        (columns, groups), x if dx_in is None else dx_in, x if dy is None else dy, x, rstd if pre is None else pre, dz, crms, rstd,
        rstd if scale is None else scale, fn, dx, dfn_part, dgate_part, tokens,
    )  # fmt: skip
    return dx, dfn_part, dgate_part


def reduce(dfn_part, dgate_part, fn, scales):
    """Second stage. Returns dfn, dbase, dscale; the last two are dfn where there are no gates."""
    m, k = fn.shape
    dfn = torch.empty_like(fn)
    dbase = torch.empty(m, dtype=torch.float32, device=fn.device) if scales else dfn
    dscale = torch.empty(scales, dtype=torch.float32, device=fn.device) if scales else dfn
    reduce_spec(m, k, scales).launch((reduce_tiles(m, k, scales),), dfn_part, dgate_part, dfn, dbase, dscale, dfn_part.shape[0])
    return dfn, dbase, dscale


def project_bwd(
    dmixes: torch.Tensor, x: torch.Tensor, fn: torch.Tensor, mixes: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dmixes, x, fn = dmixes.contiguous(), x.contiguous(), fn.contiguous()
    m, k = fn.shape
    tokens = x.numel() // k
    if not tokens:
        return torch.empty_like(x), torch.zeros_like(fn)
    crms = torch.empty((1, tokens), dtype=torch.float32, device=x.device)
    crms_spec(m, k).launch((triton.cdiv(tokens, CRMS_TOKENS),), dmixes, mixes, rstd, crms, tokens)
    dx, dfn_part, dgate_part = dx_dfn(None, None, x, None, dmixes, crms, rstd, None, fn, 0)
    return dx, reduce(dfn_part, dgate_part, fn, 0)[0]


def specs(shape: ModelShape) -> Iterator[Spec]:
    """hc_project in both directions"""
    n, d = shape.hc_mult, shape.hidden
    m = mix_columns(n)
    yield from forward_specs(shape)
    yield crms_spec(m, n * d)
    for npu in (False, True):
        yield dx_dfn_spec(STREAM_DTYPE[shape.dtype], n, d, m, 0, m, 1, False, False, npu)
    yield reduce_spec(m, n * d, 0)
