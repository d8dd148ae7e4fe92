"""Rotary position embedding as DeepSeek-V4 uses it, in plain PyTorch.

Legend
    R  rotated channels (`rope_dim`), the LAST R of a head's D       p  position of a token
    i  pair of channels (2i, 2i + 1) of the rotated ones, i < R / 2

Formulas
    w[i]           = theta ** (-2i / R)
    YaRN (arXiv 2309.00071), for `factor` times the original length L:
        c(n)       = R * ln(L / (2 pi n)) / (2 ln theta)        the pair index that turns n times within L tokens
        low, high  = max(floor(c(beta_fast)), 0), min(ceil(c(beta_slow)), R - 1)
        ramp[i]    = clamp((i - low) / (high - low), 0, 1)      0: fast pair, kept; 1: slow pair, stretched
        w[i]       = w[i] * (1 - ramp[i]) + w[i] / factor * ramp[i]
    rotation       (x[2i], x[2i+1]) -> (x[2i] cos(p w[i]) - x[2i+1] sin(p w[i]), x[2i+1] cos(p w[i]) + x[2i] sin(p w[i]))
The inverse turns by -p. YaRN's attention temperature (mscale) is not part of the model: cos and sin are not scaled.
Compressed entry j stands at position j * ratio; the attention output is turned back at the query's position, since keys
and values are one tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rope_frequencies(
    rope_dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    original_length: int | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Radians a token for every pair, [rope_dim / 2]; YaRN where factor != 1, which needs original_length.

    Computed in fp64 and rounded once to `dtype`.
    """
    if rope_dim <= 0 or rope_dim % 2:
        raise ValueError(f"rope_dim must be a positive even number, got {rope_dim}")
    pair = torch.arange(rope_dim // 2, dtype=torch.float64, device=device)
    frequency = theta ** (-2.0 * pair / rope_dim)
    if factor != 1.0:
        if original_length is None:
            raise ValueError(f"original_length is required with factor {factor}: YaRN stretches what it was trained on")

        def turning(n: float) -> float:
            return rope_dim * math.log(original_length / (2 * math.pi * n)) / (2 * math.log(theta))

        low, high = max(math.floor(turning(beta_fast)), 0), min(math.ceil(turning(beta_slow)), rope_dim - 1)
        ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequency = frequency * (1 - ramp) + frequency / factor * ramp
    return frequency.to(dtype)


def rope_cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., rope_dim / 2] of positions [...] in the precision of `frequencies` (fp32 or fp64)."""
    angle = positions[..., None].to(frequencies.dtype) * frequencies
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """x [..., D] with its last 2 * cos.shape[-1] channels rotated (turned back if `inverse`), in x's dtype.

    cos and sin broadcast against x[..., :R / 2]: for heads give them an axis, `cos[..., None, :]` for x [B, S, N, D] and
    positions [B, S]. The rotation is done in the wider of the dtypes of x and cos.
    """
    rope_dim = 2 * cos.shape[-1]
    plain, rotated = x[..., : x.shape[-1] - rope_dim], x[..., x.shape[-1] - rope_dim :]
    even, odd = rotated[..., 0::2], rotated[..., 1::2]
    sin = -sin if inverse else sin
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), -1)
