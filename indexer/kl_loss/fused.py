"""Loss and gradients of selected slots in one kernel, where dk is summed by atomics in fp32 and the teacher stands on the slots.

dI is not held in memory: the row's largest score, the softmax's sum and the teacher's mass come first, and each tile of slots makes its own dI
of them. (A deterministic sum takes bounds of dI before; a teacher of whole rows comes a chunk of queries at a time.)
"""

from functools import cache

import torch
import triton
import triton.language as tl

from indexer.gradients import gradients_of_query, gradients_spec
from kernel_runtime.launch import Spec


@triton.jit(do_not_specialize=["S", "S3", "rows", "q_offset"])
def loss_gradients_kernel(
    q, k, weights, indices, scores, teacher, span, dq, dk, dweights, loss, counted, S, S3, rows, q_offset,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, P: tl.constexpr, TABLE: tl.constexpr,
    ATOMIC: tl.constexpr, FIXED: tl.constexpr, SHRINK: tl.constexpr, BS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    MARGINAL: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A program a query and block of heads; the first block writes the query's loss."""
    row = (rows - 1 - tl.program_id(0)).to(tl.int64)  # later queries hold more slots and go first
    gradients_of_query(
        q, k, weights, indices, scores, span, dq, dk, None, None, dweights, row, row, 0, S, S3, D,
        H, HB, D, DP, K, P, TABLE, ATOMIC, FIXED, SHRINK, BS, PARTS, STAGES, True, teacher, loss, counted, rows, q_offset, MARGINAL, R,
    )  # fmt: skip


@cache
def loss_gradients_spec(
    dtype: torch.dtype, weights_dtype: torch.dtype, heads: int, dim: int, topk: int, cmp_ratio: int, table: bool, marginal: bool
) -> Spec:
    like = gradients_spec(dtype, weights_dtype, heads, dim, topk, table, False)
    pointers = ("q", "k", "weights", "indices", "scores", "teacher", "span", "dq", "dk", "dweights", "loss", "counted")
    own = {"scores": "fp32", "teacher": "fp32", "loss": "fp32", "counted": "i32"}
    return Spec(
        loss_gradients_kernel,
        types={n: f"*{own[n]}" if n in own else like.types[n] for n in pointers} | dict.fromkeys(("S", "S3", "rows", "q_offset"), "i32"),
        consts={**like.consts, "MARGINAL": marginal, "R": cmp_ratio},
        num_warps=like.num_warps,
        options=like.options,
        targets=like.targets,
    )


def loss_and_gradients(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, scores: torch.Tensor, teacher: torch.Tensor,
    span: torch.Tensor | None, loss: torch.Tensor, counted: torch.Tensor, cmp_ratio: int, q_offset: int, marginal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Into loss and counted, [rows], the KL of every row and whether it counts; dq in the dtype of q, dk and dweights in fp32. All contiguous,
    scores and teacher fp32 like indices [.., K], span as of `visible_table`."""
    heads, dim = q.shape[-2:]
    spec = loss_gradients_spec(q.dtype, weights.dtype, heads, dim, indices.shape[-1], cmp_ratio, span is not None, marginal)
    dq = torch.empty_like(q)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    dweights = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    grid = (loss.numel(), triton.cdiv(heads, spec.consts["HB"]))
    tensors = (q, k, weights, indices, scores, teacher, indices if span is None else span, dq, dk, dweights, loss, counted)
    spec.launch(grid, *tensors, q.shape[-3], k.shape[-2], loss.numel(), q_offset)
    return dq, dk, dweights
