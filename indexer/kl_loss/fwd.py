"""KL loss of the indexer: value and gradients. Scores, teacher, then loss and dI of every row, then the gradients of dI.

Sparse form: all of it on [rows, K]. Dense form: in chunks of queries, whose scores and teacher take at most 128 MiB each.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from indexer.core import visible, visible_table
from indexer.gradients import kl_terms, slot_gradients
from indexer.kl_loss import dense
from indexer.kl_loss.fused import loss_and_gradients
from indexer.kl_loss.slots import GPU_TARGETS, NPU_TARGETS, slot_scores, slot_teacher
from indexer.lightning.ascend.scores import scores_ascend_spec
from indexer.lightning.fwd import chunks_of, launch_scores, query_chunks
from kernel_runtime.device import grid_size, on_npu
from kernel_runtime.launch import Spec

BLOCK_COLUMNS = 1024
TOTAL_ROWS = 4096  # of a step of the sum over all rows


@triton.jit
def loss_of_row(
    task, scores, teacher, indices, span, dscores, loss, counted, b0, i0, n, S, S3, rows, q_offset, width,
    R: tl.constexpr, TABLE: tl.constexpr, SPARSE: tl.constexpr, WHOLE: tl.constexpr, MARGINAL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Loss of a row, whether it counts, and dI of its scores (in their place, if dscores is scores).

    SPARSE: rows of width = K slots, [B, S, K]; otherwise the n rows of a chunk of width = S3 blocks, [batches, n, S3]. WHOLE: the teacher of
    slots is that of a chunk's blocks.

    The first pass finds the softmax's maximum and sum and the teacher's mass, the second one reads scores and teacher again.
    """
    local = n - 1 - task % n
    batch = (b0 + task // n).to(tl.int64)
    row = batch * S + i0 + local
    _, count = visible(span, row, i0 + local, local < n, rows, S3, q_offset, R, TABLE)
    in_chunk = (task // n * n + local).to(tl.int64)
    base = in_chunk * width
    end = count
    if SPARSE:
        base = row * width
        end = width
    teacher_row = teacher + base
    if WHOLE:
        teacher_row = teacher + in_chunk * S3
    c = tl.arange(0, BC)
    total = (row * 0).to(tl.float32)  # a tensor, also where no loop runs
    mass = total
    top = total + float("-inf")
    for j in range(0, end, BC):
        on = j + c < end
        if SPARSE:
            index = tl.load(indices + base + j + c, mask=on, other=-1)
            on = (index >= 0) & (index < count)
        x = tl.load(scores + base + j + c, mask=on, other=float("-inf"))
        if WHOLE:
            u = tl.load(teacher_row + tl.where(on, index, 0), mask=on, other=0.0)
        else:
            u = tl.load(teacher_row + j + c, mask=on, other=0.0)
        higher = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
        mass += tl.sum(u, 0)
        top = higher
    counts = mass > 0.0
    top = tl.where(counts, top, 0.0)
    total = tl.where(total > 0.0, total, 1.0)
    log_total = tl.log(total)
    value = total * 0.0
    for j in range(0, end, BC):
        on = j + c < end
        if SPARSE:
            index = tl.load(indices + base + j + c, mask=on, other=-1)
            on = (index >= 0) & (index < count)
        x = tl.load(scores + base + j + c, mask=on, other=float("-inf")) - top
        if WHOLE:
            u = tl.load(teacher_row + tl.where(on, index, 0), mask=on, other=0.0)
        else:
            u = tl.load(teacher_row + j + c, mask=on, other=0.0)
        terms, gradient = kl_terms(x, u, on, mass, counts, total, log_total, MARGINAL)
        value += tl.sum(terms, 0)
        tl.store(dscores + base + j + c, gradient, mask=j + c < end)
    if MARGINAL:
        value *= mass
    tl.store(loss + row, tl.where(counts, value, 0.0))
    tl.store(counted + row, counts.to(tl.int32))


@triton.jit(do_not_specialize=["b0", "i0", "n", "S", "S3", "rows", "q_offset", "width", "tasks"])
def rows_kernel(
    scores, teacher, indices, span, dscores, loss, counted, b0, i0, n, S, S3, rows, q_offset, width, tasks,
    R: tl.constexpr, TABLE: tl.constexpr, SPARSE: tl.constexpr, WHOLE: tl.constexpr, MARGINAL: tl.constexpr, BC: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    if LOOP:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            loss_of_row(
                task, scores, teacher, indices, span, dscores, loss, counted, b0, i0, n, S, S3, rows, q_offset, width,
                R, TABLE, SPARSE, WHOLE, MARGINAL, BC,
            )  # fmt: skip
    else:
        loss_of_row(
            tl.program_id(0), scores, teacher, indices, span, dscores, loss, counted, b0, i0, n, S, S3, rows, q_offset, width,
            R, TABLE, SPARSE, WHOLE, MARGINAL, BC,
        )  # fmt: skip


@cache
def rows_spec(cmp_ratio: int, table: bool, slots: int, marginal: bool, whole: bool = False, npu: bool = False) -> Spec:
    """slots: K of the sparse form, 0 for the dense form; whole: with the teacher of all blocks."""
    block = min(BLOCK_COLUMNS, max(256, triton.next_power_of_2(slots))) if slots else BLOCK_COLUMNS
    return Spec(
        rows_kernel,
        types={"scores": "*fp32", "teacher": "*fp32", "indices": "*i32", "span": "*i32", "dscores": "*fp32", "loss": "*fp32"}
        | {"counted": "*i32"}
        | dict.fromkeys((*dense.CHUNK, "width", "tasks"), "i32"),
        consts={"R": cmp_ratio, "TABLE": table, "SPARSE": slots > 0, "WHOLE": whole, "MARGINAL": marginal, "BC": block, "LOOP": npu},
        num_warps=max(1, block // 256),
        targets=NPU_TARGETS if npu else GPU_TARGETS,
    )


@triton.jit(do_not_specialize=["factor", "rows"])
def total_kernel(loss, counted, total, count, factor, rows, B: tl.constexpr):
    """factor * sum of loss, sum of counted: by one program, so that the order is fixed and there is one launch."""
    place = tl.arange(0, B)
    value = tl.zeros([B], tl.float32)
    number = tl.zeros([B], tl.int32)
    for j in range(0, rows, B):
        on = j + place < rows
        value += tl.load(loss + j + place, mask=on, other=0.0)
        number += tl.load(counted + j + place, mask=on, other=0)
    tl.store(total, tl.sum(value, 0) * factor)
    tl.store(count, tl.sum(number, 0))


@cache
def total_spec() -> Spec:
    types = {"loss": "*fp32", "counted": "*i32", "total": "*fp32", "count": "*i32", "factor": "fp32", "rows": "i32"}
    return Spec(total_kernel, types=types, consts={"B": TOTAL_ROWS}, num_warps=8)


class Problem(NamedTuple):
    """Contiguous inputs of one call; batch 1 in TND."""

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    span: torch.Tensor | None
    batch: int
    queries: int
    keys: int
    cmp_ratio: int
    q_offset: int
    marginal: bool
    npu: bool  # takes the forms for Ascend

    def launch(self, spec: Spec, tasks: int, *arguments: object, vector: bool = False) -> None:
        """A program a task, or on an NPU as many as cores; vector: no products inside."""
        spec.launch((grid_size(self.q.device, tasks, self.npu, vector=vector),), *arguments, tasks)


def indexer_kl_loss_fwd(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor | None,
    teacher: torch.Tensor | None,
    q: torch.Tensor | None,
    cmp_kv: torch.Tensor | None,
    lse: torch.Tensor | None,
    scores: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    q_offsets: torch.Tensor | None,
    softmax_scale: float,
    factor: float,
    target: str,
    cmp_ratio: int,
    q_offset: int,
    gradients: bool,
    deterministic: bool,
    npu: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """Results of the op indexer_kl_loss. npu: see `on_npu`."""
    q_index, k_index, weights = q_index.contiguous(), k_index.contiguous(), weights.contiguous()
    indices, teacher, q, cmp_kv, lse, scores = (None if x is None else x.contiguous() for x in (indices, teacher, q, cmp_kv, lse, scores))
    lse = None if target == "compressed" else lse
    batch, queries = (1, q_index.shape[0]) if q_index.dim() == 3 else q_index.shape[:2]
    keys = k_index.shape[-2]
    device = q_index.device
    width = keys if indices is None else indices.shape[-1]
    if not batch * queries * keys * width:
        shapes = [x.shape if gradients else (0,) for x in (q_index, k_index, weights)]
        dtypes = (q_index.dtype, torch.float32, torch.float32)
        zeros = (torch.zeros(s, dtype=d, device=device) for s, d in zip(shapes, dtypes))
        return torch.zeros((), device=device), torch.zeros((), dtype=torch.int32, device=device), *zeros
    span = visible_table(batch, queries, keys, cmp_ratio, cu_seqlens_q, cu_seqlens_k, q_offset, q_offsets, device)
    x = Problem(q_index, k_index, weights, span, batch, queries, keys, cmp_ratio, q_offset, target == "marginal", on_npu(device, npu))
    loss = torch.empty(batch * queries, dtype=torch.float32, device=device)
    counted = torch.empty(batch * queries, dtype=torch.int32, device=device)
    if indices is None:
        if q is None or cmp_kv is None:
            raise ValueError("indexer_kl_loss: indices=None without q and cmp_kv")
        grads = _dense(x, q, cmp_kv, lse, softmax_scale, loss, counted, gradients)
    else:
        if teacher is None and (q is None or cmp_kv is None):
            raise ValueError("indexer_kl_loss: neither teacher nor q and cmp_kv")
        whole = teacher is None and lse is not None and span is None and not x.npu and whole_rows_pay(queries, keys, width, cmp_ratio, q_offset)
        fused = gradients and not (deterministic or whole or x.npu)
        dscores = scores
        if scores is None:  # in whose place dI may be
            scores = dscores = torch.empty(indices.shape, dtype=torch.float32, device=device)
            slot_scores(q_index, k_index, weights, indices, span, cmp_ratio, q_offset, scores, x.npu)
        elif not fused:
            dscores = torch.empty_like(scores)
        if teacher is None and not whole:
            teacher = slot_teacher(q, cmp_kv, lse, indices, span, softmax_scale, cmp_ratio, q_offset, x.npu)
        if fused:
            inputs = (q_index, k_index, weights, indices, scores, teacher, span)
            grads = loss_and_gradients(*inputs, loss, counted, cmp_ratio, q_offset, x.marginal)
        elif whole:
            _whole_teacher(x, q, cmp_kv, lse, softmax_scale, scores, indices, dscores, loss, counted)
        else:
            _loss_of_rows(x, scores, teacher, indices, dscores, loss, counted, 0, 0, batch, queries)
        if gradients and not fused:
            grads = slot_gradients(q_index, k_index, weights, indices, dscores, span, deterministic, x.npu)
    if not gradients:
        grads = q_index.new_empty(0), loss.new_empty(0), loss.new_empty(0)
    total, count = loss.new_empty(()), counted.new_empty(())
    total_spec().launch((1,), loss, counted, total, count, factor, batch * queries)
    return total, count, *grads


def _loss_of_rows(
    x: Problem, scores: torch.Tensor, teacher: torch.Tensor, indices: torch.Tensor | None, dscores: torch.Tensor, loss: torch.Tensor,
    counted: torch.Tensor, b0: int, i0: int, batches: int, n: int, whole: bool = False,
) -> None:  # fmt: skip
    width = x.keys if indices is None else indices.shape[-1]
    spec = rows_spec(x.cmp_ratio, x.span is not None, 0 if indices is None else width, x.marginal, whole, x.npu)
    tensors = (scores, teacher, counted if indices is None else indices, counted if x.span is None else x.span, dscores, loss, counted)
    sizes = (b0, i0, n, x.queries, x.keys, x.batch * x.queries, x.q_offset, width)
    x.launch(spec, n * batches, *tensors, *sizes, vector=True)


def whole_rows_pay(queries: int, keys: int, slots: int, cmp_ratio: int, q_offset: int) -> bool:
    """Whether the teacher of all visible blocks costs less than one that gathers the slots: a slot takes 1.6 times as long (H200)."""
    last = min(keys, max(0, q_offset + queries) // cmp_ratio)
    first = min(keys, max(0, q_offset + 1) // cmp_ratio)
    visible = (first + last) / 2  # of a mean row, taken to grow evenly
    short = min(1.0, (slots - first) / (last - first)) if last > first else float(slots >= first)  # share of the rows that hold all they see
    selected = slots if slots <= first else short * (first + min(slots, last)) / 2 + (1 - short) * slots
    return visible <= 1.6 * selected


def _whole_teacher(
    x: Problem, q: torch.Tensor, cmp_kv: torch.Tensor, lse: torch.Tensor, scale: float, scores: torch.Tensor, indices: torch.Tensor,
    dscores: torch.Tensor, loss: torch.Tensor, counted: torch.Tensor,
) -> None:  # fmt: skip
    """Teacher of all visible blocks, then loss and dI of the slots, a chunk of queries at a time. One offset, no table."""
    batches, length = query_chunks(x.batch, x.queries, x.keys, 0, buffers=2)
    teacher = torch.empty(batches * length * x.keys, dtype=torch.float32, device=x.q.device)
    teach = dense.dense_teacher_spec(q.dtype, *q.shape[-2:], x.cmp_ratio, False, False)
    for b0, some, i0, n in chunks_of(x.batch, x.queries, batches, length):
        tiles = triton.cdiv(n, teach.consts["NQ"]) * triton.cdiv(x.keys, teach.consts["BK"])
        sizes = (b0, i0, n, x.queries, x.keys, x.batch * x.queries, x.q_offset)
        x.launch(teach, tiles * some, q, cmp_kv, lse, counted, teacher, scale, *sizes)
        _loss_of_rows(x, scores, teacher, indices, dscores, loss, counted, b0, i0, some, n, whole=True)


def _dense(
    x: Problem, q: torch.Tensor, cmp_kv: torch.Tensor, lse: torch.Tensor | None, scale: float, loss: torch.Tensor, counted: torch.Tensor,
    gradients: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    device, table = x.q.device, x.span is not None
    span = counted if x.span is None else x.span  # a pointer that is not read
    (heads, dim), (attn_heads, attn_dim) = x.q.shape[-2:], q.shape[-2:]
    dtypes = (x.q.dtype, x.weights.dtype)
    batches, length = query_chunks(x.batch, x.queries, x.keys, 0, buffers=2)
    scores, teacher = (torch.empty(batches * length * x.keys, dtype=torch.float32, device=device) for _ in range(2))
    make_lse = lse is None
    if lse is None:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=device)
    own = dense.dense_teacher_spec(q.dtype, attn_heads, attn_dim, x.cmp_ratio, table, True, x.npu)
    teach = dense.dense_teacher_spec(q.dtype, attn_heads, attn_dim, x.cmp_ratio, table, False, x.npu)
    for_q, for_k = (dense.dense_gradient_spec(*dtypes, heads, dim, x.cmp_ratio, table, keys, x.npu) for keys in (False, True))
    tiles = triton.cdiv(x.keys, for_k.consts["BK"])
    splits = dense.key_splits(x.batch, x.queries, x.keys, for_k.consts["BK"])
    if gradients:
        dq = torch.empty_like(x.q)
        dweights = torch.empty(x.weights.shape, dtype=torch.float32, device=device)
        partial = torch.zeros(splits, *x.k.shape, dtype=torch.float32, device=device)
    for b0, some, i0, n in chunks_of(x.batch, x.queries, batches, length):
        sizes = (b0, i0, n, x.queries, x.keys, x.batch * x.queries, x.q_offset)
        if x.npu:
            x.launch(scores_ascend_spec(*dtypes, heads, dim, x.cmp_ratio, table), n * some, x.q, x.k, x.weights, span, scores, *sizes)
        else:
            launch_scores(x.q, x.k, x.weights, span, scores, x.cmp_ratio, table, some, *sizes)
        blocks = triton.cdiv(n, teach.consts["NQ"])
        if make_lse:
            x.launch(own, triton.cdiv(n, own.consts["NQ"]) * some, q, cmp_kv, span, lse, scale, *sizes)
        x.launch(teach, blocks * triton.cdiv(x.keys, teach.consts["BK"]) * some, q, cmp_kv, lse, span, teacher, scale, *sizes)
        _loss_of_rows(x, scores, teacher, None, scores, loss, counted, b0, i0, some, n)
        if gradients:
            inputs = (x.q, x.k, x.weights, scores, span)
            x.launch(for_q, n * some * triton.cdiv(heads, for_q.consts["HB"]), *inputs, dq, dweights, *sizes)
            x.launch(for_k, tiles * some * splits, *inputs, partial, *sizes, splits)
    return (dq, partial.sum(0), dweights) if gradients else ()
