"""Launcher of the dense backward for sm_90: dense_pdz.py (P, dZ, dq), dense_dkv.py (the keys' gradients), the sums that are left. The same
for the fast and the deterministic mode: no atomics."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
import triton

from kernel_runtime.launch import Spec
from sparse_attn.shared_kv.fwd import ALL, NONE
from sparse_attn.shared_kv.hopper.bwd_cast import cast_spec, cast_sums
from sparse_attn.shared_kv.hopper.core import laid_out, programs
from sparse_attn.shared_kv.hopper.dense import ENTRIES_MAX, RING, UNIT, dense_supports
from sparse_attn.shared_kv.hopper.dense_dkv import RUN_UNIT, SLICE, dense_dkv_spec
from sparse_attn.shared_kv.hopper.dense_halo import halo_sum_spec
from sparse_attn.shared_kv.hopper.dense_pdz import dense_pdz_spec
from sparse_attn.shared_kv.places import places_of
from sparse_attn.shared_kv.sinks import sink_gradient

CHUNK_BYTES = 3 << 29  # P and dZ of what is done at once


def dense_bwd_supports(D: int, window: int | None, mode: int, cmp_kv: torch.Tensor | None, packed: bool) -> bool:
    """As the forward's, without packs with entries: a run's entries are those of one sequence."""
    if mode == NONE:
        return dense_supports(D, window, 0)
    return mode == ALL and not packed and cmp_kv is not None and dense_supports(D, window, cmp_kv.shape[-2])


def pieces(batches: int, length: int, row_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """First row, length, first batch and number of batches of what is done at once: everything, or a part of a batch after the other."""
    if batches * length * row_bytes <= CHUNK_BYTES:
        yield 0, length, 0, batches
        return
    chunk = max(1, CHUNK_BYTES // row_bytes // RUN_UNIT.value) * RUN_UNIT.value
    for batch in range(batches):
        for begin in range(0, length, chunk):
            yield batch * length + begin, min(chunk, length - begin), batch, 1


def dense_backward_specs(dtype: torch.dtype, N: int, D: int) -> Iterator[Spec]:
    for compressed in (False, True):
        yield dense_pdz_spec(dtype, N, D, compressed)
        yield dense_dkv_spec(dtype, N, D, compressed)
    yield halo_sum_spec(D)
    yield cast_spec(dtype, D, 2)


def dense_attention_bwd(
    dout: torch.Tensor, q: torch.Tensor, ori_kv: torch.Tensor, cmp_kv: torch.Tensor | None, mode: int, sinks: torch.Tensor | None,
    lse: torch.Tensor, cu_q: torch.Tensor | None, cu_ori: torch.Tensor | None, cu_cmp: torch.Tensor | None, q_offsets: torch.Tensor | None,
    q_offset: int | None, scale: float, cmp_ratio: int, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As bwd.attention_bwd, for calls that dense_bwd_supports takes. Beside inputs and results at most CHUNK_BYTES for P and dZ, the fp32 sums
    of the keys' gradients, and the runs' halos and sums of entries: 23 MiB on 132 multiprocessors (350 KiB a batch from 67 on, with entries)."""
    N, D = q.shape[-2:]
    dtype, device = q.dtype, q.device
    q, dout, lse, ori_kv = (laid_out(x) for x in (q, dout, lse, ori_kv))
    rows = lse.numel() // N
    cmp_shape: tuple[int, ...] = (0,) if cmp_kv is None else tuple(cmp_kv.shape)
    dq, dori_kv, dcmp_kv = torch.empty_like(q), torch.empty_like(ori_kv), torch.empty(cmp_shape, dtype=dtype, device=device)
    sums = torch.zeros(ori_kv.numel() + prod(cmp_shape), dtype=torch.float32, device=device)
    dori, dcmp = sums[: ori_kv.numel()].view(-1, D), sums[ori_kv.numel() :]
    delta = torch.empty_like(lse)
    entries = ENTRIES_MAX if mode == ALL and dcmp.numel() else 0  # lists without a slot see no entry, whatever there is of them
    batches = q.shape[0] if entries else 1  # without entries nothing depends on whose keys they are
    pdz, dkv, halos = dense_pdz_spec(dtype, N, D, entries > 0), dense_dkv_spec(dtype, N, D, entries > 0), halo_sum_spec(D)
    todo = list(pieces(batches, rows // max(1, batches), 2 * N * (RING.value + entries) * q.element_size()))
    if rows:
        places = places_of(q, ori_kv, cmp_kv, cu_q, cu_ori, cu_cmp, q_offsets, q_offset, cmp_ratio, window)
        cmp = laid_out(cmp_kv) if cmp_kv is not None and entries else q  # stood in for where there is none
        most = max(length * number for _, length, _, number in todo) * N
        p, dz = (q.new_empty(most * RING.value) for _ in range(2))
        pe, dze = (q.new_empty(most * entries) if entries else p for _ in range(2))
        flat = [x.view(-1, N, *x.shape[q.dim() - 1 :]) for x in (q, dout, lse, dq, delta)]
        slices = D // SLICE.value
        for row0, length, batch0, number in todo:
            count, before = length * number, int(row0 > 0)
            q1, do1, lse1, dq1, delta1, places1 = (x[row0 : row0 + count] for x in (*flat, places))
            grid = programs(triton.cdiv(count, UNIT.value), device)
            pdz.launch((grid,), q1, ori_kv, cmp, do1, lse1, places1, dq1, p, dz, pe, dze, delta1, count, 0, scale)
            units = triton.cdiv(length, RUN_UNIT.value)
            runs = max(1, programs(units * number * slices, device) // (number * slices))
            halo = torch.empty((number * runs, RING.value, D), dtype=torch.float32, device=device)
            part = torch.empty((number, runs, entries, D), dtype=torch.float32, device=device) if entries else halo
            dkv.launch((number * runs * slices,), q1, do1, p, dz, pe, dze, places1, dori, halo, part, length, runs, before, 0)
            if number * runs > 1 or before:
                halos.launch((number * runs * halos.consts["KEYS"],), halo, places1, dori, length, runs, number * runs, before)
            if entries:
                target = dcmp.view(batches, -1, D)[batch0 : batch0 + number]
                target += part[:, :, : target.shape[1]].sum(1)
    dsinks = q.new_empty(0) if sinks is None else sink_gradient(sinks, lse, delta) if rows else torch.zeros_like(sinks)
    cast_sums(sums, dori_kv, dcmp_kv, 2)  # the order of the channels is their own
    return dq, dori_kv, dcmp_kv, dsinks
