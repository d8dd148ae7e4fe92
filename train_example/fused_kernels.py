"""Kernels for what lies between the library's ops in a layer: SwiGLU, the experts' weighted sum, RMS norm, RMS norm with RoPE. For fused.py.

Shape letters: M rows, I hidden width of an expert, T tokens, K experts a token, D hidden size, N heads, C channels of a head,
R rotated channels, S sequence length. All arithmetic is fp32 and is rounded once. A program owns what it writes: no atomics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_runtime.launch import TRITON_DTYPE, Spec
from kernel_runtime.registry import ModelShape, shape_of
from train_example.adamw_kernels import adamw_spec
from train_example.config import PRESETS, ModelConfig
from train_example.run_config import from_dict

BLOCK = 1024
PROGRAMS = 512  # of the norm's backward pass: not the device's number of processors, for the order of the sum is the same everywhere then


@triton.jit
def clipped(gate, up, limit: tl.constexpr):
    """min(gate, limit), clip(up): a NaN stays one, or the trainer's check of the loss would not see it"""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["M"])
def swiglu_fwd_kernel(gate_up, out, M, limit: tl.constexpr, I: tl.constexpr, BI: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BI + tl.arange(0, BI)
    on = i < I
    gate = tl.load(gate_up + row * (2 * I) + i, mask=on, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + i, mask=on, other=0.0).to(tl.float32)
    gate, up = clipped(gate, up, limit)
    tl.store(out + row * I + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=on)


@triton.jit(do_not_specialize=["M"])
def swiglu_bwd_kernel(grad, gate_up, out, M, limit: tl.constexpr, I: tl.constexpr, BI: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BI + tl.arange(0, BI)
    on = i < I
    g = tl.load(grad + row * I + i, mask=on, other=0.0).to(tl.float32)
    gate_in = tl.load(gate_up + row * (2 * I) + i, mask=on, other=0.0).to(tl.float32)
    up_in = tl.load(gate_up + row * (2 * I) + I + i, mask=on, other=0.0).to(tl.float32)
    gate, up = clipped(gate_in, up_in, limit)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    # at the limit itself the gradient passes, as it does through clamp
    dgate = tl.where(gate_in <= limit, g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), 0.0)
    dup = tl.where((up_in >= -limit) & (up_in <= limit), g * gate * sigmoid, 0.0)
    tl.store(out + row * (2 * I) + i, dgate.to(out.dtype.element_ty), mask=on)
    tl.store(out + row * (2 * I) + I + i, dup.to(out.dtype.element_ty), mask=on)


@triton.jit(do_not_specialize=["T"])
def gather_sum_kernel(rows, place, weights, out, T, K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr):
    """out[t] = sum_k weights[t, k] rows[place[t, k]]"""
    t, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    on = d < D
    total = tl.zeros([BD], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place + t * K + k)
        value = tl.load(rows + row * D + d, mask=on, other=0.0).to(tl.float32)
        total += value * tl.load(weights + t * K + k) if WEIGHTED else value
    tl.store(out + t * D + d, total.to(out.dtype.element_ty), mask=on)


@triton.jit(do_not_specialize=["T"])
def combine_bwd_kernel(
    grad, rows, place, weights, drows, dweights, T, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """drows[place[t, k]] = weights[t, k] grad[t];  dweights[t, k] = rows[place[t, k]] . grad[t]"""
    t, k = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    row = tl.load(place + t * K + k, mask=k < K, other=0)
    weight = tl.load(weights + t * K + k, mask=k < K, other=0.0)
    dots = tl.zeros([KP, BD], tl.float32)
    for start in tl.static_range(0, D, BD):
        d = start + tl.arange(0, BD)
        on = (k < K)[:, None] & (d < D)[None, :]
        g = tl.load(grad + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        value = tl.load(rows + row[:, None] * D + d[None, :], mask=on, other=0.0).to(tl.float32)
        dots += value * g[None, :]
        tl.store(drows + row[:, None] * D + d[None, :], (weight[:, None] * g[None, :]).to(drows.dtype.element_ty), mask=on)
    tl.store(dweights + t * K + k, tl.sum(dots, 1), mask=k < K)


@triton.jit(do_not_specialize=["T", "S"])
def norm_rope_kernel(
    x, grad, cos, sin, out, T, S, N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, HB: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr,
    INVERSE: tl.constexpr, BACKWARD: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """HB heads of one token: the last R channels of x / rms(x) (or of x) turned; BACKWARD: the gradient of x from that of the result.

    Pairs are (2i, 2i + 1) of the rotated channels, so a channel's partner is the neighbour with the last bit of its number flipped.
    """
    t, n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * HB + tl.arange(0, HB), tl.arange(0, BC)
    at = (t * N + n[:, None]) * C
    r = c - (C - R)
    turned = (r >= 0) & (c < C)
    on, on_turned = (n < N)[:, None] & (c < C)[None, :], (n < N)[:, None] & turned[None, :]
    partner = C - R + (r ^ 1)
    pair = (t % S) * (R // 2) + r // 2
    a = tl.where(turned, tl.load(cos + pair, mask=turned, other=1.0), 1.0)
    b = tl.load(sin + pair, mask=turned, other=0.0)
    # y[2i] = x[2i] cos - x[2i+1] sin, y[2i+1] = x[2i+1] cos + x[2i] sin; turning back, and the gradient, have the other sign
    if INVERSE != BACKWARD:
        b = tl.where((r & 1) == 0, b, -b)
    else:
        b = tl.where((r & 1) == 0, -b, b)
    source = grad if BACKWARD else x
    mine = tl.load(source + at + c[None, :], mask=on, other=0.0).to(tl.float32)
    other = tl.load(source + at + partner[None, :], mask=on_turned, other=0.0).to(tl.float32)
    y = mine * a[None, :] + other * b[None, :]
    if NORM:
        value = tl.load(x + at + c[None, :], mask=on, other=0.0).to(tl.float32) if BACKWARD else mine
        scale = tl.rsqrt(tl.sum(value * value, 1) / C + eps)[:, None]
        if BACKWARD:
            value *= scale
            y = scale * (y - value * (tl.sum(y * value, 1) / C)[:, None])
        else:
            y *= scale
    tl.store(out + at + c[None, :], y.to(out.dtype.element_ty), mask=on)


@triton.jit(do_not_specialize=["T"])
def rms_norm_fwd_kernel(x, weight, out, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, eps: tl.constexpr):
    t, d = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BD)
    at, on = t[:, None] * D + d[None, :], (t < T)[:, None] & (d < D)[None, :]
    value = tl.load(x + at, mask=on, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
    y = value * scale[:, None] * tl.load(weight + d, mask=d < D, other=0.0)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=on)


@triton.jit(do_not_specialize=["T"])
def rms_norm_bwd_kernel(x, weight, grad, dx, dweights, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, eps: tl.constexpr):
    """A program takes each PROGRAMS-th block of tokens and writes the sum of their gradients of weight as one row of dweights."""
    d = tl.arange(0, BD)
    w = tl.load(weight + d, mask=d < D, other=0.0)[None, :]
    dw = tl.zeros([BT, BD], tl.float32)
    for start in range(tl.program_id(0) * BT, T, tl.num_programs(0) * BT):
        t = (start + tl.arange(0, BT)).to(tl.int64)
        at, on = t[:, None] * D + d[None, :], (t < T)[:, None] & (d < D)[None, :]
        value = tl.load(x + at, mask=on, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=on, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= scale
        dw += g * value
        g *= w
        y = scale * (g - value * (tl.sum(g * value, 1) / D)[:, None])
        tl.store(dx + at, y.to(dx.dtype.element_ty), mask=on)
    tl.store(dweights + tl.program_id(0).to(tl.int64) * D + d, tl.sum(dw, 0), mask=d < D)


def _block(size: int) -> int:
    return min(BLOCK, triton.next_power_of_2(size))


@cache
def _swiglu_spec(backward: bool, dtype: torch.dtype, width: int, limit: float) -> Spec:
    pointer = f"*{TRITON_DTYPE[dtype]}"
    types = {"grad": pointer} if backward else {}
    types |= {"gate_up": pointer, "out": pointer, "M": "i32"}
    kernel = swiglu_bwd_kernel if backward else swiglu_fwd_kernel
    return Spec(kernel, types=types, consts={"limit": limit, "I": width, "BI": _block(width)}, targets=("cuda",))


def swiglu_fwd(gate_up: Tensor, limit: float) -> Tensor:
    gate_up, width = gate_up.contiguous(), gate_up.shape[1] // 2
    out = gate_up.new_empty(gate_up.shape[0], width)
    if out.numel():
        spec = _swiglu_spec(False, gate_up.dtype, width, limit)
        spec.launch((gate_up.shape[0], triton.cdiv(width, spec.consts["BI"])), gate_up, out, gate_up.shape[0])
    return out


def swiglu_bwd(grad: Tensor, gate_up: Tensor, limit: float) -> Tensor:
    grad, gate_up, width = grad.contiguous(), gate_up.contiguous(), gate_up.shape[1] // 2
    out = torch.empty_like(gate_up)
    if out.numel():
        spec = _swiglu_spec(True, gate_up.dtype, width, limit)
        spec.launch((gate_up.shape[0], triton.cdiv(width, spec.consts["BI"])), grad, gate_up, out, gate_up.shape[0])
    return out


@cache
def _sum_spec(dtype: torch.dtype, k: int, size: int, weighted: bool) -> Spec:
    pointer = f"*{TRITON_DTYPE[dtype]}"
    types = {"rows": pointer, "place": "*i64", "weights": "*fp32", "out": pointer, "T": "i32"}
    return Spec(gather_sum_kernel, types=types, consts={"K": k, "D": size, "BD": _block(size), "WEIGHTED": weighted}, targets=("cuda",))


def gather_sum(rows: Tensor, place: Tensor, weights: Tensor | None, k: int) -> Tensor:
    rows, place = rows.contiguous(), place.contiguous()
    out = rows.new_empty(place.numel() // k, rows.shape[1])
    if out.numel():
        spec = _sum_spec(rows.dtype, k, rows.shape[1], weights is not None)
        # without weights the pointer is not read, but it needs the type
        given = out.new_empty(1, dtype=torch.float32) if weights is None else weights.contiguous()
        spec.launch((out.shape[0], triton.cdiv(out.shape[1], spec.consts["BD"])), rows, place, given, out, out.shape[0])
    return out


@cache
def _combine_bwd_spec(dtype: torch.dtype, k: int, size: int) -> Spec:
    pointer = f"*{TRITON_DTYPE[dtype]}"
    types = {"grad": pointer, "rows": pointer, "place": "*i64", "weights": "*fp32", "drows": pointer, "dweights": "*fp32", "T": "i32"}
    padded = triton.next_power_of_2(k)
    consts = {"K": k, "KP": padded, "D": size, "BD": min(_block(size), max(64, 4096 // padded))}
    return Spec(combine_bwd_kernel, types=types, consts=consts, targets=("cuda",))


def combine_bwd(grad: Tensor, rows: Tensor, place: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    grad, rows, place, weights = grad.contiguous(), rows.contiguous(), place.contiguous(), weights.contiguous()
    drows, dweights = torch.empty_like(rows), torch.empty_like(weights)
    if drows.numel():
        spec = _combine_bwd_spec(rows.dtype, weights.shape[1], rows.shape[1])
        spec.launch((grad.shape[0],), grad, rows, place, weights, drows, dweights, grad.shape[0])
    return drows, dweights


@cache
def _rope_spec(dtype: torch.dtype, heads: int, size: int, rotated: int, eps: float, inverse: bool, backward: bool) -> Spec:
    pointer, padded = f"*{TRITON_DTYPE[dtype]}", triton.next_power_of_2(size)
    types = {"x": pointer, "grad": pointer, "cos": "*fp32", "sin": "*fp32", "out": pointer, "T": "i32", "S": "i32"}
    block = max(1, min(triton.next_power_of_2(heads), 4096 // padded))
    consts = {"N": heads, "C": size, "R": rotated, "HB": block, "BC": padded, "NORM": eps >= 0, "INVERSE": inverse, "BACKWARD": backward, "eps": eps}
    return Spec(norm_rope_kernel, types=types, consts=consts, targets=("cuda",))


def norm_rope(x: Tensor, grad: Tensor | None, cos: Tensor, sin: Tensor, eps: float, inverse: bool) -> Tensor:
    """x [B, S, N, C] (not read where grad is given and eps < 0), cos and sin [S, R / 2] fp32; eps < 0 is no norm; grad as the result."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    given = x if grad is None else grad.contiguous()
    out = torch.empty_like(given)
    if out.numel():
        B, S, N, C = out.shape
        spec = _rope_spec(out.dtype, N, C, 2 * cos.shape[1], eps, inverse, grad is not None)
        spec.launch((B * S, triton.cdiv(N, spec.consts["HB"])), x, given, cos, sin, out, B * S, S)
    return out


@cache
def _norm_spec(backward: bool, dtype: torch.dtype, size: int, eps: float) -> Spec:
    pointer, padded = f"*{TRITON_DTYPE[dtype]}", triton.next_power_of_2(size)
    types = {"x": pointer, "weight": "*fp32"}
    types |= {"grad": pointer, "dx": pointer, "dweights": "*fp32"} if backward else {"out": pointer}
    consts = {"D": size, "BT": max(1, 2048 // padded), "BD": padded, "eps": eps}
    kernel = rms_norm_bwd_kernel if backward else rms_norm_fwd_kernel
    return Spec(kernel, types=types | {"T": "i32"}, consts=consts, num_warps=8 if padded >= 4096 else 4, targets=("cuda",))


def rms_norm_fwd(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        T, spec = x.numel() // x.shape[-1], _norm_spec(False, x.dtype, x.shape[-1], eps)
        spec.launch((triton.cdiv(T, spec.consts["BT"]),), x, weight, out, T)
    return out


def rms_norm_bwd(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    dx = torch.empty_like(x)
    if not dx.numel():
        return dx, torch.zeros_like(weight)
    T, spec = x.numel() // x.shape[-1], _norm_spec(True, x.dtype, x.shape[-1], eps)
    programs = min(triton.cdiv(T, spec.consts["BT"]), PROGRAMS)
    dweights = weight.new_empty(programs, x.shape[-1])
    spec.launch((programs,), x, weight, grad, dx, dweights, T)
    return dx, dweights.sum(0)


def model_config(shape: ModelShape) -> ModelConfig | None:
    """The trainer's configuration that a shape was made of, or the preset that it is equal to; None if it is no model of the trainer."""
    if isinstance(shape.source, ModelConfig):
        return shape.source
    if isinstance(shape.source, Mapping):
        return from_dict({"model": dict(shape.source)}, "the plan").model
    return next((config for config in PRESETS.values() if shape_of(config, shape.dtype) == shape), None)


def specs(shape: ModelShape) -> Iterator[Spec]:
    """What a training step and an evaluation launch"""
    config = model_config(shape)
    if config is None:
        return
    dtype = next(dtype for dtype, name in TRITON_DTYPE.items() if name == shape.dtype)
    heads = [(config.num_heads, config.head_dim), (1, config.head_dim), (config.index_heads, config.index_head_dim), (1, config.index_head_dim)]
    for backward in (False, True):
        yield _swiglu_spec(backward, dtype, config.expert_dim, float(config.swiglu_limit))
        yield _rope_spec(dtype, *heads[0], config.rope_head_dim, float(config.norm_eps), False, backward)
        yield _rope_spec(dtype, *heads[0], config.rope_head_dim, -1.0, True, backward)
        for size in dict.fromkeys((config.hidden_size, config.q_lora_rank, config.head_dim, config.index_head_dim)):
            yield _norm_spec(backward, dtype, size, float(config.norm_eps))
        for sizes in heads:
            yield _rope_spec(dtype, *sizes, config.rope_head_dim, -1.0, False, backward)
    for weighted in (False, True):
        yield _sum_spec(dtype, config.experts_per_token, config.hidden_size, weighted)
    yield _combine_bwd_spec(dtype, config.experts_per_token, config.hidden_size)
    yield adamw_spec()
