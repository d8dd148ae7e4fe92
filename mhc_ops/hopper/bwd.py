"""hc_post_pre backward for sm_90: three launches.

1. gates and dpre, as everywhere (mhc_ops/pre/bwd.py);
2. all that reads streams (bwd_kernel.py);
3. the second stage of its sums: d(fn) over groups of tokens, dpost and dcomb over blocks of columns, d(base) and d(scale).
Every sum has a fixed order: two runs are bit-equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import Spec
from kernel_runtime.workspace import Layout
from mhc_ops.hopper import STREAMS
from mhc_ops.hopper.bwd_kernel import CONSUMER_WARPS, boundary_bwd_kernel
from mhc_ops.library import mix_columns
from mhc_ops.pre.bwd import gates_dpre_spec
from mhc_ops.project.bwd import dp_sizes, gate_width
from mhc_ops.project.core import PLANS, cdiv, parallelism

BLOCK_COLUMNS = 64
SUM_BLOCK, FN_BLOCK = 64, 512
REGISTERS = 128  # a thread at launch; the warps exchange them then
M = mix_columns(STREAMS)
L = gate_width(M, 3)


@triton.jit
def sum_blocks(part, out, p, n, ROWS: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr):
    """Tile p of out [n] = sum over rows of part [ROWS, n]; POWER, of two, is at least ROWS"""
    at = p * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, POWER)
    values = tl.load(part + row.to(tl.int64)[:, None] * n + at[None, :], mask=(row < ROWS)[:, None] & (at < n)[None, :], other=0.0)
    tl.store(out + at, tl.sum(values, 0), mask=at < n)


@triton.jit
def sum_groups(part, out, p, n, groups, BLOCK: tl.constexpr):
    """As sum_blocks, for few rows whose number is known at run time: four at once"""
    at = p * BLOCK + tl.arange(0, BLOCK)
    four = tl.arange(0, 4)
    acc = tl.zeros((BLOCK,), tl.float32)
    for g in range(0, groups, 4):
        values = part + (g + four).to(tl.int64)[:, None] * n + at[None, :]
        acc += tl.sum(tl.load(values, mask=(g + four < groups)[:, None] & (at < n)[None, :], other=0.0), 0)
    tl.store(out + at, acc, mask=at < n)


@triton.jit(do_not_specialize=["T", "groups"])
def boundary_sums_kernel(
    dfn_part, dgate_part, dcomb_part, dpost_part, dfn, dbase, dscale, dcomb, dpost, T, groups,
    K: tl.constexpr, M: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr, FN_BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    combs = tl.cdiv(T * 16, BLOCK)
    posts = tl.cdiv(T * 4, BLOCK)
    fns: tl.constexpr = (M * K + FN_BLOCK - 1) // FN_BLOCK
    if pid < combs:
        sum_blocks(dcomb_part, dcomb, pid, T.to(tl.int64) * 16, ROWS, POWER, BLOCK)
    elif pid < combs + posts:
        sum_blocks(dpost_part, dpost, pid - combs, T.to(tl.int64) * 4, ROWS, POWER, BLOCK)
    elif pid < combs + posts + fns:
        sum_groups(dfn_part, dfn, pid - combs - posts, M * K, groups, FN_BLOCK)
    else:
        c = tl.arange(0, L)
        gate = tl.zeros((L,), tl.float32)
        for g in range(groups):
            gate += tl.load(dgate_part + g * L + c, mask=c < M + 3, other=0.0)
        tl.store(dbase + c, gate, mask=c < M)
        for i in tl.static_range(3):
            tl.store(dscale + i, tl.sum(tl.where(c == M + i, gate, 0.0), 0))


@cache
def boundary_bwd_spec(d: int) -> Spec:
    # APART by measurement: warps that drift apart take 3 % less at D = 4096, 1 % more at 2560, 5120 and 7168
    types = {**dict.fromkeys(("dstreams", "dy", "f", "x"), "*bf16"), **dict.fromkeys(("post", "comb", "pre", "dz"), "*fp32")}
    types |= {"pieces": "*bf16", "crms": "*fp32", "fn": "*fp32", "df": "*bf16", "dx": "*bf16"}
    types |= {**dict.fromkeys(("dfn_part", "dgate_part", "dcomb_part", "dpost_part"), "*fp32"), "T": "i32", "groups": "i32"}
    consts = {"D": d, "M": M, "L": L, "BN": BLOCK_COLUMNS, "APART": d % 4096 == 0}
    return Spec(
        boundary_bwd_kernel, types=types, consts=consts, num_warps=CONSUMER_WARPS.value, targets=("cuda",), options={"maxnreg": REGISTERS},
        arch=90,
    )  # fmt: skip


@cache
def boundary_sums_spec(d: int) -> Spec:
    names = ("dfn_part", "dgate_part", "dcomb_part", "dpost_part", "dfn", "dbase", "dscale", "dcomb", "dpost")
    rows = d // BLOCK_COLUMNS
    consts = {
        "K": STREAMS * d, "M": M, "L": L, "ROWS": rows, "POWER": triton.next_power_of_2(rows), "BLOCK": SUM_BLOCK, "FN_BLOCK": FN_BLOCK,
    }  # fmt: skip
    types = {**dict.fromkeys(names, "*fp32"), "T": "i32", "groups": "i32"}
    return Spec(boundary_sums_kernel, types=types, consts=consts, targets=("cuda",), arch=90)


def sum_programs(tokens: int, d: int) -> int:
    return cdiv(tokens * STREAMS * STREAMS, SUM_BLOCK) + cdiv(tokens * STREAMS, SUM_BLOCK) + cdiv(STREAMS * M * d, FN_BLOCK) + 1


class Plan(NamedTuple):
    """How the three launches start. scratch: dz, dp, its pieces, crms, pre, dfn_part, dgate_part, dcomb_part, dpost_part"""

    first: Spec
    first_grid: tuple[int]
    sites: int
    second: Spec
    second_grid: tuple[int]
    third: Spec
    third_grid: tuple[int]
    groups: int
    scratch: Layout


@lru_cache(PLANS)
def plan_of(device: torch.device, dtype: torch.dtype, d: int, tokens: int, iters: int, convention: str, has_dpre: bool, pre_mix: bool) -> Plan:
    first = gates_dpre_spec(dtype, STREAMS, d, M, iters, convention, has_dpre, pre_mix)
    sites = cdiv(tokens, first.consts["BT"])
    blocks, f32 = d // BLOCK_COLUMNS, torch.float32
    # one wave of two programs a multiprocessor, those that sum dz in it
    groups = max(1, min(2 * parallelism(device) // (blocks + 1), cdiv(tokens, 16)))
    part = STREAMS * M * d
    scratch = Layout(
        (tokens * L, f32), *dp_sizes(tokens, L), (2 * tokens, f32), (0 if pre_mix else tokens * STREAMS, f32), (groups * part, f32),
        (groups * L, f32), (blocks * tokens * STREAMS * STREAMS, f32), (blocks * tokens * STREAMS, f32),
    )  # fmt: skip
    return Plan(
        first, (sites + tokens,), sites, boundary_bwd_spec(d), ((blocks + 1) * groups,), boundary_sums_spec(d), (sum_programs(tokens, d),), groups,
        scratch,
    )  # fmt: skip


def boundary_bwd(
    dstreams: torch.Tensor, dy: torch.Tensor, dpre: torch.Tensor | None, dpost_out: torch.Tensor, dcomb_out: torch.Tensor, f: torch.Tensor,
    x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor,
    base: torch.Tensor, pre_mix: torch.Tensor | None, mixes: torch.Tensor, rstd: torch.Tensor, iters: int, hc_eps: float, convention: str,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The gradients of hc_post_pre for tensors as mhc_ops/boundary/bwd.py has prepared them; dstreams is given and tokens are not none."""
    d = x.shape[-1]
    tokens = rstd.numel()
    plan = plan_of(x.device, x.dtype, d, tokens, iters, convention, dpre is not None, pre_mix is not None)
    dz, dp, pieces, crms, pre, dfn_part, dgate_part, dcomb_part, dpost_part = plan.scratch.allocate(x.device)
    dpre_mix = None if pre_mix is None else torch.empty_like(pre_mix)
    pre = pre if pre_mix is None else pre_mix
    plan.first.launch(
        plan.first_grid, dy, streams, mixes if dpre is None else dpre, dpost_out, dcomb_out, mixes, rstd, scale, base, pre,
        pre if pre_mix is None else dpre_mix, dz, dp, pieces, crms, tokens, plan.sites, hc_eps,
    )  # fmt: skip
    df, dx, dpost, dcomb = torch.empty_like(f), torch.empty_like(x), torch.empty_like(post), torch.empty_like(comb)
    plan.second.launch(
        plan.second_grid, dstreams, dy, f, x, post, comb, pre, dz, pieces, crms, fn, df, dx, dfn_part, dgate_part, dcomb_part, dpost_part,
        tokens, plan.groups,
    )  # fmt: skip
    dfn, dscale, dbase = torch.empty_like(fn), torch.empty_like(scale), torch.empty_like(base)
    plan.third.launch(
        plan.third_grid, dfn_part, dgate_part, dcomb_part, dpost_part, dfn, dbase, dscale, dcomb, dpost, tokens, plan.groups
    )  # fmt: skip
    return df, dx, dpost, dcomb, dfn, dscale, dbase, dpre_mix


def specs(d: int) -> Iterator[Spec]:
    yield boundary_bwd_spec(d)
    yield boundary_sums_spec(d)
