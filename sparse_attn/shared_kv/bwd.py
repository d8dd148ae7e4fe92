"""The attention's backward in portable Triton: specialisations and launcher; the kernels are in bwd_kernels.py.

With P = exp(z - LSE), delta = sum_d dO * O, dP = dO . kv and dZ = P * (dP - delta):
    dq = scale * dZ @ kv,   dkv = scale * dZ^T @ q + P^T @ dO,   dsink = -sum exp(sink - LSE) * delta
In one kernel this needs more registers than there are, so there are two steps, on chunks of queries that bound the memory:
    1. a program per query and block of heads: dq, delta, and P^T and scale * dZ^T of every slot, [queries, slots, N]
    2. dkv from those. A key of a contiguous range (window, or all compressed entries) is seen by a contiguous range of queries, so a
       program owns a tile of keys and runs over its queries: no atomics. Where tiles are few, several programs share the queries of one,
       and their sums are added in order. Selected entries have no such order. There are three forms:
         dense, while there are few entries for the length of the lists: a slot for every entry, then as for a range, no atomics;
         atomic additions in fp32;
         deterministic: one partial row a slot that the entry's owner adds up in a fixed order (sparse_attn/shared_kv/owner.py).
Ascend always takes the last one: it would add element by element. Its tiles are smaller and its programs loop over tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton

from kernel_runtime.device import device_properties, grid_size, on_npu
from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from sparse_attn.shared_kv.bwd_kernels import attention_dq_kernel, range_dkv_kernel, selected_dkv_kernel
from sparse_attn.shared_kv.fwd import ALL, INDEX_BLOCK, NONE, SELECTED, forward_spec, mode_of, probs_spec
from sparse_attn.shared_kv.lists import occurrence_spec, single_lists, single_spec
from sparse_attn.shared_kv.owner import owner_lists, owner_spec, owner_sum
from sparse_attn.shared_kv.places import places_of
from sparse_attn.shared_kv.places import specs as places_specs
from sparse_attn.shared_kv.sinks import sink_gradient, sink_gradient_spec
from sparse_attn.shared_kv.tiles import FORMS, GPU, NPU, OLDER, Form, ascend_tiles, form_of, gradient_tiles, selected_keys, targets_of
from sparse_attn.shared_kv.used import used_of, used_spec

# P^T, dZ^T and partial rows of a chunk of queries stay below this
CHUNK_BYTES = 3 << 29
# Entries a slot of the lists up to which the dense form is taken. Its products grow with the entries, its sums need no atomics.
DENSE_LIMIT = 2
# Programs a multiprocessor that the tiles of a range's keys are shared out to: keys of a window are seen by equally many queries, the first
# entries by more than the last
WAVES = {0: 1, 2: 2}


@cache
def dq_spec(
    dtype: torch.dtype, N: int, D: int, compressed: int, dense: bool, npu: bool = False, form: Form = OLDER
) -> Spec:  # fmt: skip
    x, tiles = f"*{TRITON_DTYPE[dtype]}", ascend_tiles(dtype, N, D) if npu else gradient_tiles(dtype, N, D, form)
    return Spec(
        attention_dq_kernel,
        types={
            "q": x, "ori_kv": x, "cmp_kv": x, "indices": "*i32", "places": "*i32", "used": "*i32", "log_counts": "*fp32", "out": x, "dout": x,
            "lse": "*fp32", "dq": x, "delta_out": "*fp32", "p_out": x, "dz_out": x,
            **dict.fromkeys(("tasks", "row0", "rows", "K", "window_slots", "slots"), "i32"), "scale": "fp32",
        },
        consts={
            "N": N, "D": D, "COMPRESSED": compressed, "DENSE": dense, "BH": tiles.BH, "BN": tiles.BN, "BD": tiles.BD,
            "HALVES": tiles.HALVES, "BK": INDEX_BLOCK, "ASCEND": npu, "ARCH": form.arch[0],
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        targets=targets_of(npu, form),
        arch=form.arch,
        shared=form.shared,
    )  # fmt: skip


def _padded_heads(N: int) -> int:
    return max(16, triton.next_power_of_2(N))


def _channels(dtype: torch.dtype, D: int) -> int:
    """Channels of a dkv tile: 128 in 16-bit types; fp32 products take operands from registers and want less."""
    return min(128 if dtype != torch.float32 else 32, max(16, triton.next_power_of_2(D)))


@cache
def range_spec(dtype: torch.dtype, N: int, D: int, column: int, listed: bool = False, split: bool = False, npu: bool = False) -> Spec:
    """16-bit types on a GPU: 128 keys x 256 channels; elsewhere 64 keys."""
    x, wide = f"*{TRITON_DTYPE[dtype]}", not npu and dtype != torch.float32
    return Spec(
        range_dkv_kernel,
        types={
            "q": x, "dout": x, "places": "*i32", "counts": "*i32", "p": x, "dz": x, "dkv": "*fp32",
            **dict.fromkeys(("tasks", "keys", "row0", "rows", "first_slot", "slots", "steps", "splits"), "i32"),
        },
        consts={
            "N": N, "D": D, "COLUMN": column, "LISTED": listed, "SPLIT": split, "NH": min(64, _padded_heads(N)), "BM": 128 if wide else 64,
            "BD": min(256, max(16, triton.next_power_of_2(D))) if wide else _channels(dtype, D),
        },
        num_warps=8 if wide else 4,
        num_stages=2 if wide else 1,
        targets=NPU if npu else GPU,
    )  # fmt: skip


@cache
def selected_spec(dtype: torch.dtype, N: int, D: int, partial: bool, npu: bool = False, form: Form = OLDER) -> Spec:
    x = f"*{TRITON_DTYPE[dtype]}"
    return Spec(
        selected_dkv_kernel,
        types={
            "q": x, "dout": x, "indices": "*i32", "places": "*i32", "used": "*i32", "p": x, "dz": x, "target": x if partial else "*fp32",
            **dict.fromkeys(("tasks", "row0", "rows", "K", "first_slot", "slots"), "i32"),
        },
        consts={
            "N": N, "D": D, "PARTIAL": partial, "NH": _padded_heads(N), "BN": selected_keys(N, form), "BD": _channels(dtype, D),
            "BK": INDEX_BLOCK, "ASCEND": npu,
        },
        num_warps=8 if dtype == torch.float32 and N > 64 else 4,  # with 4 they would spill 1.9 KB a thread
        num_stages=3 if dtype != torch.float32 else 1,
        targets=targets_of(npu, form),
        arch=form.arch,
        shared=form.shared,
    )  # fmt: skip


def chunk_of(rows: int, row_bytes: int, device: torch.device) -> int:
    """Queries of a chunk: as many as CHUNK_BYTES allow, in whole waves of the grid where there is more than one."""
    chunk, cores = max(1, CHUNK_BYTES // max(1, row_bytes)), device_properties(device).cube_cores
    if chunk >= rows:
        return rows
    return chunk - chunk % cores if chunk > cores else chunk


def attention_bwd(
    dout: torch.Tensor, q: torch.Tensor, ori_kv: torch.Tensor, cmp_kv: torch.Tensor | None, cmp_indices: torch.Tensor | None,
    sinks: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, cu_q: torch.Tensor | None, cu_ori: torch.Tensor | None,
    cu_cmp: torch.Tensor | None, q_offsets: torch.Tensor | None, q_offset: int | None, scale: float, cmp_ratio: int, window: int | None,
    deterministic: bool, npu: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dori_kv, dcmp_kv, dsinks of the op shared_kv_bwd; an empty tensor for what was not given. npu: see `on_npu`."""
    npu, form = on_npu(q.device, npu), form_of(q.device)
    N, D = q.shape[-2:]
    dtype, mode = q.dtype, mode_of(cmp_kv, cmp_indices)
    q, dout, out, lse, ori_kv = (x.contiguous() for x in (q, dout, out, lse, ori_kv))
    rows = lse.numel() // N
    dq = torch.empty_like(q)
    delta = torch.empty_like(lse)
    dsinks = q.new_empty(0) if sinks is None else torch.zeros_like(sinks)
    dori = torch.zeros(ori_kv.shape, dtype=torch.float32, device=q.device)
    dcmp = torch.zeros(0 if cmp_kv is None else cmp_kv.shape, dtype=torch.float32, device=q.device)
    if rows:
        places = places_of(q, ori_kv, cmp_kv, cu_q, cu_ori, cu_cmp, q_offsets, q_offset, cmp_ratio, window)
        cmp = q if cmp_kv is None else cmp_kv.contiguous()
        indices = places if cmp_indices is None else cmp_indices.contiguous()
        K = cmp_indices.shape[-1] if cmp_indices is not None else 0
        window_slots = ori_kv.shape[-2] if window is None else min(window, ori_kv.shape[-2])
        entries = 0 if mode == NONE else cmp.shape[-2]
        dense = mode == SELECTED and not npu and entries <= DENSE_LIMIT * K
        slots = window_slots + (K if mode == SELECTED and not dense else entries)
        partial = (deterministic or npu) and mode == SELECTED and not dense
        row_bytes = (2 * slots * N + (K * D if partial else 0)) * dtype.itemsize + 8 * (entries + K) * dense
        chunk = chunk_of(rows, row_bytes, q.device)
        p = torch.empty((chunk, slots, N), dtype=dtype, device=q.device)
        dz = torch.empty_like(p)
        part = torch.empty((chunk, K, D), dtype=dtype, device=q.device) if partial else None
        used = used_of(indices, places) if mode == SELECTED and not npu else places
        first = dq_spec(dtype, N, D, mode, dense, npu, form)
        for row0 in range(0, rows, chunk):
            count = min(chunk, rows - row0)
            lists, counts, log_counts = single_lists(indices, places, row0, count, entries) if dense else (indices, places, lse)
            tasks = count * triton.cdiv(N, first.consts["BH"])
            grid = (grid_size(q.device, tasks, npu),)
            first.launch(
                grid, q, ori_kv, cmp, lists, places, used, log_counts, out, dout, lse, dq, delta, p, dz, tasks, row0, count, K, window_slots,
                slots, scale,
            )  # fmt: skip
            _add_range(q, dout, places, counts, p, dz, dori, row0, count, 0, 0, slots, False, npu)
            if mode == ALL or dense:
                _add_range(q, dout, places, counts, p, dz, dcmp, row0, count, 2, window_slots, slots, dense, npu)
            elif mode == SELECTED:
                spec = selected_spec(dtype, N, D, partial, npu, form)
                tasks = count * triton.cdiv(D, spec.consts["BD"])
                target = dcmp if part is None else part
                grid = (grid_size(q.device, tasks, npu),)
                spec.launch(grid, q, dout, indices, places, used, p, dz, target, tasks, row0, count, K, window_slots, slots)
                if part is not None:
                    owner_sum(part, *owner_lists(indices, places, row0, count, K, dcmp.numel() // D), dcmp, npu)
        if sinks is not None:
            dsinks = sink_gradient(sinks, lse, delta)
    return dq, dori.to(dtype), q.new_empty(0) if cmp_kv is None else dcmp.to(dtype), dsinks


def _add_range(
    q: torch.Tensor, dout: torch.Tensor, places: torch.Tensor, counts: torch.Tensor, p: torch.Tensor, dz: torch.Tensor, dkv: torch.Tensor,
    row0: int, count: int, column: int, first_slot: int, slots: int, listed: bool, npu: bool,
) -> None:  # fmt: skip
    N, D = q.shape[-2:]
    keys = dkv.numel() // D
    if not keys:
        return
    tiles = range_spec(q.dtype, N, D, column, listed, False, npu).consts
    tasks = triton.cdiv(keys, tiles["BM"]) * triton.cdiv(D, tiles["BD"])
    splits = 1 if npu else max(1, min(count, int(WAVES[column] * device_properties(q.device).cube_cores) // tasks))
    target = dkv if splits == 1 else torch.empty((splits, *dkv.shape), dtype=dkv.dtype, device=dkv.device)
    grid = (grid_size(q.device, tasks * splits, npu),)
    range_spec(q.dtype, N, D, column, listed, splits > 1, npu).launch(
        grid, q, dout, places, counts, p, dz, target, tasks * splits, keys, row0, count, first_slot, slots, count.bit_length(), splits
    )
    if splits > 1:
        dkv += target.sum(0)


def specs(shape: ModelShape) -> Iterator[Spec]:
    """What layers of this model launch, forward and backward: window alone, all entries, or selected ones, with sinks; one sequence a
    row or packed documents, right aligned."""
    dtype = next(d for d, name in TRITON_DTYPE.items() if name == shape.dtype)
    N, D = shape.heads, shape.head_dim
    yield from places_specs()
    for npu, form in (*((False, form) for form in FORMS), (True, OLDER)):
        for mode in (NONE, ALL, SELECTED):
            yield forward_spec(dtype, N, D, mode, True, npu, form)
            yield dq_spec(dtype, N, D, mode, False, npu, form)
        if not npu:
            yield dq_spec(dtype, N, D, SELECTED, True, form=form)
            yield selected_spec(dtype, N, D, False, form=form)
        yield selected_spec(dtype, N, D, True, npu, form)
        yield probs_spec(dtype, N, D, npu, form)
    for column, listed in ((0, False), (2, False), (2, True)):
        for split in (False, True):
            yield range_spec(dtype, N, D, column, listed, split)
    for column in (0, 2):
        yield range_spec(dtype, N, D, column, npu=True)
    yield used_spec()
    yield occurrence_spec()
    yield single_spec()
    yield owner_spec(dtype, D)
    yield sink_gradient_spec(N)
