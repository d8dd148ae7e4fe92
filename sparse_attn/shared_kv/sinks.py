"""Gradient of the sinks, from the log-sum-exp and delta = sum over D of dO * out, for every form of the backward."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import Spec

TILE = 4096  # numbers of lse that a program reads: what the unified buffer of an Ascend core holds a few of


@triton.jit
def sink_share(block, sinks, lse, delta, rows, N: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr):
    """What queries block * BM to (block + 1) * BM - 1 add to -sum exp(sink - LSE) * delta, [NP]; an infinite sink is a constant."""
    r = block * BM + tl.arange(0, BM)
    h = tl.arange(0, NP)
    offset = r[:, None] * N + h[None, :]
    sink = tl.load(sinks + h, mask=h < N, other=float("inf"))
    finite = (sink > float("-inf")) & (sink < float("inf"))
    on = (r < rows)[:, None] & finite[None, :]
    share = tl.exp(tl.where(finite, sink, 0.0)[None, :] - tl.load(lse + offset, mask=on, other=float("inf")))
    return -tl.sum(share * tl.load(delta + offset, mask=on, other=0.0), 0)


@triton.jit(do_not_specialize=["rows"])
def sink_gradient_kernel(sinks, lse, delta, part, rows, N: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr):
    """part [programs, N]: a share of BM queries each."""
    h = tl.arange(0, NP)
    share = sink_share(tl.program_id(0).to(tl.int64), sinks, lse, delta, rows, N, NP, BM)
    tl.store(part + tl.program_id(0) * N + h, share, mask=h < N)


@cache
def sink_gradient_spec(N: int) -> Spec:
    types = {"sinks": "*fp32", "lse": "*fp32", "delta": "*fp32", "part": "*fp32", "rows": "i32"}
    NP = triton.next_power_of_2(N)
    return Spec(sink_gradient_kernel, types=types, consts={"N": N, "NP": NP, "BM": min(64, TILE // NP)})


def sink_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """[N] fp32 from lse and delta [..., N]; two steps in a fixed order."""
    N = sinks.shape[0]
    rows = lse.numel() // N
    spec = sink_gradient_spec(N)
    part = torch.empty((triton.cdiv(rows, spec.consts["BM"]), N), dtype=torch.float32, device=lse.device)
    spec.launch((part.shape[0],), sinks.contiguous(), lse, delta, part, rows)
    return part.sum(0)
