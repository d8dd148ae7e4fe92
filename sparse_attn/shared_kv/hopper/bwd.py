"""Launcher of the backward for sm_90: the fused kernel, the sums of partial rows, the gradient of the sinks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod

import torch
import triton

from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from sparse_attn.shared_kv.bwd import chunk_of
from sparse_attn.shared_kv.fwd import ALL, NONE, SELECTED, mode_of
from sparse_attn.shared_kv.hopper import DTYPES, HEAD_DIMS
from sparse_attn.shared_kv.hopper.bwd_cast import cast_spec, cast_sums
from sparse_attn.shared_kv.hopper.bwd_kernel import hopper_bwd_kernel
from sparse_attn.shared_kv.hopper.core import HEADS, laid_out, programs
from sparse_attn.shared_kv.hopper.dense import dense_supports
from sparse_attn.shared_kv.hopper.dense_bwd import dense_attention_bwd, dense_backward_specs, dense_bwd_supports
from sparse_attn.shared_kv.hopper.dense_fwd import dense_forward_spec
from sparse_attn.shared_kv.hopper.fwd import forward_specs
from sparse_attn.shared_kv.hopper.owner_sum import (
    LIST_SLOTS,
    bounds_spec,
    list_sum,
    list_sum_spec,
    owner_lists,
    owner_spec,
    range_bounds,
    range_sum,
    range_sum_spec,
)
from sparse_attn.shared_kv.hopper.probs import probs_spec
from sparse_attn.shared_kv.places import places_of
from sparse_attn.shared_kv.places import specs as places_specs
from sparse_attn.shared_kv.sinks import sink_gradient, sink_gradient_spec
from sparse_attn.shared_kv.used import used_of, used_spec


@cache
def backward_spec(dtype: torch.dtype, N: int, D: int, compressed: int, partial: bool) -> Spec:
    x = f"*{TRITON_DTYPE[dtype]}"
    target = x if partial else "*fp32"
    return Spec(
        hopper_bwd_kernel,
        types={
            "q": x, "ori_kv": x, "cmp_kv": x, "indices": "*i32", "places": "*i32", "used": "*i32", "do": x, "out": x, "lse": "*fp32",
            "delta": "*fp32", "dq": x, "dori": target, "dcmp": target,
            **dict.fromkeys(("row0", "count", "tasks", "K", "ori_slots", "cmp_slots", "zero"), "i32"), "scale": "fp32",
        },
        consts={"N": N, "D": D, "COMPRESSED": compressed, "PARTIAL": partial},
        targets=("cuda",),
    )  # fmt: skip


def attention_bwd(
    dout: torch.Tensor, q: torch.Tensor, ori_kv: torch.Tensor, cmp_kv: torch.Tensor | None, cmp_indices: torch.Tensor | None,
    sinks: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, cu_q: torch.Tensor | None, cu_ori: torch.Tensor | None,
    cu_cmp: torch.Tensor | None, q_offsets: torch.Tensor | None, q_offset: int | None, scale: float, cmp_ratio: int, window: int | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dori_kv, dcmp_kv, dsinks of the op shared_kv_bwd, for calls that hopper_supports takes; empty for what was not given."""
    N, D = q.shape[-2:]
    dtype, mode = q.dtype, mode_of(cmp_kv, cmp_indices)
    if dense_bwd_supports(D, window, mode, cmp_kv, cu_q is not None):
        return dense_attention_bwd(
            dout, q, ori_kv, cmp_kv, mode, sinks, lse, cu_q, cu_ori, cu_cmp, q_offsets, q_offset, scale, cmp_ratio, window
        )
    q, dout, out, lse, ori_kv = (laid_out(x) for x in (q, dout, out, lse, ori_kv))
    rows = lse.numel() // N
    cmp_shape = (0,) if cmp_kv is None else cmp_kv.shape
    dq, dori_kv, dcmp_kv = torch.empty_like(q), torch.empty_like(ori_kv), torch.empty(cmp_shape, dtype=dtype, device=q.device)
    dsinks = q.new_empty(0) if sinks is None else torch.zeros_like(sinks)
    sums = torch.zeros(ori_kv.numel() + prod(cmp_shape), dtype=torch.float32, device=q.device)
    dori, dcmp = sums[: ori_kv.numel()].view(ori_kv.shape), sums[ori_kv.numel() :].view(cmp_shape)
    if rows:
        places = places_of(q, ori_kv, cmp_kv, cu_q, cu_ori, cu_cmp, q_offsets, q_offset, cmp_ratio, window)
        cmp = q if cmp_kv is None else laid_out(cmp_kv)
        indices = places if cmp_indices is None else cmp_indices.contiguous()
        used = used_of(indices, places) if mode == SELECTED else places
        delta = torch.empty_like(lse)
        spec = backward_spec(dtype, N, D, mode, deterministic)
        groups = triton.cdiv(N, HEADS)
        K = cmp_indices.shape[-1] if cmp_indices is not None else 0
        inputs = (q, ori_kv, cmp, indices, places, used, dout, out, lse, delta, dq)
        if not deterministic:
            tasks = rows * groups
            spec.launch((programs(tasks, q.device),), *inputs, dori, dcmp if mode != NONE else dori, 0, rows, tasks, K, 0, 0, 0, scale)
        else:
            ori_slots = ori_kv.shape[-2] if window is None else min(window, ori_kv.shape[-2])
            cmp_slots = K if mode == SELECTED else cmp.shape[-2] if mode == ALL else 0
            _partial_sums(spec, inputs, dori.view(-1, D), dcmp.view(-1, D), rows, groups, K, ori_slots, cmp_slots, mode, scale)
        if sinks is not None:
            dsinks = sink_gradient(sinks, lse, delta)
    cast_sums(sums, dori_kv, dcmp_kv, 16 // (dtype if deterministic else torch.float32).itemsize)
    return dq, dori_kv, dcmp_kv, dsinks


def _partial_sums(
    spec: Spec, inputs: tuple[torch.Tensor, ...], dori: torch.Tensor, dcmp: torch.Tensor, rows: int, groups: int, K: int, ori_slots: int,
    cmp_slots: int, mode: int, scale: float,
) -> None:  # fmt: skip
    """The deterministic form: chunk after chunk of queries, partial rows and then their sums."""
    q, _, _, indices, places, *_ = inputs
    D, device = q.shape[-1], q.device
    chunk = chunk_of(rows, groups * (ori_slots + cmp_slots) * D * q.element_size(), device)
    part = torch.empty(chunk * groups * (ori_slots + cmp_slots) * D, dtype=q.dtype, device=device)
    ori_bounds = range_bounds(places, dori.shape[0], 0)
    cmp_bounds = range_bounds(places, dcmp.shape[0], 2) if mode == ALL else ori_bounds
    listed = chunk * max(1, LIST_SLOTS // max(1, K * chunk))  # queries whose lists are made at once
    starts = order = ori_bounds
    for row0 in range(0, rows, chunk):
        count = min(chunk, rows - row0)
        part_ori = part[: groups * count * ori_slots * D].view(groups, count, ori_slots, D)
        part_cmp = part[part_ori.numel() : part_ori.numel() + groups * count * cmp_slots * D].view(groups, count, cmp_slots, D)
        if mode == SELECTED and row0 % listed == 0:
            starts, order = owner_lists(indices, places, row0, min(listed, rows - row0), chunk, K, dcmp.shape[0])
        tasks = count * groups
        spec.launch((programs(tasks, device),), *inputs, part_ori, part_cmp, row0, count, tasks, K, ori_slots, cmp_slots, 0, scale)
        range_sum(part_ori, places, ori_bounds, dori, row0, 0)
        if mode == ALL:
            range_sum(part_cmp, places, cmp_bounds, dcmp, row0, 2)
        elif mode == SELECTED:
            local = row0 % listed
            list_sum(part_cmp, starts, order, dcmp, local // chunk, local * K)


def specs(shape: ModelShape) -> Iterator[Spec]:
    """What layers of this model launch where hopper_supports says yes, forward and backward, with sinks."""
    dtype = next(d for d, name in TRITON_DTYPE.items() if name == shape.dtype)
    N, D = shape.heads, shape.head_dim
    if dtype not in DTYPES or D not in HEAD_DIMS:
        return
    groups = triton.cdiv(N, HEADS)
    yield from places_specs()
    yield used_spec()
    yield probs_spec(dtype, N, D)
    for group in (4, 8):
        yield cast_spec(dtype, D, group)
    yield sink_gradient_spec(N)
    dense = dense_supports(D, shape.window, 0)
    if dense:
        yield dense_forward_spec(dtype, N, D, False, True)
        yield dense_forward_spec(dtype, N, D, True, True)
        yield from dense_backward_specs(dtype, N, D)
    for mode in (NONE, ALL, SELECTED):
        if mode != NONE or not dense:
            yield from forward_specs(dtype, N, D, mode, True)
            for partial in (False, True):
                yield backward_spec(dtype, N, D, mode, partial)
    for column in (0, 2):
        yield bounds_spec(column)
        yield range_sum_spec(dtype, groups, D, column)
    for short in (False, True):
        yield owner_spec(short)
    yield list_sum_spec(dtype, groups, D)
