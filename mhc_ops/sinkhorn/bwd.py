"""Sinkhorn backward: kernel, table of specialisations, launcher, and the specs of both directions for the registry."""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.device import on_npu
from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from mhc_ops.project.core import cdiv
from mhc_ops.sinkhorn.core import history, sinkhorn_block_bwd, tokens_last
from mhc_ops.sinkhorn.fwd import forward_spec

BLOCK_TOKENS = 4
UNROLLED_TOKENS = 16  # where nothing is stored and all is unrolled: 8.1 us for 4096 tokens on an H200, 8.7 with 4 tokens


def block_tokens(n: int, iters: int, convention: str, npu: bool) -> int:
    """Tokens of a program. With more than 4 streams, 4 tokens' sums and matrices exceed the unified buffer of an NPU."""
    if n <= 4 and history(n, iters, convention, npu) == 0:
        return UNROLLED_TOKENS
    return tokens_last(n, iters, convention, npu) or (BLOCK_TOKENS // 2 if npu and n > 4 else BLOCK_TOKENS)


@triton.jit(do_not_specialize=["T", "eps"])
def sinkhorn_bwd_kernel(
    dcomb, logits, dlogits, T, eps,
    N: tl.constexpr, P: tl.constexpr, ITERS: tl.constexpr, H: tl.constexpr, PAPER: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    i = tl.arange(0, P)
    on = (t < T)[:, None, None] & (i < N)[None, :, None] & (i < N)[None, None, :]
    offset = t.to(tl.int64)[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
    z = tl.load(logits + offset, mask=on, other=0.0).to(tl.float32)
    g = tl.load(dcomb + offset, mask=on, other=0.0)
    g = sinkhorn_block_bwd(z, g, on, eps, ITERS, H, PAPER, BT, P)
    tl.store(dlogits + offset, g.to(dlogits.dtype.element_ty), mask=on)


@cache
def backward_spec(dtype: torch.dtype, n: int, iters: int, convention: str, npu: bool = False) -> Spec:
    pointer, tokens = f"*{TRITON_DTYPE[dtype]}", block_tokens(n, iters, convention, npu)
    return Spec(
        sinkhorn_bwd_kernel,
        types={"dcomb": "*fp32", "logits": pointer, "dlogits": pointer, "T": "i32", "eps": "fp32"},
        consts={
            "N": n, "P": triton.next_power_of_2(n), "ITERS": iters, "H": history(n, iters, convention, npu),
            "PAPER": convention == "paper", "BT": tokens,
        },
        num_warps=1,
        hot=True,
        targets=("ascend",) if npu else ("cuda", "hip"),
        tokens=tokens,
        minimal_bytes=n * n * (2 * dtype.itemsize + 4),
    )  # fmt: skip


def sinkhorn_bwd(
    dcomb: torch.Tensor, logits: torch.Tensor, iters: int, eps: float, convention: str, npu: bool | None = None
) -> torch.Tensor:
    """npu as in sinkhorn_fwd"""
    logits, dcomb = logits.contiguous(), dcomb.contiguous()
    n = logits.shape[-1]
    dlogits = torch.empty_like(logits)
    tokens = logits.numel() // (n * n)
    if tokens:
        spec = backward_spec(logits.dtype, n, iters, convention, on_npu(logits.device, npu))
        spec.launch((cdiv(tokens, spec.consts["BT"]),), dcomb, logits, dlogits, tokens, eps)
    return dlogits


def specs(shape: ModelShape) -> Iterator[Spec]:
    arguments = torch.float32, shape.hc_mult, shape.sinkhorn_iters, "v4"
    for npu in (False, True):
        yield forward_spec(*arguments, npu)
        yield backward_spec(*arguments, npu)
