"""hc_pre forward: split of fn, projection, then gates and collapse in one launch.

In the last launch the first programs compute the coefficients (site_program) while the others rebuild `pre` from the partial sums and
collapse the streams: the latency of the iterations hides behind the streams, and nobody waits for anybody. The programs that collapse
also store `pre`, so that the saved coefficient is bit for bit the one that made y.
"""

import math
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from kernel_runtime.workspace import Scratch
from mhc_ops.gates.core import gate_pre
from mhc_ops.library import mix_columns
from mhc_ops.pre.core import collapse_with, site_program, token_mixes
from mhc_ops.project.core import PLANS, cdiv, row_grid
from mhc_ops.project.fwd import STREAM_DTYPE, few_pieces, max_split, part_width, partial_specs, project_partials, project_plan
from mhc_ops.sinkhorn.core import tokens_last

BLOCK_TOKENS = 8
BLOCK_D = 512


@triton.jit
def _collapse_program(
    p, x, part, scale, base, pre_mix, y, pre, T, split, norm_eps, hc_eps,
    N: tl.constexpr, P: tl.constexpr, D: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SP: tl.constexpr,
    PAPER: tl.constexpr, PRE_MIX: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (D + BD - 1) // BD
    t = p // blocks
    i = tl.arange(0, P)
    if PRE_MIX:
        w = tl.load(pre_mix + t.to(tl.int64) * N + i, mask=i < N, other=0.0)
    else:
        w, _ = token_mixes(t, part, T, split, norm_eps, N, P, N * D, M, C, SP)
        w = gate_pre(w * tl.load(scale) + tl.load(base + i, mask=i < N, other=0.0), hc_eps, PAPER)
        tl.store(pre + t.to(tl.int64) * N + i, w, mask=(i < N) & (p % blocks == 0))
    collapse_with(x, y, w, t, (p % blocks) * BD + tl.arange(0, BD), N, P, D)


@triton.jit(do_not_specialize=["T", "site_programs", "split", "norm_eps", "hc_eps"])
def gates_collapse_kernel(
    x, part, scale, base, pre_mix, y, pre, post, comb, mixes, rstd, T, site_programs, split, norm_eps, hc_eps,
    N: tl.constexpr, P: tl.constexpr, D: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SP: tl.constexpr,
    ITERS: tl.constexpr, PAPER: tl.constexpr, PRE_MIX: tl.constexpr, COLLAPSE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    if LOOP:
        for step in range(tl.cdiv(site_programs - pid, tl.num_programs(0))):
            site_program(
                pid + step * tl.num_programs(0), part, scale, base, mixes, rstd, pre, post, comb, T, split, norm_eps, hc_eps,
                N, P, N * D, M, C, ITERS, PAPER, PRE_MIX, BT,
            )  # fmt: skip
        if COLLAPSE:
            for step in range(tl.cdiv(T * blocks - pid, tl.num_programs(0))):
                _collapse_program(
                    pid + step * tl.num_programs(0), x, part, scale, base, pre_mix, y, pre, T, split, norm_eps, hc_eps,
                    N, P, D, M, C, SP, PAPER, PRE_MIX, BD,
                )  # fmt: skip
    elif pid < site_programs:
        site_program(
            pid, part, scale, base, mixes, rstd, pre, post, comb, T, split, norm_eps, hc_eps,
            N, P, N * D, M, C, ITERS, PAPER, PRE_MIX, BT,
        )  # fmt: skip
    elif COLLAPSE:
        _collapse_program(
            pid - site_programs, x, part, scale, base, pre_mix, y, pre, T, split, norm_eps, hc_eps,
            N, P, D, M, C, SP, PAPER, PRE_MIX, BD,
        )  # fmt: skip


@cache
def gates_collapse_spec(
    dtype: torch.dtype, n: int, d: int, iters: int, convention: str, pre_mix: bool, collapse: bool = True, npu: bool = False
) -> Spec:
    """collapse=False leaves y alone (the caller has made it): gates only."""
    stream, m = f"*{TRITON_DTYPE[dtype]}", mix_columns(n)
    types = {"x": stream, **dict.fromkeys(("part", "scale", "base", "pre_mix"), "*fp32"), "y": stream}
    types |= dict.fromkeys(("pre", "post", "comb", "mixes", "rstd"), "*fp32")
    types |= {"T": "i32", "site_programs": "i32", "split": "i32", "norm_eps": "fp32", "hc_eps": "fp32"}
    block_tokens = tokens_last(n, iters, convention, npu) or BLOCK_TOKENS
    consts = {
        "N": n, "P": triton.next_power_of_2(n), "D": d, "M": m, "C": part_width(m), "SP": max_split(n * d), "ITERS": iters,
        "PAPER": convention == "paper", "PRE_MIX": pre_mix, "COLLAPSE": collapse, "BT": block_tokens, "BD": BLOCK_D, "LOOP": npu,
    }  # fmt: skip
    # a row of part; pre, post, comb, the mixes and r; streams and y, and the weights where they come from outside
    minimal = 4 * ((m + 1) + (2 * n + n * n + m + 1)) + ((n + 1) * d * dtype.itemsize + 4 * n * pre_mix if collapse else 0)
    tokens = {"x": min(BLOCK_D, d) / d, "mixes": block_tokens, "part": block_tokens / few_pieces(n * d)}
    return Spec(
        gates_collapse_kernel, types=types, consts=consts, num_warps=1, hot=True, targets=("ascend",) if npu else ("cuda", "hip"),
        tokens=tokens, minimal_bytes=minimal,
    )  # fmt: skip


class Gates(NamedTuple):
    """How gates_collapse launches, and the shapes of pre (as of post), comb, mixes and rstd"""

    spec: Spec
    grid: tuple[int, ...]
    sites: int
    pre: torch.Size
    comb: torch.Size
    mixes: torch.Size
    rstd: torch.Size


@lru_cache(PLANS)
def gates_plan(device: torch.device, dtype: torch.dtype, shape: torch.Size, iters: int, convention: str, pre_mix: bool, collapse: bool) -> Gates:
    """shape of the streams [..., N, D]"""
    *lead, n, d = shape
    spec = gates_collapse_spec(dtype, n, d, iters, convention, pre_mix, collapse, device.type == "npu")
    tokens = math.prod(lead)
    sites = cdiv(tokens, spec.consts["BT"])
    programs = sites + (tokens * cdiv(d, BLOCK_D) if collapse else 0)
    sizes = (torch.Size((*lead, *tail)) for tail in ((n,), (n, n), (mix_columns(n),), ()))
    return Gates(spec, (row_grid(device, programs),), sites, *sizes)


def gates_collapse(
    x: torch.Tensor, part: Scratch, split: int, tokens: int, scale: torch.Tensor, base: torch.Tensor, pre_mix: torch.Tensor | None,
    y: torch.Tensor, iters: int, hc_eps: float, norm_eps: float, convention: str, *, collapse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launches the gates and, by default, the collapse into y. Returns pre, post, comb, mixes, rstd."""
    plan = gates_plan(x.device, x.dtype, x.shape, iters, convention, pre_mix is not None, collapse)
    return launch_gates(plan, x, part, split, tokens, scale, base, pre_mix, y, hc_eps, norm_eps)


def launch_gates(
    plan: Gates, x: torch.Tensor, part: Scratch, split: int, tokens: int, scale: torch.Tensor, base: torch.Tensor,
    pre_mix: torch.Tensor | None, y: torch.Tensor, hc_eps: float, norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    new = base.new_empty  # fp32 on the device
    pre, post, comb, mixes, rstd = new(plan.pre), new(plan.pre), new(plan.comb), new(plan.mixes), new(plan.rstd)
    if tokens:
        plan.spec.launch(
            plan.grid, x, part, scale, base, base if pre_mix is None else pre_mix, y, pre, post, comb, mixes, rstd, tokens, plan.sites,
            split, norm_eps, hc_eps,
        )  # fmt: skip
    return pre, post, comb, mixes, rstd


def pre_fwd(
    x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, pre_mix: torch.Tensor | None, iters: int, hc_eps: float,
    norm_eps: float, convention: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """y, pre, post, comb, mixes, rstd"""
    x, fn, scale, base = x.contiguous(), fn.contiguous(), scale.contiguous(), base.contiguous()
    pre_mix = None if pre_mix is None else pre_mix.contiguous()
    y = x.new_empty((*x.shape[:-2], x.shape[-1]))
    m, k = fn.shape
    part: Scratch
    tokens, part, split = x.numel() // k, base, 0
    if tokens:
        plan = project_plan(x.device, x.dtype, m, k, tokens)
        part, pieces = plan.scratch.allocate(x.device)
        project_partials(plan, x, fn, part, pieces, tokens)
        split = plan.split
    return y, *gates_collapse(x, part, split, tokens, scale, base, pre_mix, y, iters, hc_eps, norm_eps, convention)


def forward_specs(shape: ModelShape) -> Iterator[Spec]:
    n, d, dtype = shape.hc_mult, shape.hidden, STREAM_DTYPE[shape.dtype]
    yield from partial_specs(dtype, mix_columns(n), n * d)
    for pre_mix in (False, True):
        for npu in (False, True):
            yield gates_collapse_spec(dtype, n, d, shape.sinkhorn_iters, "v4", pre_mix, npu=npu)
