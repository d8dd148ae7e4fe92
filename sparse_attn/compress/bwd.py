"""compress_kv backward: kernels, table of tiles, launcher, and the specs of both directions for the registry.

With p the weights of a window, m = sum_s p[s] * kv[s] (the entry before rounding) and g the gradient of the entry:
    dkv[s] = p[s] * g        dgate[s] = p[s] * g * (kv[s] - m)        dposition_bias[r] = sum over windows of dgate[r]

Bytes: kv, gate and dout are read once, dkv and dgate written once,
    4 * C * D + D / ratio elements a token        [bytes in bf16, D = 512: 8448 at ratio 4 with overlap, 4104 at 128]
The weights are computed again from the tile, which costs no byte; statistics saved by the forward would add 8 * D / ratio bytes a token
there and as many here (at ratio 4 with overlap 24 % more for the forward and 12 % more here). Only windows of more than MAX_ROWS
tokens, which are no one tile, run the forward again for their log-sum-exp and m in fp32 (half as many bytes once more).

dposition_bias is summed in two stages in a fixed order: every program adds up its windows in registers and writes one row of partial
[groups, ratio, C * D] fp32, a second kernel adds the rows. No atomics; the grid does not depend on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import ON_ASCEND, TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape
from sparse_attn.compress.core import exponentials, load_bias, load_tile, tile_mask
from sparse_attn.compress.fwd import MAX_ROWS, Tiles, block, forward_spec, launch_forward, stages_of
from sparse_attn.compress.slots import slot_of, slots_of, slots_spec

PROGRAMS = 48 if ON_ASCEND else 1024  # of the grid, together; a constant and no property of the device, as sums depend on it


@triton.jit
def _store_tile(x, first, tokens, r, d, value, SERIES: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    start = tl.where(tokens > 0, first, 0).to(tl.int64) * (C * D) + SERIES * D
    offset = r[:, None] * (C * D) + d[None, :]
    tl.store(x + start + offset, value.to(x.dtype.element_ty), mask=tile_mask(tokens, r, d, D))


@triton.jit(do_not_specialize=["count", "n", "S", "E"])
def compress_bwd_kernel(
    dout, kv, gate, bias, lse, mean, dkv, dgate, partial, slots, count, n, S, E,
    R: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, OVERLAP: tl.constexpr, PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program has BR tokens of a window (all of them where BR >= R), a slice of the channels, and every num_programs(1)-th slot."""
    C: tl.constexpr = 2 if OVERLAP else 1
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    b = load_bias(bias, r, d, C - 1, R, D, C)
    b_last = b
    if OVERLAP:
        b_last = load_bias(bias, r, d, 0, R, D, C)
    dbias = tl.zeros([BR, BD], tl.float32)
    dbias_last = tl.zeros([BR, BD], tl.float32)
    for slot in tl.range(tl.program_id(1), count, tl.num_programs(1), num_stages=STAGES):
        own, tokens, entry, last = slot_of(slots, slot, n, S, E, R, PACKED)
        live = entry >= 0
        tokens_last = tl.where(last, R, 0)
        # what a tail has no gradient for is not read, but its zeros are written
        z, v = load_tile(kv, gate, b, own, tl.where(live, tokens, 0), r, d, C - 1, D, C)
        z_last, v_last = z, v
        if OVERLAP:
            z_last, v_last = load_tile(kv, gate, b_last, own - R, tl.where(live, tokens_last, 0), r, d, 0, D, C)
            z_last = tl.where(tokens_last > 0, z_last, float("-inf"))
        row = tl.where(live, entry, 0).to(tl.int64) * D
        on = (d < D) & live
        g = tl.load(dout + row + d, mask=on, other=0.0).to(tl.float32)
        if BR >= R:
            p, p_last, total = exponentials(z, z_last, OVERLAP)
            if OVERLAP:
                m = tl.sum(p * v + p_last * v_last, 0) / total
            else:
                m = tl.sum(p * v, 0) / total
            g = g / total
        else:
            total = tl.load(lse + row + d, mask=on, other=float("inf"))
            m = tl.load(mean + row + d, mask=on, other=0.0)
            p = tl.exp2(z - total[None, :])
            if OVERLAP:
                p_last = tl.exp2(z_last - total[None, :])
            else:
                p_last = p
        p *= g[None, :]
        _store_tile(dkv, own, tokens, r, d, p, C - 1, D, C)
        p *= v - m[None, :]
        _store_tile(dgate, own, tokens, r, d, p, C - 1, D, C)
        dbias += p
        if OVERLAP:
            p_last *= g[None, :]
            _store_tile(dkv, own - R, tokens_last, r, d, p_last, 0, D, C)
            p_last *= v_last - m[None, :]
            _store_tile(dgate, own - R, tokens_last, r, d, p_last, 0, D, C)
            dbias_last += p_last
            # the first series of a remainder: there is no next window whose slot could write it
            unused = tl.where(live, 0, tokens)
            zero = tl.zeros([BR, BD], tl.float32)
            _store_tile(dkv, own, unused, r, d, zero, 0, D, C)
            _store_tile(dgate, own, unused, r, d, zero, 0, D, C)
    target = partial + tl.program_id(1).to(tl.int64) * (R * C * D)
    offset = r[:, None] * (C * D) + d[None, :]
    tl.store(target + (C - 1) * D + offset, dbias, mask=tile_mask(R, r, d, D))
    if OVERLAP:
        tl.store(target + offset, dbias_last, mask=tile_mask(R, r, d, D))


@triton.jit(do_not_specialize=["groups", "size"])
def compress_bias_kernel(partial, dbias, groups, size, BG: tl.constexpr, BC: tl.constexpr):
    """partial [groups, size] fp32 -> dbias [size]; a program adds up BC columns, row by row in a fixed order"""
    for columns in range(tl.program_id(0), tl.cdiv(size, BC), tl.num_programs(0)):
        c = columns * BC + tl.arange(0, BC)
        acc = tl.zeros([BG, BC], tl.float32)
        for g0 in range(0, groups, BG):
            start = partial + tl.cast(g0, tl.int64) * size
            g = tl.arange(0, BG)
            acc += tl.load(start + g[:, None] * size + c[None, :], mask=(g0 + g < groups)[:, None] & (c < size)[None, :], other=0.0)
        tl.store(dbias + c, tl.sum(acc, 0).to(dbias.dtype.element_ty), mask=c < size)


def backward_tiles(R: int, D: int, overlap: bool) -> Tiles:
    """The table: 32 elements a thread in the one or two tiles of a window, as the bias and its sums stay in registers as well. Half as many
    programs for long windows, whose rows of partial sums are long."""
    BR, BD = block(R, D, overlap, sums=True)
    programs = PROGRAMS // 2 if BR >= 64 and not ON_ASCEND else PROGRAMS
    return Tiles(BR, BD, max(1, BR * BD // (512 if overlap else 1024)), programs, stages_of(BR, min(R, BR), overlap))


def bias_tile(size: int) -> tuple[int, int]:
    """BG, BC of the second stage: few columns come with many rows of partial sums, many columns with few."""
    return (32, 128) if size >= 16384 else (128, 32)


@cache
def backward_spec(dtype: torch.dtype, bias: torch.dtype, R: int, D: int, overlap: bool, packed: bool) -> Spec:
    x, tiles = f"*{TRITON_DTYPE[dtype]}", backward_tiles(R, D, overlap)
    return Spec(
        compress_bwd_kernel,
        types={
            "dout": x, "kv": x, "gate": x, "bias": f"*{TRITON_DTYPE[bias]}", "lse": "*fp32", "mean": "*fp32", "dkv": x, "dgate": x,
            "partial": "*fp32", "slots": "*i32", **dict.fromkeys(("count", "n", "S", "E"), "i32"),
        },
        consts={"R": R, "D": D, "BR": tiles.BR, "BD": tiles.BD, "OVERLAP": overlap, "PACKED": packed, "STAGES": tiles.stages},
        num_warps=tiles.num_warps,
        hot=not packed,  # a pack's slots are read from memory one by one, which counts as a scalar loop
    )  # fmt: skip


@cache
def bias_spec(bias: torch.dtype, BG: int, BC: int) -> Spec:
    return Spec(
        compress_bias_kernel,
        types={"partial": "*fp32", "dbias": f"*{TRITON_DTYPE[bias]}", "groups": "i32", "size": "i32"},
        consts={"BG": BG, "BC": BC},
        num_warps=4,
        hot=True,
    )


def compress_bwd(
    dout: torch.Tensor, kv: torch.Tensor, gate: torch.Tensor, position_bias: torch.Tensor,
    ratio: int, overlap: bool, cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dkv, dgate, dposition_bias of the op compress_bwd."""
    dout, kv, gate, bias = (x.contiguous() for x in (dout, kv, gate, position_bias))
    dkv, dgate, dbias = torch.empty_like(kv), torch.empty_like(gate), torch.empty_like(bias)
    D = kv.shape[-1] // (2 if overlap else 1)
    # a batch of whole windows without overlap has no tail
    tails = cu_seqlens is not None or overlap or kv.shape[-2] % ratio > 0
    slots, count, n, S, E = slots_of(kv, ratio, cu_seqlens, tails)
    if not count or not kv.numel():
        return dkv, dgate, dbias.zero_()
    spec = backward_spec(kv.dtype, bias.dtype, ratio, D, overlap, slots is not None)
    slices, chunks = triton.cdiv(D, spec.consts["BD"]), triton.cdiv(ratio, spec.consts["BR"])
    groups = min(count, max(1, triton.cdiv(backward_tiles(ratio, D, overlap).programs, slices * chunks)))
    partial = torch.empty((groups, *bias.shape), dtype=torch.float32, device=kv.device)
    lse = mean = partial  # stands in for what is not read
    if chunks > 1 and dout.numel():
        lse, mean = (torch.empty(dout.shape, dtype=torch.float32, device=kv.device) for _ in range(2))
        launch_forward(kv, gate, bias, mean, lse, ratio, overlap, cu_seqlens)
    if slots is None:
        slots = torch.empty(1, dtype=torch.int32, device=kv.device)
    spec.launch((slices, groups, chunks), dout, kv, gate, bias, lse, mean, dkv, dgate, partial, slots, count, n, S, E)
    BG, BC = bias_tile(bias.numel())
    programs = min(triton.cdiv(bias.numel(), BC), backward_tiles(ratio, D, overlap).programs)
    bias_spec(bias.dtype, BG, BC).launch((programs,), partial, dbias, groups, bias.numel())
    return dkv, dgate, dbias


def specs(shape: ModelShape) -> Iterator[Spec]:
    """Both directions of the compressors of a model: those of csa_ratio overlap (of keys and of the indexer's keys), others do not."""
    dtype = {name: dtype for dtype, name in TRITON_DTYPE.items()}[shape.dtype]
    tiles = set()
    for ratio in shape.ratios:
        overlap = ratio == shape.csa_ratio
        for D in dict.fromkeys((shape.head_dim, shape.index_dim) if overlap else (shape.head_dim,)):
            tiles.add(bias_tile(ratio * D * (2 if overlap else 1)))
            for packed in (False, True):
                yield forward_spec(dtype, torch.float32, ratio, D, overlap, packed)
                yield backward_spec(dtype, torch.float32, ratio, D, overlap, packed)
                if ratio > MAX_ROWS:
                    yield forward_spec(dtype, torch.float32, ratio, D, overlap, packed, lse=True)
    yield slots_spec(tails=False)
    yield slots_spec(tails=True)
    for BG, BC in sorted(tiles):
        yield bias_spec(torch.float32, BG, BC)
