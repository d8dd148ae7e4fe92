"""Tiles of a compressor's windows: device functions that its forward and backward share.

R tokens of a window (the ratio), D channels of an entry, C series of a token; a tile is [BR, BD], token of the window x channel.
"""

import triton
import triton.language as tl


@triton.jit
def tile_mask(tokens, r, d, D: tl.constexpr):
    return (r < tokens)[:, None] & (d < D)[None, :]


@triton.jit
def load_bias(bias, r, d, SERIES: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """[BR, BD] of the position bias of series SERIES, in units of log 2; -inf for tokens past R, which keeps them out of a softmax"""
    b = tl.load(bias + SERIES * D + r[:, None] * (C * D) + d[None, :], mask=tile_mask(R, r, d, D), other=0.0).to(tl.float32)
    return tl.where((r < R)[:, None], b * 1.4426950408889634, float("-inf"))


@triton.jit
def load_tile(kv, gate, bias_tile, first, tokens, r, d, SERIES: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """logits (in units of log 2) and values [BR, BD] in fp32 of series SERIES of a window whose first token is row `first`.

    Tokens from `tokens` on are not read: values 0, logits those of the bias.
    """
    # an address in a row that exists whatever the slot: `first` may be a row past the end where nothing is read
    start = tl.where(tokens > 0, first, 0).to(tl.int64) * (C * D) + SERIES * D
    offset = r[:, None] * (C * D) + d[None, :]
    on = tile_mask(tokens, r, d, D)
    z = tl.load(gate + start + offset, mask=on, other=0.0).to(tl.float32)
    v = tl.load(kv + start + offset, mask=on, other=0.0).to(tl.float32)
    return z * 1.4426950408889634 + bias_tile, v


@triton.jit
def exponentials(z, z_last, OVERLAP: tl.constexpr):
    """exp(z - maximum) over the tokens of a whole window, channel by channel, and their sum [BD]; with overlap jointly with z_last, the
    tokens before it (without it the second result is the first)."""
    top = tl.max(z, 0)
    if OVERLAP:
        top = tl.maximum(top, tl.max(z_last, 0))
    e = tl.exp2(z - top[None, :])
    total = tl.sum(e, 0)
    if OVERLAP:
        e_last = tl.exp2(z_last - top[None, :])
        total += tl.sum(e_last, 0)
    else:
        e_last = e
    return e, e_last, total
