"""Sums of dk that do not depend on their order: in whole numbers, which integer atomics add in any order to the same bits. Imports Triton.

Every key has a scale, a power of two, and every row of dk is rounded to a multiple of 1 / scale. `bounds_kernel` makes the scales possible: of a
query it takes the largest channel of sum |w q| over heads, times |dI| of a slot: more than any number the slot's row can hold, whatever heads
are positive. A key adds up the bounds of its slots; `scales_kernel` makes of the sum the scale that leaves a margin below 2^31.
Two's complement would forgive an overflow on the way, but the bound holds at the end as on the way.

The bounds are added in whole numbers as well, so that the scales are the same in every run: 38 bits or so of precision, in GROUPS groups of
32 powers of two each, so that no scale has to be known before. A number that is not finite sets the sign of its group instead (no sum of
bounds reaches it, so that the order does not matter), and its key's scale is NaN: so is then the key's row of dk.

Two channels share a 64-bit word, half as many instructions as with words of 32 bits: high * 2^32 + low with both signed. The low half's sign
borrows from the high one, in the sum as in each summand, and is given back once, by `add_sums_kernel`. fp32 inputs take a word a channel, 2^32
times as fine.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernel_runtime.launch import TRITON_DTYPE, Spec

GROUPS = tl.constexpr(8)  # of 32 of fp32's 256 exponents
FRACTION = tl.constexpr(4294967296.0)  # of a word that holds one channel
MAX_SLOTS = 1 << 28  # rows of a sum: their roundings, a unit each at most, stay below 2^28, and no scale falls below 2^-126
BLOCK_HEADS, BLOCK_KEYS = 64, 128
GPU_TARGETS = ("cuda", "hip")


@triton.jit
def exponent(x):
    """The smallest e with x < 2^e, of a positive normal number."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 126


@triton.jit
def add_units(out, place, first: tl.constexpr, mask, part, scale, stride, C: tl.constexpr, BS: tl.constexpr, WIDE: tl.constexpr):
    """part [BS, C], channels from `first` on, times scale [BS], rounded, to the rows of words at `place`. stride: words of a row, a number of
    run time: of a constant one, Triton would know that addresses are aligned, give a thread several words side by side, and a warp's
    instruction, which takes one of each, would hit every line in part (measured: 2.2 times the time)."""
    part *= scale[:, None]
    if WIDE:
        words = tl.floor(part * FRACTION + 0.5).to(tl.int64)
        c = first + tl.arange(0, C)
    else:
        units = tl.floor(part + 0.5).to(tl.int32)
        low, high = tl.split(tl.reshape(units, [BS, C // 2, 2]))  # neighbours, which a product leaves in one thread
        words = (high.to(tl.int64) << 32) + low.to(tl.int64)
        c = first // 2 + tl.arange(0, C // 2)
    tl.atomic_add(out + place[:, None] * stride + c[None, :], words, mask=mask[:, None] & (c < stride)[None, :], sem="relaxed")


@triton.jit(do_not_specialize=["r0", "S", "S3", "bits"])
def bounds_kernel(
    q, weights, indices, dscores, span, bounds, r0, S, S3, bits,
    H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, P: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """bounds[key, group] += what the rows of a query can hold at most, rounded up to multiples of 2^(32 group - 95 - bits)."""
    row = (r0 + tl.program_id(0)).to(tl.int64)
    d = tl.arange(0, DP)
    sums = tl.zeros([DP], tl.float32)
    for h in tl.static_range(0, H, HB):
        head = h + tl.arange(0, HB)
        w = tl.abs(tl.load(weights + row * H + head, mask=head < H, other=0.0).to(tl.float32))
        x = tl.load(q + row * H * D + head[:, None] * D + d[None, :], mask=(head < H)[:, None] & (d < D)[None, :], other=0.0)
        x = tl.abs(x.to(tl.float32)) * w[:, None]
        if q.dtype.element_ty == tl.float16:
            x = x.to(tl.float16).to(tl.float32)  # infinite where w q is in the product; other roundings are within the margin
        sums += tl.sum(x, 0)
    most = tl.where(tl.sum(sums, 0) < float("inf"), tl.max(sums, 0), float("inf"))  # a maximum may pass over NaN, a sum does not

    start = 0
    if TABLE:
        start = tl.load(span + row)
    slot = tl.arange(0, P)
    listed = tl.load(indices + row * K + slot, mask=slot < K, other=-1)
    grad = tl.load(dscores + row * K + slot, mask=(slot < K) & (listed >= 0) & (listed < S3 - start), other=0.0)
    on = grad != 0.0
    size = tl.abs(grad)
    if q.dtype.element_ty == tl.float16:  # dI is rounded as a part of the query's largest one, the small ones to multiples of 2^-24
        size += tl.max(size, 0) * 0.000000059604644775390625
    value = (size * most).to(tl.int32, bitcast=True)
    power = (value >> 23) & 255
    finite = power < 255
    # value = mantissa * 2^(power - 150); one that is no normal number counts as 2^-127 or more, and no scale makes more than a unit of it
    mantissa = ((value & 0x7FFFFF) | 0x800000).to(tl.int64)
    units = ((mantissa << (power & 31)) >> (55 - bits)) + 1
    place = bounds + (row // S * S3 + start + listed) * GROUPS + power // 32
    tl.atomic_add(place, units, mask=on & finite, sem="relaxed")
    tl.atomic_or(place, tl.full([P], -9223372036854775808, tl.int64), mask=on & (power == 255), sem="relaxed")


@triton.jit(do_not_specialize=["keys", "bits"])
def scales_kernel(bounds, scales, keys, bits, B: tl.constexpr):
    """scales[key] = 2^(30 - e) with the sum of the key's bounds below 2^e; a margin of 2^30 is left, of which the roundings of dI and
    w q in 16 bits take 2^23 and those to units 2^28."""
    key = tl.program_id(0) * B + tl.arange(0, B)
    e = tl.zeros([B], tl.int32)
    total = tl.zeros([B], tl.int64)
    finite = key < keys
    for group in tl.static_range(GROUPS):
        units = tl.load(bounds + key * GROUPS + group, mask=key < keys, other=0)
        total = (total >> 32) + 1 + units  # what the groups below hold, rounded up to units of this one
        e = tl.where(units > 0, exponent(total.to(tl.float32)) + 32 * group - 95 - bits, e)
        finite &= units >= 0
    power = tl.minimum(tl.maximum(30 - e, -126), 126)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    tl.store(scales + key, tl.where(finite, scale, float("nan")), mask=key < keys)


@triton.jit
def add_sums_kernel(words, scales, dk, D: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr):
    """dk[key] += the sums of its words / scale."""
    key = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    scale = tl.load(scales + key)
    if WIDE:
        sums = tl.load(words + key * D + d, mask=d < D, other=0).to(tl.float32) / FRACTION
    else:
        W: tl.constexpr = (D + 1) // 2
        half = tl.arange(0, DP // 2)
        word = tl.load(words + key * W + half, mask=half < W, other=0)
        low = word.to(tl.int32)
        high = ((word - low.to(tl.int64)) >> 32).to(tl.int32)
        sums = tl.reshape(tl.join(low, high), [DP]).to(tl.float32)
    out = dk + key * D + d
    tl.store(out, tl.load(out, mask=d < D, other=0.0) + tl.div_rn(sums, tl.zeros([DP], tl.float32) + scale), mask=d < D)


@cache
def bounds_spec(dtype: torch.dtype, weights_dtype: torch.dtype, heads: int, dim: int, slots: int, table: bool) -> Spec:
    types = {"q": f"*{TRITON_DTYPE[dtype]}", "weights": f"*{TRITON_DTYPE[weights_dtype]}", "indices": "*i32", "dscores": "*fp32", "span": "*i32"}
    block = max(16, min(BLOCK_HEADS, triton.next_power_of_2(heads)))
    sizes = {"H": heads, "HB": block, "D": dim, "DP": max(16, triton.next_power_of_2(dim)), "K": slots, "P": max(16, triton.next_power_of_2(slots))}
    return Spec(
        bounds_kernel,
        types=types | {"bounds": "*i64"} | dict.fromkeys(("r0", "S", "S3", "bits"), "i32"),
        consts=sizes | {"TABLE": table},
        targets=GPU_TARGETS,
    )


@cache
def sum_specs(dtype: torch.dtype, dim: int) -> tuple[Spec, Spec]:
    """Of `scales_kernel` and `add_sums_kernel`."""
    scales = Spec(
        scales_kernel,
        types={"bounds": "*i64", "scales": "*fp32", "keys": "i32", "bits": "i32"},
        consts={"B": BLOCK_KEYS},
        targets=GPU_TARGETS,
    )
    types = {"words": "*i64", "scales": "*fp32", "dk": "*fp32"}
    consts = {"D": dim, "DP": max(16, triton.next_power_of_2(dim)), "WIDE": dtype == torch.float32}
    return scales, Spec(add_sums_kernel, types=types, consts=consts, num_warps=1, targets=GPU_TARGETS)


def words_of(dtype: torch.dtype, dim: int) -> int:
    """64-bit words of a row of dk."""
    return dim if dtype == torch.float32 else (dim + 1) // 2


def make_scales(
    q: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, dscores: torch.Tensor, span: torch.Tensor | None, r0: int, rows: int,
    queries: int, keys: int, all_keys: int,
) -> torch.Tensor:  # fmt: skip
    """[all_keys] fp32, of `rows` queries from r0 on; keys: of a batch entry."""
    heads, dim = q.shape[-2:]
    slots = indices.shape[-1]
    bits = min(55, 62 - (rows * slots).bit_length())  # so that no sum of bounds reaches the sign; 33 or more
    bounds = torch.zeros(all_keys, GROUPS.value, dtype=torch.int64, device=q.device)
    scales = torch.empty(all_keys, dtype=torch.float32, device=q.device)
    spec = bounds_spec(q.dtype, weights.dtype, heads, dim, slots, span is not None)
    spec.launch((rows,), q, weights, indices, dscores, indices if span is None else span, bounds, r0, queries, keys, bits)
    sum_specs(q.dtype, dim)[0].launch((triton.cdiv(all_keys, BLOCK_KEYS),), bounds, scales, all_keys, bits)
    return scales
