"""Scores for Ascend: heads are the rows of the product, so that the sum over them adds whole vectors.

The arithmetic is that of indexer/lightning/fwd.py, which has the launcher. A program takes queries in turn; the keys stream past.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from indexer.core import product, relu, visible_of_row
from kernel_runtime.launch import TRITON_DTYPE, Spec

BLOCK_HEADS = 64
BLOCK_KEYS = 128
RUNTIME = ("b0", "i0", "n", "S", "S3", "rows", "q_offset", "tasks")


@triton.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset", "tasks"])
def scores_ascend_kernel(
    q, k, weights, span, scores, b0, i0, n, S, S3, rows, q_offset, tasks,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, TABLE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """scores [batches, n, S3] of n queries from i0 on; tasks = batches * n."""
    h = tl.arange(0, HB)
    d = tl.arange(0, DP)
    s = tl.arange(0, BK)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        local = task % n
        i = i0 + local
        batch = (b0 + task // n).to(tl.int64)
        row = batch * S + i
        start, count = visible_of_row(span, row, i, rows, S3, q_offset, R, TABLE)
        out = scores + (task // n * n + local).to(tl.int64) * S3
        keys = k + (batch * S3 + start) * D
        for j in range(0, count, BK):
            at = keys + (j + s).to(tl.int64)[:, None] * D + d[None, :]
            block = tl.trans(tl.load(at, mask=(j + s < count)[:, None] & (d < D)[None, :], other=0.0))
            total = tl.zeros([BK], tl.float32)
            for first in range(0, H, HB):
                on = first + h < H
                q_tile = tl.load(q + (row * H + first + h)[:, None] * D + d[None, :], mask=on[:, None] & (d < D)[None, :], other=0.0)
                w = tl.load(weights + row * H + first + h, mask=on, other=0.0).to(tl.float32)
                part = relu(product(q_tile, block, tl.zeros([HB, BK], tl.float32))) * w[:, None]
                if H % HB != 0:
                    part = tl.where(on[:, None], part, 0.0)  # an infinite key gives NaN with a head that is not there
                total += tl.sum(part, 0)
            tl.store(out + j + s, total, mask=j + s < count)


@cache
def scores_ascend_spec(dtype: torch.dtype, weights_dtype: torch.dtype, heads: int, dim: int, cmp_ratio: int, table: bool) -> Spec:
    pointer = f"*{TRITON_DTYPE[dtype]}"
    return Spec(
        scores_ascend_kernel,
        types={"q": pointer, "k": pointer, "weights": f"*{TRITON_DTYPE[weights_dtype]}", "span": "*i32", "scores": "*fp32"}
        | dict.fromkeys(RUNTIME, "i32"),
        consts={
            "H": heads, "HB": min(BLOCK_HEADS, max(16, triton.next_power_of_2(heads))), "D": dim,
            "DP": max(16, triton.next_power_of_2(dim)), "R": cmp_ratio, "TABLE": table, "BK": BLOCK_KEYS,
        },
        targets=("ascend",),
        hot=True,
    )  # fmt: skip
