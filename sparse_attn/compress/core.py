"""Tiles of a compressor's windows: device functions that its forward and backward share.

R tokens of a window (the ratio), D channels of an entry, C series of a token; a tile is [BR, BD], token of the window x channel.
"""

import triton
import triton.language as tl


@triton.jit
def tile_mask(tokens, r, d, D: tl.constexpr):
    return (r < tokens)[:, None] & (d < D)[None, :]


@triton.jit
def load_tile(kv, gate, bias, first, tokens, r, d, SERIES: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """logits and values [BR, BD] in fp32 of series SERIES of a window whose first token is row `first`.

    Tokens from `tokens` on are not read: values 0, logits those of the bias (finite); tokens past R have logits of -inf.
    """
    W: tl.constexpr = C * D
    # an address in a row that exists whatever the slot: `first` is a row past the end where nothing is read
    start = tl.where(tokens > 0, first, 0).to(tl.int64) * W + SERIES * D
    offset = r[:, None] * W + d[None, :]
    on = tile_mask(tokens, r, d, D)
    z = tl.load(gate + start + offset, mask=on, other=0.0).to(tl.float32)
    v = tl.load(kv + start + offset, mask=on, other=0.0).to(tl.float32)
    z += tl.load(bias + SERIES * D + offset, mask=tile_mask(R, r, d, D), other=0.0).to(tl.float32)
    return tl.where((r < R)[:, None], z, float("-inf")), v


@triton.jit
def weights(z, z_last, OVERLAP: tl.constexpr):
    """Softmax over the tokens of a whole window, channel by channel; with overlap jointly with z_last, the tokens before it."""
    top = tl.max(z, 0)
    if OVERLAP:
        top = tl.maximum(top, tl.max(z_last, 0))
    e = tl.exp(z - top[None, :])
    total = tl.sum(e, 0)
    e_last = e
    if OVERLAP:
        e_last = tl.exp(z_last - top[None, :])
        total += tl.sum(e_last, 0)
    share = 1.0 / total
    e *= share[None, :]
    if OVERLAP:
        e_last *= share[None, :]
    else:
        e_last = e
    return e, e_last
