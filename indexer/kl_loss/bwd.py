"""KL loss backward: the saved gradients times one scalar tensor; and the specs of both directions for the registry."""

from collections.abc import Iterator
from functools import cache
from itertools import product

import torch
import triton
import triton.language as tl

from indexer.core import span_spec
from indexer.gradients import gradients_spec, owner_sum_spec
from indexer.kl_loss.dense import dense_gradient_spec, dense_teacher_spec
from indexer.kl_loss.fwd import rows_spec
from indexer.kl_loss.slots import slot_scores_spec, slot_teacher_spec
from indexer.lightning.ascend.scores import scores_ascend_spec
from indexer.lightning.fwd import scores_spec
from kernel_runtime.device import grid_size, on_npu
from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape

BLOCK = 4096


@triton.jit(do_not_specialize=["tail", "tasks"])
def scale_kernel(x, scale, out, tail, tasks, B: tl.constexpr):
    """Blocks of B elements; the last has `tail`. (A number of all elements would be a 32- or a 64-bit argument by its value.)"""
    place = tl.arange(0, B)
    factor = tl.load(scale)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        first = tl.cast(task, tl.int64) * B  # from here on 32 bits
        if task < tasks - 1:  # with a mask, elements would be moved one at a time
            value = tl.load(x + first + place).to(tl.float32) * factor
            tl.store(out + first + place, value.to(out.dtype.element_ty))
        else:
            value = tl.load(x + first + place, mask=place < tail, other=0.0).to(tl.float32) * factor
            tl.store(out + first + place, value.to(out.dtype.element_ty), mask=place < tail)


@cache
def scale_spec(dtype: torch.dtype, out_dtype: torch.dtype) -> Spec:
    return Spec(
        scale_kernel,
        types={"x": f"*{TRITON_DTYPE[dtype]}", "scale": "*fp32", "out": f"*{TRITON_DTYPE[out_dtype]}", "tail": "i32", "tasks": "i32"},
        consts={"B": BLOCK},
    )


def indexer_kl_loss_bwd(
    dq_index: torch.Tensor,
    dk_index: torch.Tensor,
    dweights: torch.Tensor,
    scale: torch.Tensor,
    weights_dtype: torch.dtype,
    npu: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    results = []
    for grad, dtype in zip((dq_index, dk_index, dweights), (dq_index.dtype, dq_index.dtype, weights_dtype)):
        out = torch.empty(grad.shape, dtype=dtype, device=grad.device)
        if blocks := triton.cdiv(grad.numel(), BLOCK):
            tail = grad.numel() - (blocks - 1) * BLOCK
            grid = (grid_size(grad.device, blocks, on_npu(grad.device, npu), vector=True),)
            scale_spec(grad.dtype, dtype).launch(grid, grad.contiguous(), scale, out, tail, blocks)
        results.append(out)
    return tuple(results)


def specs(shape: ModelShape) -> Iterator:
    ratio = shape.csa_ratio
    if ratio not in shape.ratios:
        return  # no layer has an indexer
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[shape.dtype]
    indexers = [(dtype, weights, shape.index_heads, shape.index_dim) for weights in dict.fromkeys((dtype, torch.float32))]  # the op takes either
    attention = (dtype, shape.heads, shape.head_dim)
    yield span_spec(ratio, True, False)
    for table, npu in product((False, True), repeat=2):
        for own in (False, True):
            yield slot_teacher_spec(*attention, shape.index_topk, ratio, table, own, npu)
            yield dense_teacher_spec(*attention, ratio, table, own, npu)
        for slots, marginal in product((0, shape.index_topk), (False, True)):
            yield rows_spec(ratio, table, slots, marginal, npu=npu)
            if slots and not table and not npu:
                yield rows_spec(ratio, table, slots, marginal, whole=True)
        for index in indexers:
            yield slot_scores_spec(*index, shape.index_topk, ratio, table, npu)
            for keys in (False, True):
                yield dense_gradient_spec(*index, ratio, table, keys, npu)
            if npu:
                yield scores_ascend_spec(*index, ratio, table)
                yield gradients_spec(*index, shape.index_topk, table, torch.int32, npu=True)
                continue
            yield scores_spec(*index, ratio, table)
            for owners in (None, torch.int16, torch.int32):
                yield gradients_spec(*index, shape.index_topk, table, owners)
    for npu in (False, True):
        yield owner_sum_spec(dtype, shape.index_dim, npu)
    yield scale_spec(dtype, dtype)
    yield scale_spec(torch.float32, dtype)
    yield scale_spec(torch.float32, torch.float32)
