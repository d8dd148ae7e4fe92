"""KL loss backward: the saved gradients times a scalar tensor and a factor; and the specs of both directions for the registry."""

from collections.abc import Iterator
from functools import cache
from itertools import product

import torch
import triton
import triton.language as tl

from indexer.core import span_spec
from indexer.gradients import gradient_specs
from indexer.kl_loss.dense import dense_gradient_spec, dense_teacher_spec
from indexer.kl_loss.fused import loss_gradients_spec
from indexer.kl_loss.fwd import rows_spec, total_spec
from indexer.kl_loss.slots import slot_scores_spec, slot_teacher_spec
from indexer.lightning.ascend.scores import scores_ascend_spec
from indexer.lightning.fwd import score_specs
from kernel_runtime.device import grid_size, on_npu
from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape

BLOCK = 4096


@triton.jit
def scale_blocks(x, factor, out, tail, tasks, B: tl.constexpr):
    """out = x * factor in blocks of B elements; the last has `tail`. (A number of all elements would be a 32- or a 64-bit argument by its value.)"""
    place = tl.arange(0, B)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        first = tl.cast(task, tl.int64) * B  # from here on 32 bits
        if task < tasks - 1:  # with a mask, elements would be moved one at a time
            value = tl.load(x + first + place).to(tl.float32) * factor
            tl.store(out + first + place, value.to(out.dtype.element_ty))
        else:
            value = tl.load(x + first + place, mask=place < tail, other=0.0).to(tl.float32) * factor
            tl.store(out + first + place, value.to(out.dtype.element_ty), mask=place < tail)


@triton.jit(do_not_specialize=["factor", "q_tail", "q_tasks", "k_tail", "k_tasks", "w_tail", "w_tasks"])
def scale_kernel(
    dq, dk, dweights, dloss, dq_out, dk_out, dweights_out, factor, q_tail, q_tasks, k_tail, k_tasks, w_tail, w_tasks, B: tl.constexpr,
):  # fmt: skip
    """The three gradients in one launch, which takes about as long as the two small ones."""
    scale = tl.load(dloss) * factor
    scale_blocks(dq, scale, dq_out, q_tail, q_tasks, B)
    scale_blocks(dk, scale, dk_out, k_tail, k_tasks, B)
    scale_blocks(dweights, scale, dweights_out, w_tail, w_tasks, B)


@cache
def scale_spec(dtype: torch.dtype, weights_dtype: torch.dtype) -> Spec:
    name, weights_name = TRITON_DTYPE[dtype], TRITON_DTYPE[weights_dtype]
    pointers = {"dq": name, "dk": "fp32", "dweights": "fp32", "dloss": "fp32", "dq_out": name, "dk_out": name, "dweights_out": weights_name}
    sizes = ("q_tail", "q_tasks", "k_tail", "k_tasks", "w_tail", "w_tasks")
    types = {n: f"*{kind}" for n, kind in pointers.items()} | {"factor": "fp32"} | dict.fromkeys(sizes, "i32")
    return Spec(scale_kernel, types=types, consts={"B": BLOCK})


def indexer_kl_loss_bwd(
    dq_index: torch.Tensor,
    dk_index: torch.Tensor,
    dweights: torch.Tensor,
    dloss: torch.Tensor,
    factor: float,
    weights_dtype: torch.dtype,
    npu: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    gradients = dq_index.contiguous(), dk_index.contiguous(), dweights.contiguous()
    dtypes = dq_index.dtype, dq_index.dtype, weights_dtype
    results = tuple(torch.empty(x.shape, dtype=dtype, device=x.device) for x, dtype in zip(gradients, dtypes))
    blocks = [-(-x.numel() // BLOCK) for x in gradients]
    if most := max(blocks):
        sizes = [n for x, count in zip(gradients, blocks) for n in (x.numel() - (count - 1) * BLOCK, count)]
        grid = (grid_size(dq_index.device, most, on_npu(dq_index.device, npu), vector=True),)
        scale_spec(dq_index.dtype, weights_dtype).launch(grid, *gradients, dloss, *results, factor, *sizes)
    return results


def specs(shape: ModelShape) -> Iterator:
    ratio = shape.csa_ratio
    if ratio not in shape.ratios:
        return  # no layer has an indexer
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[shape.dtype]
    indexers = [(dtype, weights, shape.index_heads, shape.index_dim) for weights in dict.fromkeys((dtype, torch.float32))]  # the op takes either
    attention = (dtype, shape.heads, shape.head_dim)
    yield span_spec(ratio, True, False)
    yield total_spec()
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
                continue
            yield from score_specs(*index, ratio, table)
    for table in (False, True):
        yield from gradient_specs(dtype, [index[1] for index in indexers], shape.index_heads, shape.index_dim, shape.index_topk, table)
        for index, marginal in product(indexers, (False, True)):
            yield loss_gradients_spec(*index, shape.index_topk, ratio, table, marginal)
    for weights in dict.fromkeys((dtype, torch.float32)):
        yield scale_spec(dtype, weights)
