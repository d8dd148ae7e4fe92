"""The attention's forward in portable Triton: kernels, tile table, launcher.

One program takes one query and a block of its heads, and gathers the keys it sees in tiles of BN. Queries do not share keys: the output
accumulator of 64 heads x 512 channels is half of a register file, so a second query does not fit. D above 256 is split into two halves of
256, two accumulators, as one wide product spills. The sink is a key without a value that joins at the end.

Ascend takes the same kernels with smaller tiles (the accumulator lives in the unified buffer, q and the keys in L1), looping over tasks.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.device import grid_size, on_npu
from kernel_runtime.kernels import dot
from kernel_runtime.launch import TRITON_DTYPE, Spec
from sparse_attn.shared_kv.core import load_ranges, load_rows, range_rows, selected_rows, store_rows, tile_rows, used_slots_ascend, zero_tile
from sparse_attn.shared_kv.places import places_of
from sparse_attn.shared_kv.tiles import OLDER, Form, ascend_tiles, form_of, forward_tiles, probs_tiles, targets_of
from sparse_attn.shared_kv.used import used_of

INDEX_BLOCK = 512

# COMPRESSED: which compressed entries a query sees
NONE, ALL, SELECTED = 0, 1, 2


@triton.jit
def add_product(a, b, s, scale, BH: tl.constexpr, BN: tl.constexpr):
    """scale * (s + a @ b), two products that do not know of each other (see attend): scaled before they are added, as Triton makes an
    accumulator of a bare sum."""
    return s * scale + dot(a, b, tl.zeros([BH, BN], tl.float32)) * scale


@triton.jit
def scores(q0, q1, k0, k1, seen, m, scale2, HALVES: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, APART: tl.constexpr):
    """Weights of a tile in the keys' dtype, their sums and the new maximum of each row. APART: see attend."""
    s = dot(q0, tl.trans(k0), tl.zeros([BH, BN], tl.float32))
    if HALVES == 2 and APART:
        s = add_product(q1, tl.trans(k1), s, scale2, BH, BN)
    elif HALVES == 2:
        s = dot(q1, tl.trans(k1), s) * scale2
    else:
        s = s * scale2
    s = tl.where(seen[None, :], s, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    return p.to(k0.dtype), tl.sum(p, 1), new


@triton.jit
def attend(
    keys, rows, seen, q0, q1, m, l, acc0, acc1, scale2, always,
    D: tl.constexpr, BD: tl.constexpr, HALVES: tl.constexpr, EVEN: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """One tile of the online softmax. scale2 is the scale times log2(e): weights are powers of two.

    APART: S and its softmax lie in a branch, always taken as `always` is never negative. To a product whose result goes into another one
    Triton gives warpsPerCTA [8, 1], 128 rows: for the 64 rows of S that means that both warpgroups make all of it, and its softmax. It
    does not look for where a result goes beyond the end of a branch.
    """
    d = tl.arange(0, BD)
    k0 = load_rows(keys, rows, seen, d, D, EVEN)
    k1 = k0
    if HALVES == 2:
        k1 = load_rows(keys, rows, seen, BD + d, D, EVEN)
    if APART:
        new = m
        p = tl.zeros([BH, BN], k0.dtype)
        part = tl.zeros([BH], tl.float32)
        if always >= 0:
            p, part, new = scores(q0, q1, k0, k1, seen, m, scale2, HALVES, BH, BN, True)
    else:
        p, part, new = scores(q0, q1, k0, k1, seen, m, scale2, HALVES, BH, BN, False)
    alpha = tl.exp2(m - new)
    l = l * alpha + part
    acc0 = dot(p, k0, acc0 * alpha[:, None])
    if HALVES == 2:
        acc1 = dot(p, k1, acc1 * alpha[:, None])
    return new, l, acc0, acc1


@triton.jit
def forward_task(
    task, q, ori_kv, cmp_kv, indices, sinks, places, used, out, lse, rows, K, scale2,
    N: tl.constexpr, D: tl.constexpr, COMPRESSED: tl.constexpr, SINKS: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HALVES: tl.constexpr, BK: tl.constexpr, ASCEND: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """One query and a block of its heads: out [rows, N, D], lse [rows, N]."""
    EVEN: tl.constexpr = D == BD * HALVES
    APART: tl.constexpr = ARCH == 90 and BH * BD * HALVES > 64 * 256  # two warpgroups, see attend
    HEAD_BLOCKS: tl.constexpr = (N + BH - 1) // BH
    row = (rows - 1 - task // HEAD_BLOCKS).to(tl.int64)  # the last queries see most: started first, the grid ends together
    h = (task % HEAD_BLOCKS) * BH + tl.arange(0, BH)
    n = tl.arange(0, BN)
    d = tl.arange(0, BD)
    heads = row * N + h
    on = h < N
    q0 = load_rows(q, heads, on, d, D, EVEN)
    acc0 = zero_tile(task, BH, BD, ASCEND)
    if HALVES == 2:
        q1 = load_rows(q, heads, on, BD + d, D, EVEN)
        acc1 = zero_tile(task, BH, BD, ASCEND)
    else:
        q1 = q0
        acc1 = tl.zeros([BH, 1], tl.float32)
    m = tl.full([BH], -3.0e38, tl.float32)  # finite: -inf - -inf would be NaN while nothing is seen
    l = tl.zeros([BH], tl.float32)

    if ASCEND:  # a loop a tensor: a pointer cannot be chosen there
        begin = tl.load(places + row * 4)
        end = tl.load(places + row * 4 + 1)
        for key in range(begin, end, BN):
            key_rows, seen = range_rows(begin, key + n, end)
            m, l, acc0, acc1 = attend(ori_kv, key_rows, seen, q0, q1, m, l, acc0, acc1, scale2, rows, D, BD, HALVES, EVEN, BH, BN, APART)
        if COMPRESSED == 1:
            begin = tl.load(places + row * 4 + 2)
            end = tl.load(places + row * 4 + 3)
            for key in range(begin, end, BN):
                key_rows, seen = range_rows(begin, key + n, end)
                m, l, acc0, acc1 = attend(
                    cmp_kv, key_rows, seen, q0, q1, m, l, acc0, acc1, scale2, rows, D, BD, HALVES, EVEN, BH, BN, APART
                )
        if COMPRESSED == 2:
            begin = tl.load(places + row * 4 + 2)
            end = tl.load(places + row * 4 + 3)
            slots = used_slots_ascend(indices, row * K, K, end - begin, BK)
            for slot in range(0, slots, BN):
                key_rows, seen = selected_rows(indices, row * K, slot + n, slots, begin, end)
                m, l, acc0, acc1 = attend(
                    cmp_kv, key_rows, seen, q0, q1, m, l, acc0, acc1, scale2, rows, D, BD, HALVES, EVEN, BH, BN, APART
                )
    else:
        ori_begin, ori_count, cmp_begin, cmp_count, slots = load_ranges(places, used, row, COMPRESSED)
        ori_tiles = (ori_count + BN - 1) // BN
        for tile in range(0, ori_tiles + (slots + BN - 1) // BN):
            keys, key_rows, seen = tile_rows(
                ori_kv, cmp_kv, indices, row * K, tile, n, ori_tiles, ori_begin, ori_count, cmp_begin, cmp_count, slots, COMPRESSED, BN
            )
            m, l, acc0, acc1 = attend(keys, key_rows, seen, q0, q1, m, l, acc0, acc1, scale2, rows, D, BD, HALVES, EVEN, BH, BN, APART)

    alpha = tl.full([BH], 1.0, tl.float32)
    if SINKS:
        sink = tl.load(sinks + h, mask=on, other=0.0)
        finite = (sink > float("-inf")) & (sink < float("inf"))
        sink2 = tl.where(finite, sink * 1.4426950408889634, float("-inf"))
        new = tl.maximum(m, sink2)
        alpha = tl.exp2(m - new)
        l = l * alpha + tl.exp2(sink2 - new)
        m = new
    nothing = l == 0.0
    mass = tl.where(nothing, 1.0, l)
    inverse = alpha / mass
    result = tl.where(nothing, float("-inf"), (m + tl.log2(mass)) * 0.6931471805599453)
    if SINKS:
        inverse = tl.where(sink == float("inf"), 0.0, inverse)
        result = tl.where(sink == float("inf"), sink, result)
    tl.store(lse + heads, result, mask=on)
    store_rows(out, heads, on, d, acc0 * inverse[:, None], D, EVEN)
    if HALVES == 2:
        store_rows(out, heads, on, BD + d, acc1 * inverse[:, None], D, EVEN)


@triton.jit(do_not_specialize=["tasks", "rows", "K", "scale"])
def attention_fwd_kernel(
    q, ori_kv, cmp_kv, indices, sinks, places, used, out, lse, tasks, rows, K, scale,
    N: tl.constexpr, D: tl.constexpr, COMPRESSED: tl.constexpr, SINKS: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HALVES: tl.constexpr, BK: tl.constexpr, ASCEND: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    scale2 = scale * 1.4426950408889634
    if ASCEND:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            forward_task(
                task, q, ori_kv, cmp_kv, indices, sinks, places, used, out, lse, rows, K, scale2,
                N, D, COMPRESSED, SINKS, BH, BN, BD, HALVES, BK, ASCEND, ARCH,
            )  # fmt: skip
    else:
        forward_task(
            tl.program_id(0), q, ori_kv, cmp_kv, indices, sinks, places, used, out, lse, rows, K, scale2,
            N, D, COMPRESSED, SINKS, BH, BN, BD, HALVES, BK, ASCEND, ARCH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tasks", "rows", "K", "scale"])
def slot_probs_kernel(
    q, cmp_kv, indices, places, lse, probs, tasks, rows, K, scale,
    N: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Mean over heads of exp(z - LSE) in a tile of one query's slots. A second pass over q . k: the LSE is known only after the first,
    and heads of one query may be in several programs of it."""
    EVEN: tl.constexpr = D == BD * HALVES
    tiles = (K + BN - 1) // BN
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = (rows - 1 - task // tiles).to(tl.int64)
        slot = (task % tiles) * BN + tl.arange(0, BN)
        d = tl.arange(0, BD)
        key_rows, seen = selected_rows(indices, row * K, slot, K, tl.load(places + row * 4 + 2), tl.load(places + row * 4 + 3))
        k0 = tl.trans(load_rows(cmp_kv, key_rows, seen, d, D, EVEN))
        if HALVES == 2:
            k1 = tl.trans(load_rows(cmp_kv, key_rows, seen, BD + d, D, EVEN))
        total = tl.zeros([BN], tl.float32)
        for block in range(0, N, BH):
            h = block + tl.arange(0, BH)
            on = h < N
            heads = row * N + h
            s = dot(load_rows(q, heads, on, d, D, EVEN), k0, tl.zeros([BH, BN], tl.float32))
            if HALVES == 2:
                s = add_product(load_rows(q, heads, on, BD + d, D, EVEN), k1, s, scale, BH, BN)
            else:
                s = s * scale
            z = s - tl.load(lse + heads, mask=on, other=float("inf"))[:, None]
            total += tl.sum(tl.where(seen[None, :], tl.exp2(z * 1.4426950408889634), 0.0), 0)
        tl.store(probs + row * K + slot, total / N, mask=slot < K)


def mode_of(cmp_kv: torch.Tensor | None, cmp_indices: torch.Tensor | None) -> int:
    """COMPRESSED of a call; NONE as well where there is no entry to see or no slot to name one."""
    if cmp_kv is None or cmp_kv.shape[-2] == 0:
        return NONE
    if cmp_indices is None:
        return ALL
    return SELECTED if cmp_indices.shape[-1] else NONE


_NUMBERS = {"tasks": "i32", "rows": "i32", "K": "i32", "scale": "fp32"}


@cache
def forward_spec(
    dtype: torch.dtype, N: int, D: int, compressed: int, sinks: bool, npu: bool = False, form: Form = OLDER
) -> Spec:  # fmt: skip
    x, tiles = f"*{TRITON_DTYPE[dtype]}", ascend_tiles(dtype, N, D) if npu else forward_tiles(dtype, N, D, form)
    types = {"q": x, "ori_kv": x, "cmp_kv": x, "indices": "*i32", "sinks": "*fp32", "places": "*i32", "used": "*i32"}
    types |= {"out": x, "lse": "*fp32", **_NUMBERS}
    return Spec(
        attention_fwd_kernel,
        types=types,
        consts={
            "N": N, "D": D, "COMPRESSED": compressed, "SINKS": sinks, "BH": tiles.BH, "BN": tiles.BN, "BD": tiles.BD,
            "HALVES": tiles.HALVES, "BK": INDEX_BLOCK, "ASCEND": npu, "ARCH": form.arch[0],
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        targets=targets_of(npu, form),
        arch=form.arch,
        shared=form.shared,
    )  # fmt: skip


@cache
def probs_spec(dtype: torch.dtype, N: int, D: int, npu: bool = False, form: Form = OLDER) -> Spec:
    x, tiles = f"*{TRITON_DTYPE[dtype]}", ascend_tiles(dtype, N, D) if npu else probs_tiles(dtype, N, D, form)
    return Spec(
        slot_probs_kernel,
        types={"q": x, "cmp_kv": x, "indices": "*i32", "places": "*i32", "lse": "*fp32", "probs": "*fp32", **_NUMBERS},
        consts={"N": N, "D": D, "BH": tiles.BH, "BN": tiles.BN, "BD": tiles.BD, "HALVES": tiles.HALVES},
        num_warps=tiles.num_warps,
        num_stages=1,
        targets=targets_of(npu, form),
        arch=form.arch,
        shared=form.shared,
    )


def attention_fwd(
    q: torch.Tensor, ori_kv: torch.Tensor, cmp_kv: torch.Tensor | None, cmp_indices: torch.Tensor | None, sinks: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_ori: torch.Tensor | None, cu_cmp: torch.Tensor | None, q_offsets: torch.Tensor | None,
    q_offset: int | None, scale: float, cmp_ratio: int, window: int | None, return_cmp_probs: bool, npu: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """out, lse, cmp_probs of the op shared_kv_fwd. npu: see `on_npu`."""
    npu, form = on_npu(q.device, npu), form_of(q.device)
    N, D = q.shape[-2:]
    K = cmp_indices.shape[-1] if cmp_indices is not None else 0
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    probs = torch.empty(cmp_indices.shape if return_cmp_probs and cmp_indices is not None else 0, dtype=torch.float32, device=q.device)
    rows, mode = lse.numel() // N, mode_of(cmp_kv, cmp_indices)
    if not rows:
        return out, lse, probs
    places = places_of(q, ori_kv, cmp_kv, cu_q, cu_ori, cu_cmp, q_offsets, q_offset, cmp_ratio, window)
    # a tensor that the mode does not read is stood in for by another of its type
    q, ori_kv = q.contiguous(), ori_kv.contiguous()
    cmp_kv = q if cmp_kv is None else cmp_kv.contiguous()
    indices = places if cmp_indices is None else cmp_indices.contiguous()
    spec = forward_spec(q.dtype, N, D, mode, sinks is not None, npu, form)
    tasks = rows * triton.cdiv(N, spec.consts["BH"])
    sink = lse if sinks is None else sinks.contiguous()
    used = used_of(indices, places) if mode == SELECTED and not npu else places
    spec.launch((grid_size(q.device, tasks, npu),), q, ori_kv, cmp_kv, indices, sink, places, used, out, lse, tasks, rows, K, scale)
    if return_cmp_probs and mode == NONE:
        probs.zero_()  # there is no entry that a slot could hold
    elif return_cmp_probs:
        spec = probs_spec(q.dtype, N, D, npu, form)
        tasks = rows * triton.cdiv(K, spec.consts["BN"])
        spec.launch((grid_size(q.device, tasks, npu),), q, cmp_kv, indices, places, lse, probs, tasks, rows, K, scale)
    return out, lse, probs
