"""Sinkhorn forward: kernel, table of specialisations, launcher."""

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.device import on_npu
from kernel_runtime.launch import TRITON_DTYPE, Spec
from mhc_ops.project.core import cdiv
from mhc_ops.sinkhorn.core import sinkhorn_block, tokens_last

# [8, 4, 4] on one warp: every iteration stays in a thread or is a shuffle (9 us for 4096 tokens on an H200; 23 us as [32, 4, 4] on 4 warps)
BLOCK_TOKENS = 8


@triton.jit(do_not_specialize=["T", "eps"])
def sinkhorn_fwd_kernel(logits, comb, T, eps, N: tl.constexpr, P: tl.constexpr, ITERS: tl.constexpr, PAPER: tl.constexpr, BT: tl.constexpr):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    i = tl.arange(0, P)
    on = (t < T)[:, None, None] & (i < N)[None, :, None] & (i < N)[None, None, :]
    offset = t.to(tl.int64)[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
    z = tl.load(logits + offset, mask=on, other=0.0).to(tl.float32)
    tl.store(comb + offset, sinkhorn_block(z, on, eps, ITERS, PAPER), mask=on)


@cache
def forward_spec(dtype: torch.dtype, n: int, iters: int, convention: str, npu: bool = False) -> Spec:
    block_tokens = tokens_last(n, iters, convention, npu) or BLOCK_TOKENS
    return Spec(
        sinkhorn_fwd_kernel,
        types={"logits": f"*{TRITON_DTYPE[dtype]}", "comb": "*fp32", "T": "i32", "eps": "fp32"},
        consts={"N": n, "P": triton.next_power_of_2(n), "ITERS": iters, "PAPER": convention == "paper", "BT": block_tokens},
        num_warps=1,
        hot=True,
        targets=("ascend",) if npu else ("cuda", "hip"),
        tokens=block_tokens,
        minimal_bytes=n * n * (dtype.itemsize + 4),
    )


def sinkhorn_fwd(logits: torch.Tensor, iters: int, eps: float, convention: str, npu: bool | None = None) -> torch.Tensor:
    """npu=True launches the form for Ascend on any device (tests run it in the interpreter); None picks it by the device."""
    logits = logits.contiguous()
    n = logits.shape[-1]
    comb = torch.empty_like(logits, dtype=torch.float32)
    tokens = logits.numel() // (n * n)
    if tokens:
        spec = forward_spec(logits.dtype, n, iters, convention, on_npu(logits.device, npu))
        spec.launch((cdiv(tokens, spec.consts["BT"]),), logits, comb, tokens, eps)
    return comb
