"""Launcher of the dense backward for sm_90: dense_pdz.py or dense_pdz_streamed.py (P, dZ, dq), dense_dkv.py (the keys' gradients), dense_totals.py
(the sums that are left). The same for the fast and the deterministic mode: no atomics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton

from kernel_runtime.launch import Spec
from sparse_attn.shared_kv.fwd import ALL, NONE
from sparse_attn.shared_kv.hopper.core import laid_out, programs
from sparse_attn.shared_kv.hopper.dense import ENTRIES_MAX, RING, UNIT, dense_supports
from sparse_attn.shared_kv.hopper.dense_dkv import RUN_UNIT, SLICE, dense_dkv_spec
from sparse_attn.shared_kv.hopper.dense_pdz import dense_pdz_spec
from sparse_attn.shared_kv.hopper.dense_pdz_streamed import streamed_pdz_spec
from sparse_attn.shared_kv.hopper.dense_totals import SHARES, dense_totals_spec, sink_total_spec
from sparse_attn.shared_kv.places import places_of

CHUNK_BYTES = 3 << 29  # P and dZ of what is done at once
FEW, MANY = 64, 128  # entries that the streaming form of the first kernel takes


def dense_bwd_supports(D: int, window: int | None, mode: int, cmp_kv: torch.Tensor | None, packed: bool) -> bool:
    """As the forward's, without packs with entries, whose runs would not be of one sequence, and with up to MANY entries."""
    if mode == NONE:
        return dense_supports(D, window, 0)
    return mode == ALL and not packed and cmp_kv is not None and cmp_kv.shape[-2] <= MANY and dense_supports(D, window, 0)


class Piece(NamedTuple):
    """Queries that are done at once: `number` batches from `batch` on, `length` queries from row `row` on of each, which see `entries` entries at
    most, as many as kernels have room for."""

    row: int
    length: int
    batch: int
    number: int
    entries: int


def widths(length: int, entries: int, cmp_ratio: int, first: int | None) -> list[tuple[int, int]]:
    """(end of queries, entries that kernels need for them) of a sequence of `length` queries, the first of them at position `first` (None: not known
    here). The queries that see few enough for a faster form are done apart."""
    if entries <= ENTRIES_MAX:
        return [(length, ENTRIES_MAX if entries else 0)]
    parts = []
    begin = 0
    for width in (ENTRIES_MAX, FEW, MANY):
        # queries before this one see `width` entries at most
        end = length if entries <= width else begin
        if entries > width and first is not None:
            end = min(((width + 1) * cmp_ratio - 1 - first) // RUN_UNIT.value * RUN_UNIT.value, length)
        if end > begin:
            parts.append((end, width))
            begin = end
        if begin >= length:
            break
    return parts


def pieces(batches: int, length: int, row_bytes: Callable[[int], int], parts: list[tuple[int, int]]) -> Iterator[Piece]:
    """Everything at once, or a part of a batch after the other: those of `widths`, each in chunks. row_bytes: of a query with that many entries."""
    if len(parts) == 1 and batches * length * row_bytes(parts[0][1]) <= CHUNK_BYTES:
        yield Piece(0, length, 0, batches, parts[0][1])
        return
    for batch in range(batches):
        begin = 0
        for end, entries in parts:
            chunk = max(1, CHUNK_BYTES // row_bytes(entries) // RUN_UNIT.value) * RUN_UNIT.value
            for row in range(begin, end, chunk):
                yield Piece(batch * length + row, min(chunk, end - row), batch, 1, entries)
            begin = end


def pdz_spec(dtype: torch.dtype, N: int, D: int, entries: int) -> Spec:
    return (dense_pdz_spec if entries <= ENTRIES_MAX else streamed_pdz_spec)(dtype, N, D, entries)


def dense_backward_specs(dtype: torch.dtype, N: int, D: int) -> Iterator[Spec]:
    for entries in (0, ENTRIES_MAX, FEW, MANY):
        yield pdz_spec(dtype, N, D, entries)
        yield dense_totals_spec(dtype, N, D, entries)
    for entries, most in ((0, 0), (ENTRIES_MAX, ENTRIES_MAX), (ENTRIES_MAX, FEW), (ENTRIES_MAX, MANY), (FEW, FEW), (FEW, MANY), (MANY, MANY)):
        yield dense_dkv_spec(dtype, N, D, entries, most)
    yield sink_total_spec(N)


def all_keys_seen(S: int, S2: int, packed: bool, q_offsets: torch.Tensor | None, first: int, window: int | None) -> bool:
    """Whether every key is seen by a query, as far as the shapes tell: else sums of keys begin with zeros."""
    return not packed and q_offsets is None and window is not None and first < window and first + S >= S2


def dense_attention_bwd(
    dout: torch.Tensor, q: torch.Tensor, ori_kv: torch.Tensor, cmp_kv: torch.Tensor | None, mode: int, sinks: torch.Tensor | None,
    lse: torch.Tensor, cu_q: torch.Tensor | None, cu_ori: torch.Tensor | None, cu_cmp: torch.Tensor | None, q_offsets: torch.Tensor | None,
    q_offset: int | None, scale: float, cmp_ratio: int, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As bwd.attention_bwd, for calls that dense_bwd_supports takes. Beside inputs and results at most CHUNK_BYTES for P and dZ, the fp32 sums
    of the keys' gradients, and the runs' halos and sums of entries: 288 KiB a run and 64 to 256, a quarter as many as there are multiprocessors at
    D = 512 (one a batch, if these are more) to a piece."""
    N, D = q.shape[-2:]
    dtype, device = q.dtype, q.device
    q, dout, lse, ori_kv = (laid_out(x) for x in (q, dout, lse, ori_kv))
    rows, keys, S, S2 = lse.numel() // N, ori_kv.numel() // D, q.shape[-3], ori_kv.shape[-2]
    cmp_shape: tuple[int, ...] = (0,) if cmp_kv is None else tuple(cmp_kv.shape)
    dq, dori_kv, dcmp_kv = torch.empty_like(q), torch.empty_like(ori_kv), torch.empty(cmp_shape, dtype=dtype, device=device)
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    if not rows:
        return dq, dori_kv.zero_(), dcmp_kv.zero_(), dsinks.zero_()
    # lists without a slot see no entry, whatever there is of them
    held = cmp_kv.shape[-2] if cmp_kv is not None and mode == ALL and dcmp_kv.numel() else 0
    batches = q.shape[0] if held else 1  # without entries nothing depends on whose keys they are
    first = S2 - S if q_offset is None else q_offset
    parts = widths(rows // batches, held, cmp_ratio, None if q_offsets is not None else first)
    most = parts[-1][1]
    todo = list(pieces(batches, rows // batches, lambda entries: 2 * N * (RING.value + entries) * q.element_size(), parts))
    slices = D // SLICE.value
    tasks = [triton.cdiv(piece.length, RUN_UNIT.value) * piece.number * slices for piece in todo]
    runs = [max(1, programs(n, device) // (piece.number * slices)) for n, piece in zip(tasks, todo)]
    every = sum(n * piece.number for n, piece in zip(runs, todo))
    seen = all_keys_seen(S, S2, cu_q is not None, q_offsets, first, window)
    sums = (torch.empty if seen else torch.zeros)((keys, D), dtype=torch.float32, device=device)
    halo = torch.empty((every, RING.value, D), dtype=torch.float32, device=device)
    part = torch.empty((every, most, D), dtype=torch.float32, device=device) if held else halo
    bounds = torch.empty((every, 4), dtype=torch.int32, device=device)
    p, dz = (q.new_empty(max(x.length * x.number for x in todo) * N * RING.value) for _ in range(2))
    pe, dze = (q.new_empty(max(x.length * x.number * x.entries for x in todo) * N) if held else p for _ in range(2))
    places = places_of(q, ori_kv, cmp_kv, cu_q, cu_ori, cu_cmp, q_offsets, q_offset, cmp_ratio, window)
    cmp = laid_out(cmp_kv) if cmp_kv is not None and held else q  # stood in for where there is none
    delta = torch.empty_like(lse)
    flat = [x.view(-1, N, *x.shape[q.dim() - 1 :]) for x in (q, dout, lse, dq, delta)]
    done = 0
    for (row, length, _, number, entries), n in zip(todo, runs):
        count, before = length * number, int(row > 0)
        q1, do1, lse1, dq1, delta1, places1 = (x[row : row + count] for x in (*flat, places))
        grid = programs(triton.cdiv(count, UNIT.value), device)
        pdz = pdz_spec(dtype, N, D, entries)
        pdz.launch((grid,), q1, ori_kv, cmp, do1, lse1, places1, dq1, p, dz, pe, dze, delta1, count, 0, scale)
        dkv = dense_dkv_spec(dtype, N, D, entries, most)
        dkv.launch((number * n * slices,), q1, do1, p, dz, pe, dze, places1, sums, halo[done:], part[done:], bounds[done:], length, n, before, 0)
        done += number * n
    totals = dense_totals_spec(dtype, N, D, most)
    shares = 0 if sinks is None else min(SHARES, triton.cdiv(rows, totals.consts["BS"]))
    share = torch.empty((max(1, shares), N), dtype=torch.float32, device=device)
    grid = shares + triton.cdiv(keys, totals.consts["BM"]) + batches * held * (D // totals.consts["BD"])
    if grid:
        totals.launch(
            (grid,), sums, halo, bounds, dori_kv, part, dcmp_kv if held else dori_kv, lse if sinks is None else sinks.contiguous(), lse, delta, share,
            keys, every, max(1, held), every // batches, rows, shares,
        )  # fmt: skip
    if shares:
        sink_total_spec(N).launch((1,), share, dsinks, shares)
    return dq, dori_kv, dcmp_kv if held else dcmp_kv.zero_(), dsinks
