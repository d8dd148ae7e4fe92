"""AdamW of one tensor in one pass, gradients divided on the way: 28 bytes a parameter in fp32. For adamw.py.

torch's fused kernel does the same arithmetic in fp64 and, where it divides, writes every gradient back (32 bytes). Here gradients are read alone, and
elements are computed in fp32; the bias corrections 1 - beta^step in fp64, where small steps would cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_runtime.launch import Spec

BLOCK = 1024
NUMBERS = ("lr", "decay", "beta1", "beta2", "rest1", "rest2", "log1", "log2", "eps")


@triton.jit
def updated(p, g, m, v, lr, decay, beta1, beta2, rest1, rest2, root2, eps):
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return p - decay * p - lr * m / (tl.sqrt(v) / root2 + eps), m, v


@triton.jit(do_not_specialize=["n"])
def adamw_kernel(
    param, grad, exp_avg, exp_avg_sq, step, divisor, n, lr, decay, beta1, beta2, rest1, rest2, log1, log2, eps, BLOCK: tl.constexpr
):
    """step: of this update, counted from 1. lr, decay = lr x weight decay, rest = 1 - beta, log = log2(beta)"""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    number, d = tl.load(step).to(tl.float64), tl.load(divisor)
    lr /= (1.0 - tl.exp2(number * log1)).to(tl.float32)
    root2 = tl.sqrt((1.0 - tl.exp2(number * log2)).to(tl.float32))
    if start + BLOCK <= n:  # without a mask, which would keep loads from being vectors
        p, m, v = updated(
            tl.load(param + i), tl.load(grad + i) / d, tl.load(exp_avg + i), tl.load(exp_avg_sq + i),
            lr, decay, beta1, beta2, rest1, rest2, root2, eps,
        )  # fmt: skip
        tl.store(param + i, p)
        tl.store(exp_avg + i, m)
        tl.store(exp_avg_sq + i, v)
    else:
        on = i < n
        p, m, v = updated(
            tl.load(param + i, mask=on, other=0.0), tl.load(grad + i, mask=on, other=0.0) / d,
            tl.load(exp_avg + i, mask=on, other=0.0), tl.load(exp_avg_sq + i, mask=on, other=0.0),
            lr, decay, beta1, beta2, rest1, rest2, root2, eps,
        )  # fmt: skip
        tl.store(param + i, p, mask=on)
        tl.store(exp_avg + i, m, mask=on)
        tl.store(exp_avg_sq + i, v, mask=on)


@cache
def adamw_spec() -> Spec:
    pointers = dict.fromkeys(("param", "grad", "exp_avg", "exp_avg_sq", "step", "divisor"), "*fp32")
    types = {**pointers, "n": "i32", **dict.fromkeys(NUMBERS, "fp32")}
    return Spec(adamw_kernel, types=types, consts={"BLOCK": BLOCK}, targets=("cuda",))


def adamw(
    group: dict[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    divisor: Tensor | None,
) -> None:
    """One step in place, as adamw.update describes it, but that gradients stay as they are. All are fp32 of one device and contiguous;
    steps and divisor have no dimension."""
    if not params:
        return
    torch._foreach_add_(steps, 1)
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    logs = (math.log2(beta) if beta > 0 else -math.inf for beta in (beta1, beta2))
    numbers = (lr, lr * group["weight_decay"], float(beta1), float(beta2), 1.0 - beta1, 1.0 - beta2, *logs, float(group["eps"]))
    if divisor is None:
        divisor = torch.ones((), device=params[0].device)
    spec = adamw_spec()
    for param, grad, *others in zip(params, grads, exp_avgs, exp_avg_sqs, steps):
        if grad.data_ptr() % 16 or not grad.is_contiguous():  # FSDP packs the gradients of a unit one behind the other
            grad = grad.clone(memory_format=torch.contiguous_format)
        if count := param.numel():
            spec.launch((triton.cdiv(count, BLOCK),), param, grad, *others, divisor, count, *numbers)
