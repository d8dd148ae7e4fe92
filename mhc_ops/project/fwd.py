"""Projection of the streams on fn and their mean square: kernels, table of specialisations, launchers.

Two launches give partial sums part [split, T, C] fp32 over `split` pieces of K: columns 0..M-1 the raw product, column M the sum of
squares, the rest zero. Whoever reads them adds the pieces (a gates kernel, or `finish_kernel` here).

bf16 streams: x is exact in bf16, so only fn is split, into two bf16 pieces; on an H200 that is 2.3 times faster than tf32 (which
upcasts x through registers) and 40 times as accurate. What remains is the rounding of the tensor core's accumulation, which grows with
the length of one piece of K: it is kept at 4096 or less. The sum of squares is the diagonal of x @ x^T on the same tile, at no cost.
fp16 and fp32 streams: products in full fp32.
"""

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernel_runtime.kernels import dot
from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from kernel_runtime.workspace import Layout, Scratch
from mhc_ops.library import mix_columns
from mhc_ops.project.core import PLANS, cdiv, dot_exact, hidden_zero, padded, parallelism, zero_product

BLOCK_TOKENS = 64  # 32 leave wgmma for mma.sync: 140 us instead of 46 at 4096 tokens, D = 4096
PIECE_LENGTH = 4096
SPLIT_BLOCK = 1024
FINISH_TOKENS = 16


@triton.jit
def split_fn_tile(p, fn, pieces, K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Tile p of fn [M, K] fp32 -> pieces [2, C, K] bf16, fn ~ pieces[0] + pieces[1]; rows M..C-1 zero"""
    blocks: tl.constexpr = (K + BK - 1) // BK
    c = p // blocks
    k = (p % blocks) * BK + tl.arange(0, BK)
    w = tl.load(fn + c * K + k, mask=(k < K) & (c < M), other=0.0)
    high = w.to(tl.bfloat16)
    low = (w - high.to(tl.float32)).to(tl.bfloat16)
    tl.store(pieces + c * K + k, high, mask=k < K)
    tl.store(pieces + (C + c) * K + k, low, mask=k < K)


@triton.jit
def split_fn_kernel(fn, pieces, K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    split_fn_tile(tl.program_id(0), fn, pieces, K, M, C, BK)


@triton.jit
def load_pieces(at, k, left, WHOLE: tl.constexpr, ASCEND: tl.constexpr):
    """[BK, C] of fn's pieces. On Ascend `at` is [C, BK], as the pieces lie in memory: the matrix unit transposes on its own, and a vector
    core would do it through global memory."""
    if WHOLE:
        w = tl.load(at)
    elif ASCEND:
        w = tl.load(at, mask=(k < left)[None, :], other=0.0)
    else:
        w = tl.load(at, mask=(k < left)[:, None], other=0.0)
    if ASCEND:
        w = tl.trans(w)
    return w


@triton.jit(do_not_specialize=["T", "steps", "split"])
def project_kernel(
    x, pieces, part, T, steps, split,
    K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ASCEND: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    s = pid % split  # the pieces of one block of tokens run together
    t = (pid // split) * BT + tl.arange(0, BT)
    on = t < T
    c = tl.arange(0, C)
    k = tl.arange(0, BK)
    first = s * steps
    xp = x + t.to(tl.int64)[:, None] * K + k[None, :]
    if ASCEND:
        wp = pieces + c[:, None] * K + k[None, :]
        acc = zero_product(BT, C, 30)
        gram = zero_product(BT, BT, 29)
    else:
        wp = pieces + c[None, :] * K + k[:, None]
        acc = tl.zeros((BT, C), tl.float32)
        gram = tl.zeros((BT, BT), tl.float32)
    for step in tl.range(first, tl.minimum(first + steps, (K + BK - 1) // BK), num_stages=STAGES):
        start = step * BK  # known to be a multiple of 16, so that loads are wide and can be staged
        if K % BK == 0:
            xt = tl.load(xp + start, mask=on[:, None], other=0.0)
        else:
            xt = tl.load(xp + start, mask=on[:, None] & (k < K - start)[None, :], other=0.0)
        high = load_pieces(wp + start, k, K - start, K % BK == 0, ASCEND)
        low = load_pieces(wp + start + C * K, k, K - start, K % BK == 0, ASCEND)
        gram = dot(xt, tl.trans(xt), gram)
        acc = dot(xt, high, acc)
        acc = dot(xt, low, acc)
    r = tl.arange(0, BT)
    square = tl.sum(tl.where(r[:, None] == r[None, :], gram, 0.0), 1)
    acc = tl.where((c == M)[None, :], square[:, None], acc)
    tl.store(part + (s.to(tl.int64) * T + t)[:, None] * C + c[None, :], acc, mask=on[:, None])


@triton.jit(do_not_specialize=["T", "steps", "split"])
def project_exact_kernel(
    x, fn, part, T, steps, split,
    K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    s = pid % split
    t = (pid // split) * BT + tl.arange(0, BT)
    on = t < T
    c = tl.arange(0, C)
    k = tl.arange(0, BK)
    first = s * steps
    acc = tl.zeros((BT, C), tl.float32) + hidden_zero()
    square = tl.zeros((BT, BK), tl.float32)
    for step in range(first, tl.minimum(first + steps, (K + BK - 1) // BK)):
        start = step * BK
        mk = k < K - start
        xt = tl.load(x + t.to(tl.int64)[:, None] * K + start + k[None, :], mask=on[:, None] & mk[None, :], other=0.0).to(tl.float32)
        w = tl.load(fn + c[None, :] * K + start + k[:, None], mask=(c < M)[None, :] & mk[:, None], other=0.0)
        acc = dot_exact(xt, w, acc)
        square += xt * xt
    acc = tl.where((c == M)[None, :], tl.sum(square, 1)[:, None], acc)
    tl.store(part + (s.to(tl.int64) * T + t)[:, None] * C + c[None, :], acc, mask=on[:, None])


@triton.jit(do_not_specialize=["T", "split", "norm_eps"])
def finish_kernel(part, mixes, rstd, T, split, norm_eps, K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BT: tl.constexpr):
    """mixes [T, M] = r * sum of the pieces, rstd [T] = r"""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    on = t < T
    c = tl.arange(0, C)
    acc = tl.zeros((BT, C), tl.float32)
    for s in range(split):
        acc += tl.load(part + (tl.cast(s, tl.int64) * T + t)[:, None] * C + c[None, :], mask=on[:, None], other=0.0)
    r = tl.rsqrt(tl.sum(tl.where((c == M)[None, :], acc, 0.0), 1) * (1.0 / K) + norm_eps)
    tl.store(rstd + t, r, mask=on)
    tl.store(mixes + t.to(tl.int64)[:, None] * M + c[None, :], acc * r[:, None], mask=on[:, None] & (c < M)[None, :])


def part_width(m: int) -> int:
    """C: M columns of the product and one for the sum of squares"""
    return padded(m + 1)


def few_pieces(k: int) -> int:
    """Pieces of K where tokens are many; for the traffic estimate"""
    return cdiv(k, PIECE_LENGTH)


def split_tiles(m: int, k: int) -> int:
    return part_width(m) * cdiv(k, SPLIT_BLOCK)


@cache
def split_spec(m: int, k: int) -> Spec:
    consts = {"K": k, "M": m, "C": part_width(m), "BK": SPLIT_BLOCK}
    return Spec(split_fn_kernel, types={"fn": "*fp32", "pieces": "*bf16"}, consts=consts)


@cache
def project_spec(dtype: torch.dtype, m: int, k: int, npu: bool = False) -> Spec:
    c = part_width(m)
    runtime = {"part": "*fp32", "T": "i32", "steps": "i32", "split": "i32"}
    if dtype == torch.bfloat16:
        # 3 stages of 32 KB (two programs on an H200 multiprocessor) where fn has up to 32 columns
        consts = {"K": k, "M": m, "C": c, "BT": BLOCK_TOKENS, "BK": 128 if c <= 32 else 64, "STAGES": 3, "ASCEND": npu}
        targets = ("ascend",) if npu else ("cuda", "hip")
        types = {"x": "*bf16", "pieces": "*bf16", **runtime}
        return Spec(project_kernel, types=types, consts=consts, hot=True, targets=targets, **_traffic(dtype, m, k, consts))
    consts = {"K": k, "M": m, "C": c, "BT": 32, "BK": 32}
    types = {"x": f"*{TRITON_DTYPE[dtype]}", "fn": "*fp32", **runtime}
    return Spec(project_exact_kernel, types=types, consts=consts, num_stages=2, hot=True, **_traffic(dtype, m, k, consts))


def _traffic(dtype: torch.dtype, m: int, k: int, consts: Mapping[str, int]) -> dict[str, Any]:
    block = consts["BT"]
    return {"tokens": {"x": block * min(consts["BK"], k) / k, "part": block / few_pieces(k)}, "minimal_bytes": k * dtype.itemsize + 4 * (m + 1)}


@cache
def finish_spec(m: int, k: int) -> Spec:
    types = {"part": "*fp32", "mixes": "*fp32", "rstd": "*fp32", "T": "i32", "split": "i32", "norm_eps": "fp32"}
    consts = {"K": k, "M": m, "C": part_width(m), "BT": FINISH_TOKENS}
    tokens = {"mixes": FINISH_TOKENS, "part": FINISH_TOKENS / few_pieces(k)}
    return Spec(finish_kernel, types=types, consts=consts, num_warps=2, hot=True, tokens=tokens, minimal_bytes=4 * 2 * (m + 1))


def split_plan(tokens: int, k: int, block_tokens: int, block_k: int, programs: int) -> tuple[int, int]:
    """(steps of block_k in a piece of K, number of pieces): one wave of programs, at most 16 pieces, none longer than PIECE_LENGTH."""
    steps = cdiv(k, block_k)
    split = min(16, max(1, programs // cdiv(tokens, block_tokens)))
    split = min(steps, max(split, cdiv(k, PIECE_LENGTH)))
    length = cdiv(steps, split)
    return length, cdiv(steps, length)


def max_split(k: int) -> int:
    """The power of two at or above any number of pieces that split_plan gives"""
    return max(16, triton.next_power_of_2(cdiv(k, PIECE_LENGTH)))


class ProjectPlan(NamedTuple):
    """How project_partials launches. scratch: part [split, T, C] and fn's bf16 pieces [2, C, K] (none where fn is read itself)"""

    spec: Spec
    grid: tuple[int, ...]
    length: int
    split: int
    split_grid: tuple[int, ...]
    splits_fn: bool
    scratch: Layout


@lru_cache(PLANS)
def project_plan(device: torch.device, dtype: torch.dtype, m: int, k: int, tokens: int) -> ProjectPlan:
    spec = project_spec(dtype, m, k, device.type == "npu")
    block, width, splits_fn = spec.consts["BT"], part_width(m), dtype == torch.bfloat16
    length, split = split_plan(tokens, k, block, spec.consts["BK"], 2 * parallelism(device))
    scratch = Layout((split * tokens * width, torch.float32), (2 * width * k if splits_fn else 0, torch.bfloat16))
    return ProjectPlan(spec, (cdiv(tokens, block) * split,), length, split, (split_tiles(m, k),), splits_fn, scratch)


def project_partials(
    plan: ProjectPlan, x: torch.Tensor, fn: torch.Tensor, part: Scratch, pieces: Scratch, tokens: int, split_fn: bool = True
) -> None:
    """Partial sums part [split, T, C] for contiguous x [..., N, D] and fn [M, K]; splits fn unless its pieces are there already."""
    if plan.splits_fn and split_fn:
        split_spec(*fn.shape).launch(plan.split_grid, fn, pieces)
    plan.spec.launch(plan.grid, x, pieces if plan.splits_fn else fn, part, tokens, plan.length, plan.split)


def project_fwd(x: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    x, fn = x.contiguous(), fn.contiguous()
    m, k = fn.shape
    lead = x.shape[:-2]
    mixes = torch.empty((*lead, m), dtype=torch.float32, device=x.device)
    rstd = torch.empty(lead, dtype=torch.float32, device=x.device)
    tokens = x.numel() // k
    if tokens:
        plan = project_plan(x.device, x.dtype, m, k, tokens)
        part, pieces = plan.scratch.allocate(x.device)
        project_partials(plan, x, fn, part, pieces, tokens)
        finish_spec(m, k).launch((cdiv(tokens, FINISH_TOKENS),), part, mixes, rstd, tokens, plan.split, norm_eps)
    return mixes, rstd


def partial_specs(dtype: torch.dtype, m: int, k: int) -> Iterator[Spec]:
    if dtype == torch.bfloat16:
        yield split_spec(m, k)
    for npu in (False, True):
        yield project_spec(dtype, m, k, npu)


STREAM_DTYPE = {name: dtype for dtype, name in TRITON_DTYPE.items()}


def forward_specs(shape: ModelShape) -> Iterator[Spec]:
    m, k = mix_columns(shape.hc_mult), shape.hc_mult * shape.hidden
    yield from partial_specs(STREAM_DTYPE[shape.dtype], m, k)
    yield finish_spec(m, k)
