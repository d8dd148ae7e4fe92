"""Lightning indexer backward: launcher, and the specs of both directions for the registry."""

from collections.abc import Iterator

import torch

from indexer.core import span_spec, visible_table
from indexer.gradients import gradient_specs, slot_gradients
from indexer.lightning.ascend.scores import scores_ascend_spec
from indexer.lightning.ascend.topk import order_ascend_spec, select_ascend_spec
from indexer.lightning.filter import selection
from indexer.lightning.fwd import score_specs
from indexer.lightning.topk import WIDE, order_spec, row_lengths
from kernel_runtime.registry import ModelShape


def lightning_indexer_bwd(
    dscores: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    deterministic: bool,
    npu: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, weights, indices, dscores = (x.contiguous() for x in (q, k, weights, indices, dscores))
    span = visible_table(1, q.shape[0], k.shape[-2], 1, cu_seqlens_q, cu_seqlens_k, 0, None, q.device)  # BSND: None
    dq, dk, dweights = slot_gradients(q, k, weights, indices, dscores, span, deterministic, npu)
    return dq, dk.to(k.dtype), dweights.to(weights.dtype)


def specs(shape: ModelShape) -> Iterator:
    ratio = shape.csa_ratio
    if ratio not in shape.ratios:
        return  # no layer has an indexer
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[shape.dtype]
    heads, dim, topk = shape.index_heads, shape.index_dim, shape.index_topk
    yield span_spec(ratio, True, False)
    yield span_spec(1, True, False)
    for table in (False, True):
        for _, most in row_lengths(1, 2 * WIDE):
            yield from selection(topk, ratio, table, most, True)
        yield order_spec(topk, ratio, table, True)
        both = tuple(dict.fromkeys((dtype, torch.float32)))  # the ops take either
        yield from gradient_specs(dtype, both, heads, dim, topk, table)
        for weights in both:
            yield from score_specs(dtype, weights, heads, dim, ratio, table)
            yield scores_ascend_spec(dtype, weights, heads, dim, ratio, table)
        for held in (False, True):
            yield select_ascend_spec(topk, ratio, table, held)
        yield order_ascend_spec(topk, ratio, table, True)
