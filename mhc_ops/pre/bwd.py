"""hc_pre backward: gates and dpre in one launch, then dx with the first stage of d(fn) and d(gate), then their second stage.

In the first launch some programs take the gradient of post and comb through the gates (the iterations run again, only row and column
sums are kept) while the others, one token each, contract dy with the streams to dpre and finish the columns of `pre` themselves, the
only ones that need it. dz, dp and crms as in mhc_ops/project/bwd.py; crms has a row from each kind of program, [2, T].
"""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from kernel_runtime.workspace import Layout, Scratch
from mhc_ops.gates.bwd import block_tokens
from mhc_ops.gates.core import comb_mask, gate_bwd, gate_pre, gates_block_bwd, load_block, token_mask
from mhc_ops.library import mix_columns
from mhc_ops.pre.fwd import forward_specs
from mhc_ops.project.bwd import DxPlan, crms_rows, dp_sizes, dx_dfn, dx_dfn_spec, dx_plan, gate_width, reduce, reduce_spec
from mhc_ops.project.core import PLANS, cdiv, row_grid, store_dp, stream_sums
from mhc_ops.project.fwd import STREAM_DTYPE
from mhc_ops.sinkhorn.core import history


@triton.jit
def site_bwd_program(
    p, mixes, rstd, scale, base, dpost, dcomb, dz, dp, pieces, crms, T, hc_eps,
    N: tl.constexpr, P: tl.constexpr, K: tl.constexpr, M: tl.constexpr, L: tl.constexpr,
    ITERS: tl.constexpr, H: tl.constexpr, PAPER: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The columns of post and comb of dz and dp for BT tokens, their two columns of dscale, and their share of crms (row 0)"""
    first = p * BT
    row = first.to(tl.int64)
    t = tl.arange(0, BT)
    i = tl.arange(0, P)
    live = first + t < T
    on = token_mask(live, N, P)
    _, m_post, m_comb = load_block(mixes + row * M, live, M, N, P, BT)
    none = tl.zeros((BT, P), tl.float32)  # the columns of pre are the other programs'
    g_post = tl.load(dpost + row * N + t[:, None] * N + i[None, :], mask=on, other=0.0)
    three = t[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
    g_comb = tl.load(dcomb + row * (N * N) + three, mask=comb_mask(live, N, P), other=0.0)
    _, z_post, z_comb = gates_block_bwd(none, m_post, m_comb, none, g_post, g_comb, live, scale, base, hc_eps, N, P, ITERS, H, PAPER, BT)
    out = dz + row * L + t * L
    tl.store(out[:, None] + N + i[None, :], z_post, mask=on)
    tl.store(out[:, None, None] + 2 * N + i[None, :, None] * N + i[None, None, :], z_comb, mask=comb_mask(live, N, P))
    post_sum = tl.sum(z_post * m_post, 1)
    comb_sum = tl.sum(tl.sum(z_comb * m_comb, 2), 1)
    tl.store(out + M + 1, post_sum, mask=live)
    tl.store(out + M + 2, comb_sum, mask=live)
    r = tl.load(rstd + row + t, mask=live, other=0.0)
    post_factor = r * tl.load(scale + 1)
    comb_factor = r * tl.load(scale + 2)
    plane = T.to(tl.int64) * L
    at = row * L + t * L
    store_dp(dp, pieces, plane, at[:, None] + N + i[None, :], z_post * post_factor[:, None], on)
    three = at[:, None, None] + 2 * N + i[None, :, None] * N + i[None, None, :]
    store_dp(dp, pieces, plane, three, z_comb * comb_factor[:, None, None], comb_mask(live, N, P))
    tl.store(crms + row + t, -(post_sum * post_factor + comb_sum * comb_factor) * r * (1.0 / K), mask=live)


@triton.jit
def token_bwd_program(
    t, dy, x, dpre, mixes, rstd, scale, base, pre, dpre_mix, dz, dp, pieces, plane, crms, hc_eps,
    N: tl.constexpr, P: tl.constexpr, D: tl.constexpr, M: tl.constexpr, L: tl.constexpr,
    PAPER: tl.constexpr, HAS_DPRE: tl.constexpr, PRE_MIX: tl.constexpr, R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, ASCEND: tl.constexpr,
):  # fmt: skip
    """d(pre)[n] = sum_d dy[d] * x[n, d] of one token, the columns of pre of dz and dp, their column of dscale, and their crms.

    With PRE_MIX the sums are the gradient of pre_mix instead.
    """
    t64 = t.to(tl.int64)
    total = stream_sums(dy, x, t64, x, x, N, P, D, R, W, STAGES, False, ASCEND)
    i = tl.arange(0, P)
    mi = i < N
    if PRE_MIX:
        tl.store(dpre_mix + t64 * N + i, total, mask=mi)
        total = tl.zeros((P,), tl.float32)
    if HAS_DPRE:
        total += tl.load(dpre + t64 * N + i, mask=mi, other=0.0)
    scale0 = tl.load(scale)
    a = tl.load(mixes + t64 * M + i, mask=mi, other=0.0)
    z = a * scale0 + tl.load(base + i, mask=mi, other=0.0)
    if not PRE_MIX:
        tl.store(pre + t64 * N + i, gate_pre(z, hc_eps, PAPER), mask=mi)
    h = gate_bwd(total, z)
    tl.store(dz + t64 * L + i, h, mask=mi)
    part = tl.sum(tl.where(mi, h * a, 0.0), 0)
    tl.store(dz + t64 * L + M, part)
    r = tl.load(rstd + t64)
    store_dp(dp, pieces, plane, t64 * L + i, h * (scale0 * r), mi)
    tl.store(crms + t64, -part * scale0 * r * r * (1.0 / (N * D)))


@triton.jit(do_not_specialize=["T", "site_programs", "hc_eps"])
def gates_dpre_kernel(
    dy, x, dpre, dpost, dcomb, mixes, rstd, scale, base, pre, dpre_mix, dz, dp, pieces, crms, T, site_programs, hc_eps,
    N: tl.constexpr, P: tl.constexpr, D: tl.constexpr, M: tl.constexpr, L: tl.constexpr, CRMS: tl.constexpr,
    ITERS: tl.constexpr, H: tl.constexpr, PAPER: tl.constexpr, HAS_DPRE: tl.constexpr, PRE_MIX: tl.constexpr,
    BT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """CRMS 2: a site, with its post and comb; 1: the head, which has `pre` alone (its own sigmoid always has the eps)"""
    pid = tl.program_id(0)
    own = crms + (CRMS - 1) * T.to(tl.int64)
    plane = T.to(tl.int64) * L
    if LOOP:
        if CRMS == 2:
            for step in range(tl.cdiv(site_programs - pid, tl.num_programs(0))):
                site_bwd_program(
                    pid + step * tl.num_programs(0), mixes, rstd, scale, base, dpost, dcomb, dz, dp, pieces, crms, T, hc_eps,
                    N, P, N * D, M, L, ITERS, H, PAPER, BT,
                )  # fmt: skip
        for step in range(tl.cdiv(T - pid, tl.num_programs(0))):
            token_bwd_program(
                pid + step * tl.num_programs(0), dy, x, dpre, mixes, rstd, scale, base, pre, dpre_mix, dz, dp, pieces, plane, own, hc_eps,
                N, P, D, M, L, PAPER, HAS_DPRE, PRE_MIX, R, W, STAGES, True,
            )  # fmt: skip
    elif pid < site_programs:
        if CRMS == 2:
            site_bwd_program(
                pid, mixes, rstd, scale, base, dpost, dcomb, dz, dp, pieces, crms, T, hc_eps, N, P, N * D, M, L, ITERS, H, PAPER, BT
            )  # fmt: skip
    else:
        token_bwd_program(
            pid - site_programs, dy, x, dpre, mixes, rstd, scale, base, pre, dpre_mix, dz, dp, pieces, plane, own, hc_eps,
            N, P, D, M, L, PAPER, HAS_DPRE, PRE_MIX, R, W, STAGES, False,
        )  # fmt: skip


@cache
def gates_dpre_spec(
    dtype: torch.dtype, n: int, d: int, m: int, iters: int, convention: str, has_dpre: bool, pre_mix: bool, npu: bool = False
) -> Spec:
    """m = mix_columns(n): a site; m = n: the head"""
    stream, scales = f"*{TRITON_DTYPE[dtype]}", 1 if m == n else 3
    types = {"dy": stream, "x": stream}
    names = ("dpre", "dpost", "dcomb", "mixes", "rstd", "scale", "base", "pre", "dpre_mix", "dz", "dp")
    types |= {**dict.fromkeys(names, "*fp32"), "pieces": "*bf16", "crms": "*fp32", "T": "i32", "site_programs": "i32", "hc_eps": "fp32"}
    consts = {
        "N": n, "P": triton.next_power_of_2(n), "D": d, "M": m, "L": gate_width(m, scales), "CRMS": crms_rows(scales),
        "ITERS": iters, "H": history(n, iters, convention, npu, alone=False), "PAPER": convention == "paper", "HAS_DPRE": has_dpre,
        "PRE_MIX": pre_mix, "BT": block_tokens(n, iters, convention, npu), "R": 128 if npu and n <= 4 else 32,
        "W": 8 if dtype != torch.float32 else 4, "STAGES": 1 if npu else 3, "LOOP": npu,
    }  # fmt: skip
    # the mixes and r, gradients of the coefficients; dz, dp and its pieces, crms, pre or its gradient; streams and dy
    minimal = 4 * (m + 1 + has_dpre * n + (n + n * n if m != n else 0) + (m + scales) + 2 * m + consts["CRMS"] + n)
    return Spec(
        gates_dpre_kernel, types=types, consts=consts, num_warps=1, hot=True, targets=("ascend",) if npu else ("cuda", "hip"),
        tokens={"x": 1, "mixes": consts["BT"]}, minimal_bytes=minimal + (n + 1) * d * dtype.itemsize,
    )  # fmt: skip


class SitePlan(NamedTuple):
    """How the two launches of site_bwd start. scratch: dz, dp, its pieces, crms, pre, dfn_part, dgate_part, and dx where it is no output"""

    spec: Spec
    grid: tuple[int, ...]
    sites: int
    dx: DxPlan
    scratch: Layout


@lru_cache(PLANS)
def site_plan(
    device: torch.device, dtype: torch.dtype, n: int, d: int, m: int, tokens: int, iters: int, convention: str,
    has_dpre: bool, pre_mix: bool, add: bool = False, scratch_dx: bool = False,
) -> SitePlan:  # fmt: skip
    """add: the gradient of the streams that comes from elsewhere is added to dx; scratch_dx: dx is scratch itself"""
    spec = gates_dpre_spec(dtype, n, d, m, iters, convention, has_dpre, pre_mix, device.type == "npu")
    rows, width, f32 = spec.consts["CRMS"], spec.consts["L"], torch.float32
    sites = cdiv(tokens, spec.consts["BT"]) if rows == 2 else 0
    dx = dx_plan(device, dtype, n, d, m, tokens, 1 if m == n else 3, add, True)
    parts = [(tokens * width, f32), *dp_sizes(tokens, width), (rows * tokens, f32), (0 if pre_mix else tokens * n, f32)]
    parts += [(dx.dfn_part, f32), (dx.dgate_part, f32), (tokens * n * d if scratch_dx else 0, dtype)]
    return SitePlan(spec, (row_grid(device, sites + tokens),), sites, dx, Layout(*parts))


def site_bwd(
    plan: SitePlan, scratch: Sequence[Scratch], dx_in: torch.Tensor | None, dy: torch.Tensor, dpre: torch.Tensor | None, dpost: torch.Tensor,
    dcomb: torch.Tensor, x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, pre_mix: torch.Tensor | None,
    mixes: torch.Tensor, rstd: torch.Tensor, hc_eps: float, dx: Scratch, tokens: int,
) -> tuple[Scratch, Scratch, torch.Tensor | None]:  # fmt: skip
    """Two launches: dx, and dfn_part and dgate_part, which are returned, for the second stage. Returns dpre_mix too, None without pre_mix."""
    dz, dp, pieces, crms, pre, dfn_part, dgate_part, _ = scratch
    dpre_mix = None if pre_mix is None else torch.empty_like(pre_mix)
    pre = pre if pre_mix is None else pre_mix
    plan.spec.launch(
        plan.grid, dy, x, mixes if dpre is None else dpre, dpost, dcomb, mixes, rstd, scale, base, pre, pre if pre_mix is None else dpre_mix,
        dz, dp, pieces, crms, tokens, plan.sites, hc_eps,
    )  # fmt: skip
    dx_dfn(plan.dx, dx_in, dy, x, pre, dz, dp, pieces, crms, fn, dx, dfn_part, dgate_part, tokens)
    return dfn_part, dgate_part, dpre_mix


def site_gradients(
    dy: torch.Tensor | None, dpre: torch.Tensor | None, dpost: torch.Tensor | None, dcomb: torch.Tensor | None, x: torch.Tensor,
    mixes: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of hc_pre's outputs as the kernels take them: contiguous, zeros for an output that nobody used (but for pre)"""
    *lead, n, d = x.shape
    dy = x.new_zeros((*lead, d)) if dy is None else dy.contiguous()
    dpre = None if dpre is None else dpre.contiguous()
    dpost = mixes.new_zeros((*lead, n)) if dpost is None else dpost.contiguous()
    dcomb = mixes.new_zeros((*lead, n, n)) if dcomb is None else dcomb.contiguous()
    return dy, dpre, dpost, dcomb


def no_tokens(
    x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, pre_mix: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """dx, dfn, dscale, dbase, dpre_mix where there is no token"""
    return (
        torch.empty_like(x), torch.zeros_like(fn), torch.zeros_like(scale), torch.zeros_like(base),
        None if pre_mix is None else torch.empty_like(pre_mix),
    )  # fmt: skip


def pre_bwd(
    dy: torch.Tensor | None, dpre: torch.Tensor | None, dpost: torch.Tensor | None, dcomb: torch.Tensor | None, x: torch.Tensor,
    fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, pre_mix: torch.Tensor | None, mixes: torch.Tensor, rstd: torch.Tensor,
    iters: int, hc_eps: float, _norm_eps: float, convention: str,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """dx, dfn, dscale, dbase, dpre_mix. _norm_eps is in rstd: the eager form alone, which projects again, needs it."""
    x, fn, scale, base = x.contiguous(), fn.contiguous(), scale.contiguous(), base.contiguous()
    pre_mix = None if pre_mix is None else pre_mix.contiguous()
    if not x.numel():
        return no_tokens(x, fn, scale, base, pre_mix)
    dy, dpre, dpost, dcomb = site_gradients(dy, dpre, dpost, dcomb, x, mixes)
    n, d = x.shape[-2:]
    m, k = fn.shape
    tokens = x.numel() // k
    plan = site_plan(x.device, x.dtype, n, d, m, tokens, iters, convention, dpre is not None, pre_mix is not None)
    dx = torch.empty_like(x)
    dfn_part, dgate_part, dpre_mix = site_bwd(
        plan, plan.scratch.allocate(x.device), None, dy, dpre, dpost, dcomb, x, fn, scale, base, pre_mix, mixes, rstd, hc_eps, dx, tokens
    )  # fmt: skip
    dfn, dbase, dscale = reduce(dfn_part, dgate_part, plan.dx.groups, fn, 3)
    return dx, dfn, dscale, dbase, dpre_mix


def site_bwd_specs(shape: ModelShape, add: bool) -> Iterator[Spec]:
    """What the backward of a site launches; add: with a gradient of x that came by another path"""
    n, d, dtype = shape.hc_mult, shape.hidden, STREAM_DTYPE[shape.dtype]
    m = mix_columns(n)
    for npu in (False, True):
        for single_pass in (False, True):
            yield gates_dpre_spec(dtype, n, d, m, shape.sinkhorn_iters, "v4", single_pass, single_pass, npu)
        yield dx_dfn_spec(dtype, n, d, m, 3, add, True, npu)


def specs(shape: ModelShape) -> Iterator[Spec]:
    """hc_pre in both directions"""
    n, d = shape.hc_mult, shape.hidden
    yield from forward_specs(shape)
    yield from site_bwd_specs(shape, False)
    yield reduce_spec(mix_columns(n), n * d, 3)
