"""Gates backward: kernels, table of specialisations, launchers, and the specs of both directions for the registry.

d(scale) and d(base) are summed in two stages in a fixed order: every program of the first kernel writes the sums over its tokens, the
second adds the programs' rows.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.device import on_npu
from kernel_runtime.launch import Spec
from kernel_runtime.registry import ModelShape
from mhc_ops import hopper
from mhc_ops.gates.core import comb_mask, gates_block_bwd, load_block, store_block, store_partial, token_mask
from mhc_ops.gates.fwd import forward_spec
from mhc_ops.library import mix_columns
from mhc_ops.project.core import cdiv, padded
from mhc_ops.sinkhorn.core import history, tokens_last

REDUCE_TILE, REDUCE_ROWS = 1024, 256  # elements of the second stage's tile on an NPU, rows of a column at once on a GPU
# Where nothing is stored and all is unrolled. With 4 streams, two rows of a matrix lie in a thread: sums along a row need no shuffle, along a
# column one; with 8, 8 tokens take 11.7 us for 4096 tokens on an H200 and 2 take 17.5.
UNROLLED_TOKENS, UNROLLED_TOKENS_OF_MANY_STREAMS = 16, 8


def block_tokens(n: int, iters: int, convention: str, npu: bool) -> int:
    """Tokens a program. Their sums are the largest tensors, [32, BT, P] for 20 iterations; Ascend's 192 KB hold 2 tokens at P = 8."""
    return tokens_last(n, iters, convention, npu) or (4 if n <= 4 else 2)


@triton.jit(do_not_specialize=["T", "eps"])
def gates_bwd_kernel(
    dpre, dpost, dcomb, mixes, scale, base, dmixes, partial, T, eps,
    N: tl.constexpr, P: tl.constexpr, ITERS: tl.constexpr, H: tl.constexpr, PAPER: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = N * N + 2 * N
    first = tl.program_id(0) * BT
    row = first.to(tl.int64)
    t = tl.arange(0, BT)
    i = tl.arange(0, P)
    live = first + t < T
    m_pre, m_post, m_comb = load_block(mixes + row * M, live, M, N, P, BT)
    two = t[:, None] * N + i[None, :]
    g_pre = tl.load(dpre + row * N + two, mask=token_mask(live, N, P), other=0.0)
    g_post = tl.load(dpost + row * N + two, mask=token_mask(live, N, P), other=0.0)
    three = t[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
    g_comb = tl.load(dcomb + row * (N * N) + three, mask=comb_mask(live, N, P), other=0.0)
    z_pre, z_post, z_comb = gates_block_bwd(m_pre, m_post, m_comb, g_pre, g_post, g_comb, live, scale, base, eps, N, P, ITERS, H, PAPER, BT)
    store_partial(partial + tl.program_id(0).to(tl.int64) * (M + 3), z_pre, z_post, z_comb, m_pre, m_post, m_comb, N, P)
    z_pre *= tl.load(scale)
    z_post *= tl.load(scale + 1)
    z_comb *= tl.load(scale + 2)
    store_block(dmixes + row * M, live, z_pre, z_post, z_comb, M, N, P, BT)


@triton.jit(do_not_specialize=["G"])
def reduce_partial_kernel(partial, dscale, dbase, G, M: tl.constexpr, C: tl.constexpr, BG: tl.constexpr):
    """partial [G, M + 3] -> dbase [M] (the first columns), dscale [3] (the rest); C columns a program"""
    c = tl.program_id(0) * C + tl.arange(0, C)
    g = tl.arange(0, BG)
    acc = tl.zeros((BG, C), tl.float32)
    for g0 in range(0, G, BG):
        row = partial + (g0 + g)[:, None] * (M + 3)
        acc += tl.load(row + c[None, :], mask=(g0 + g < G)[:, None] & (c < M + 3)[None, :], other=0.0)
    total = tl.sum(acc, 0)
    tl.store(dbase + tl.minimum(c, M - 1), total, mask=c < M)
    tl.store(dscale + tl.minimum(tl.maximum(c - M, 0), 2), total, mask=(c >= M) & (c < M + 3))


@cache
def backward_spec(n: int, iters: int, convention: str, npu: bool = False) -> Spec:
    pointers = ("dpre", "dpost", "dcomb", "mixes", "scale", "base", "dmixes", "partial")
    slots = history(n, iters, convention, npu)
    unrolled = UNROLLED_TOKENS if n <= 4 else UNROLLED_TOKENS_OF_MANY_STREAMS
    tokens = block_tokens(n, iters, convention, npu) if npu or slots else unrolled
    return Spec(
        gates_bwd_kernel,
        types={**dict.fromkeys(pointers, "*fp32"), "T": "i32", "eps": "fp32"},
        consts={
            "N": n, "P": triton.next_power_of_2(n), "ITERS": iters, "H": slots,
            "PAPER": convention == "paper", "BT": tokens,
        },
        num_warps=1,
        hot=True,
        targets=("ascend",) if npu else ("cuda", "hip"),
        tokens=tokens,
        minimal_bytes=4 * 3 * mix_columns(n),
    )  # fmt: skip


@cache
def reduce_spec(n: int, npu: bool = False) -> Spec:
    """A GPU takes one column a program and many rows at once, an NPU rows of all columns."""
    m = mix_columns(n)
    columns = padded(m + 3) if npu else 1
    return Spec(
        reduce_partial_kernel,
        types={"partial": "*fp32", "dscale": "*fp32", "dbase": "*fp32", "G": "i32"},
        consts={"M": m, "C": columns, "BG": REDUCE_TILE // columns if npu else REDUCE_ROWS},
        num_warps=4 if npu else 1,
        targets=("ascend",) if npu else ("cuda", "hip"),
    )


def reduce_partial(partial: torch.Tensor, n: int, npu: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """dscale [3], dbase [M] from the rows that store_partial wrote, partial [G, M + 3] fp32; zeros for G = 0."""
    dscale, dbase = partial.new_empty(3), partial.new_empty(mix_columns(n))
    npu = on_npu(partial.device, npu)
    spec = reduce_spec(n, npu)
    if not npu and hopper.on_device(partial.device):
        from mhc_ops.hopper.gates import waiting_reduce_spec

        spec = waiting_reduce_spec(n)
    spec.launch((cdiv(mix_columns(n) + 3, spec.consts["C"]),), partial, dscale, dbase, partial.shape[0])
    return dscale, dbase


def gates_bwd(
    dpre: torch.Tensor | None, dpost: torch.Tensor | None, dcomb: torch.Tensor | None,
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, hc_mult: int, iters: int, hc_eps: float, convention: str,
    npu: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """npu as in gates_fwd"""
    mixes, scale, base = mixes.contiguous(), scale.contiguous(), base.contiguous()
    lead, n = mixes.shape[:-1], hc_mult
    grads = [
        torch.zeros((*lead, *tail), dtype=torch.float32, device=mixes.device) if grad is None else grad.contiguous()
        for grad, tail in ((dpre, (n,)), (dpost, (n,)), (dcomb, (n, n)))
    ]
    dmixes = torch.empty_like(mixes)
    tokens = mixes.numel() // mixes.shape[-1]
    spec = backward_spec(n, iters, convention, on_npu(mixes.device, npu))
    programs = cdiv(tokens, spec.consts["BT"])
    partial = torch.empty((programs, mixes.shape[-1] + 3), dtype=torch.float32, device=mixes.device)
    if tokens:
        spec.launch((programs,), *grads, mixes, scale, base, dmixes, partial, tokens, hc_eps)
    return dmixes, *reduce_partial(partial, n, npu)


def specs(shape: ModelShape) -> Iterator[Spec]:
    n = shape.hc_mult
    for npu in (False, True):
        yield forward_spec(n, shape.sinkhorn_iters, "v4", npu)
        yield backward_spec(n, shape.sinkhorn_iters, "v4", npu)
        yield reduce_spec(n, npu)
    if hopper.has_gluon():
        from mhc_ops.hopper.gates import waiting_reduce_spec

        yield waiting_reduce_spec(n)
