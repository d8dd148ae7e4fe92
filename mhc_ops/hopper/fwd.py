"""hc_post_pre forward for sm_90: two launches.

1. the new streams and partial sums of their projection, with each stream read once (fwd_kernel.py); with pre_mix, which is known beforehand, y too;
2. gates and collapse, a token a program: there are D / 256 partial sums of a token, so they are read once and not for every 512 columns.
The second launch is put into the stream before the first has ended, and waits for it there. It takes the tokens from the last to the first, as the
streams of the last ones may still be in L2. With pre_mix it is the portable one, gates alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernel_runtime.launch import Spec
from kernel_runtime.workspace import Layout
from mhc_ops.gates.core import gate_pre
from mhc_ops.hopper import FORWARD_ALIGNED, STREAMS
from mhc_ops.hopper.fwd_kernel import CONSUMER_WARPS, TOKENS, WIDTH, expand_project_kernel
from mhc_ops.library import mix_columns
from mhc_ops.pre.core import site_program, token_mixes
from mhc_ops.pre.fwd import Gates, gates_collapse_spec, gates_plan, launch_gates
from mhc_ops.project.core import PLANS, cdiv, load_streams, parallelism, pick_weights, weighted_streams

M = mix_columns(STREAMS)
REGISTERS = 168  # a thread at launch; the warps exchange them then
BLOCK_D, LOADS_AHEAD = 512, 3  # of a step of the collapse


@triton.jit
def collapse_token(
    t, x, part, scale, base, y, pre, T, split, norm_eps, hc_eps,
    N: tl.constexpr, P: tl.constexpr, D: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SP: tl.constexpr, PAPER: tl.constexpr,
    BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, P)
    w, _ = token_mixes(t, part, T, split, norm_eps, N, P, N * D, M, C, SP)
    w = gate_pre(w * tl.load(scale) + tl.load(base + i, mask=i < N, other=0.0), hc_eps, PAPER)
    row = t.to(tl.int64)
    tl.store(pre + row * N + i, w, mask=i < N)
    w0, w1, w2, w3, w4, w5, w6, w7 = pick_weights(w, N, P)
    at = tl.arange(0, BD)
    for d in tl.range(0, D, BD, num_stages=STAGES):
        on = at < D - d
        x0, x1, x2, x3, x4, x5, x6, x7 = load_streams(x + row * (N * D) + d + at, on, N, D)
        v = weighted_streams(x0, x1, x2, x3, x4, x5, x6, x7, w0, w1, w2, w3, w4, w5, w6, w7, N)
        tl.store(y + row * D + d + at, v.to(y.dtype.element_ty), mask=on)


@triton.jit(do_not_specialize=["T", "site_programs", "split", "norm_eps", "hc_eps"])
def gates_collapse_tokens_kernel(
    x, part, scale, base, pre_mix, y, pre, post, comb, mixes, rstd, T, site_programs, split, norm_eps, hc_eps,
    N: tl.constexpr, P: tl.constexpr, D: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SP: tl.constexpr, ITERS: tl.constexpr,
    PAPER: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """gates_collapse_kernel (mhc_ops/pre/fwd.py) without pre_mix, for many partial sums"""
    gdc_wait()
    pid = tl.program_id(0)
    if pid < site_programs:
        site_program(
            pid, part, scale, base, mixes, rstd, pre, post, comb, T, split, norm_eps, hc_eps,
            N, P, N * D, M, C, ITERS, PAPER, False, BT,
        )  # fmt: skip
    else:
        collapse_token(
            T - 1 - (pid - site_programs), x, part, scale, base, y, pre, T, split, norm_eps, hc_eps,
            N, P, D, M, C, SP, PAPER, BD, STAGES,
        )  # fmt: skip


@cache
def expand_project_spec(d: int, pre_mix: bool) -> Spec:
    types = {**dict.fromkeys(("f", "x"), "*bf16"), **dict.fromkeys(("post", "comb", "pre_mix", "fn"), "*fp32")}
    types |= {"streams": "*bf16", "y": "*bf16", "part": "*fp32", "T": "i32", "groups": "i32"}
    return Spec(
        expand_project_kernel, types=types, consts={"D": d, "M": M, "COLLAPSE": pre_mix}, num_warps=CONSUMER_WARPS.value, targets=("cuda",),
        options={"maxnreg": REGISTERS}, arch=90,
    )  # fmt: skip


@cache
def gates_collapse_tokens_spec(d: int, iters: int, convention: str) -> Spec:
    portable = gates_collapse_spec(torch.bfloat16, STREAMS, d, iters, convention, False)
    consts = {name: portable.consts[name] for name in ("N", "P", "D", "M", "C")}
    consts |= {"SP": triton.next_power_of_2(d // FORWARD_ALIGNED)}
    consts |= {name: portable.consts[name] for name in ("ITERS", "PAPER", "BT")} | {"BD": BLOCK_D, "STAGES": LOADS_AHEAD}
    return Spec(
        gates_collapse_tokens_kernel, types=portable.types, consts=consts, num_warps=1, targets=("cuda",), options={"launch_pdl": True}, arch=90
    )


class Plan(NamedTuple):
    """How the two launches start. split: partial sums of a token; scratch: part [split, T, 32]"""

    first: Spec
    first_grid: tuple[int]
    groups: int
    gates: Gates
    split: int
    tokens: int
    scratch: Layout


@lru_cache(PLANS)
def plan_of(device: torch.device, shape: torch.Size, iters: int, convention: str, pre_mix: bool) -> Plan:
    """shape of the streams [..., N, D]"""
    d, tokens = shape[-1], math.prod(shape[:-2])
    split = d // FORWARD_ALIGNED
    groups = max(1, min(parallelism(device) // split, cdiv(tokens, TOKENS.value)))  # one wave of a program a multiprocessor
    gates = gates_plan(device, torch.bfloat16, shape, iters, convention, pre_mix, not pre_mix)
    if not pre_mix:
        gates = gates._replace(spec=gates_collapse_tokens_spec(d, iters, convention), grid=(gates.sites + tokens,))
    scratch = Layout((split * tokens * WIDTH.value, torch.float32))
    return Plan(expand_project_spec(d, pre_mix), (split * groups,), groups, gates, split, tokens, scratch)


def boundary_fwd(
    f: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    pre_mix: torch.Tensor | None, iters: int, hc_eps: float, norm_eps: float, convention: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The results of post_pre_fwd (mhc_ops/boundary/fwd.py) for contiguous tensors; tokens are not none."""
    plan = plan_of(x.device, x.shape, iters, convention, pre_mix is not None)
    (part,) = plan.scratch.allocate(x.device)
    streams, y = torch.empty_like(x), torch.empty_like(f)
    weights = post if pre_mix is None else pre_mix  # not looked at in the first case
    plan.first.launch(plan.first_grid, f, x, post, comb, weights, fn, streams, y, part, plan.tokens, plan.groups)
    return streams, y, *launch_gates(plan.gates, streams, part, plan.split, plan.tokens, scale, base, pre_mix, y, hc_eps, norm_eps)


def specs(d: int, iters: int) -> Iterator[Spec]:
    for pre_mix in (False, True):
        yield expand_project_spec(d, pre_mix)
    yield gates_collapse_tokens_spec(d, iters, "v4")
