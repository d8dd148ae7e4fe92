"""Manifold-constrained hyper-connections (mHC): the specification, in plain PyTorch.

This file is what the kernels have to compute; it is written to be read. Every function is differentiable by ordinary
autograd, and its public twin in `mhc_ops` has the same name and keyword arguments (plus `impl`).

Legend
    B, S, T   batch, sequence length, tokens (T = B*S); every function takes any leading dims `...` in their place
    N         number of residual streams (`hc_mult`), 2..8
    D         hidden size
    x         streams `[..., N, D]`                      f   sublayer output `[..., D]`
    y, h      collapsed streams `[..., D]`               M   N*N + 2*N, the columns of the mix
    n, j      index of a stream that is read             k   index of a stream that is written
    fn        projection `[M, N*D]`; `base [M]`; `scale [3]`, one factor each for pre, post, comb
    mixes     `[..., M]`, columns ordered pre (N) | post (N) | comb (N*N, row-major)
    rstd      `[...]`, r below, the reciprocal root mean square of all N*D values of a token

One sublayer F (attention or MLP), formulas in the order of evaluation
    r            = 1 / sqrt(mean over n, d of x[n, d]^2 + norm_eps)              hc_project
    mixes        = (x_flat @ fn^T) * r                                           (the norm comes after the product)
    pre[n]       = sigmoid(mixes_pre[n] * scale[0] + base_pre[n]) + hc_eps       hc_gates
    post[k]      = 2 * sigmoid(mixes_post[k] * scale[1] + base_post[k])
    comb[j, k]   = Sinkhorn(mixes_comb[j, k] * scale[2] + base_comb[j, k])       sinkhorn
    y[d]         = sum_n pre[n] * x[n, d]                                        pre_bmm;  hc_pre is everything so far
    f            = F(y)
    out[k, d]    = post[k] * f[d] + sum_j comb[j, k] * x[j, d]                   hc_post
The sum of the last line runs over the FIRST index of comb: comb is applied transposed. A doubly stochastic check cannot see a
missing transpose, and every doubly stochastic 2 x 2 matrix is symmetric: look at it with an asymmetric comb.

Conventions (`convention=`)
    "v4"     DeepSeek-V4 as published in its model code: comb starts as softmax over the last index + hc_eps, is divided by
             (column sum + hc_eps), then iters - 1 times by (row sum + hc_eps) and by (column sum + hc_eps).
             It ends on a column norm: columns sum to 1, rows nearly so.
    "paper"  mHC, arXiv 2512.24880, section 4.2: comb starts as exp(logits), each iteration divides by the column sums and then
             by the row sums. It ends on a row norm. No eps: hc_eps is ignored, pre is the bare sigmoid (norm_eps, the guard of r,
             stays). The convention names how the coefficients are made, not how they are applied: comb enters hc_post by its first
             index here too, where the paper writes H_res x. Hand comb.transpose(-1, -2) to hc_post for the paper's product.
A column sum runs over the first index (dim -2), a row sum over the last (dim -1). The number of iterations is part of the result:
over 4096 random 4 x 4 matrices in fp64, v4's row sums after 20 iterations are off by 1e-6 (median) and 1e-3 (worst) at logit std 1,
by 2e-4 and 5e-2 at std 3. Hence the gradient is that of the iterations as they ran, not that of their limit.

Types: everything is computed in fp32, or in fp64 if any operand is fp64. Coefficients (mixes, rstd, pre, post, comb) are returned
in the dtype of computation. Results in the place of streams or of a sublayer's input are cast to the dtype of x (or f) once,
at the end. Matrix products run with autocast off; on a GPU they follow torch.set_float32_matmul_precision, whose "highest"
(the default) is what this specification means.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

Convention = str  # "v4" or "paper"

__all__ = [
    "hc_expand",
    "hc_gates",
    "hc_head",
    "hc_post",
    "hc_post_pre",
    "hc_pre",
    "hc_project",
    "post_bmm",
    "pre_bmm",
    "res_bmm",
    "sinkhorn",
]


def _compute_dtype(*operands: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in operands) else torch.float32


def _is_paper(convention: str) -> bool:
    if convention not in ("v4", "paper"):
        raise ValueError(f'convention must be "v4" or "paper", got {convention!r}')
    return convention == "paper"


# ---- coefficients -------------------------------------------------------------------------------------------------------------


def sinkhorn(logits: Tensor, *, iters: int = 20, eps: float = 1e-6, convention: Convention = "v4") -> Tensor:
    """Nearly doubly stochastic matrices from logits, by `iters` Sinkhorn-Knopp iterations.

    logits `[..., N, N]`; returns comb `[..., N, N]`, positive, fp32 (fp64 for fp64 logits). Conventions as in the head of this file;
    "paper" ignores eps and works on log comb, so that logits of +-1e4 give finite values and gradients.
    """
    logits = logits.to(_compute_dtype(logits))
    if _is_paper(convention):
        log_comb = logits
        for _ in range(iters):
            log_comb = log_comb - torch.logsumexp(log_comb, dim=-2, keepdim=True)  # columns
            log_comb = log_comb - torch.logsumexp(log_comb, dim=-1, keepdim=True)  # rows
        return log_comb.exp()
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)  # columns
    for _ in range(iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)  # rows
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)  # columns
    return comb


def hc_gates(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    hc_mult: int = 4,
    iters: int = 20,
    hc_eps: float = 1e-6,
    convention: Convention = "v4",
) -> tuple[Tensor, Tensor, Tensor]:
    """The three coefficients of a site from its mixes.

    mixes `[..., M]` (already times r), scale `[3]`, base `[M]`, N = hc_mult;
    returns pre `[..., N]` in (0, 1) + hc_eps, post `[..., N]` in (0, 2), comb `[..., N, N]`.
    """
    dtype = _compute_dtype(mixes, scale, base)
    widths = [hc_mult, hc_mult, hc_mult * hc_mult]
    mix_pre, mix_post, mix_comb = mixes.to(dtype).split(widths, dim=-1)
    base_pre, base_post, base_comb = base.to(dtype).split(widths)
    scale_pre, scale_post, scale_comb = scale.to(dtype).unbind()

    pre = torch.sigmoid(mix_pre * scale_pre + base_pre)
    if not _is_paper(convention):
        pre = pre + hc_eps
    post = 2 * torch.sigmoid(mix_post * scale_post + base_post)
    logits = (mix_comb * scale_comb + base_comb).unflatten(-1, (hc_mult, hc_mult))
    return pre, post, sinkhorn(logits, iters=iters, eps=hc_eps, convention=convention)


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Autocast off on the device of x; meta tensors know none and would refuse even that."""
    # torch.amp.is_autocast_available breaks the graph of torch.compile up to torch 2.11
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def hc_project(x: Tensor, fn: Tensor, *, norm_eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The mixes of every token: a linear map of all its streams, normalised by their root mean square (no weight).

    x `[..., N, D]`, fn `[K, N*D]` (K = M at a site, N at the head); returns mixes `[..., K]` and rstd `[...]`.
    The gradient of mixes flows through r. The returned rstd carries none: it is there to be saved for backward.
    """
    dtype = _compute_dtype(x, fn)
    x_flat = x.to(dtype).flatten(-2)
    rstd = torch.rsqrt(x_flat.square().mean(dim=-1) + norm_eps)
    with _without_autocast(x):
        mixes = F.linear(x_flat, fn.to(dtype))
    return mixes * rstd.unsqueeze(-1), rstd.detach()


# ---- the three vector products, before their result is cast ---------------------------------------------------------------------


def _collapse(pre: Tensor, x: Tensor) -> Tensor:
    """y[d] = sum_n pre[n] * x[n, d], in the dtype of computation."""
    dtype = _compute_dtype(pre, x)
    return (pre.to(dtype).unsqueeze(-1) * x.to(dtype)).sum(dim=-2)


def _spread(post: Tensor, f: Tensor) -> Tensor:
    """out[k, d] = post[k] * f[d], in the dtype of computation."""
    dtype = _compute_dtype(post, f)
    return post.to(dtype).unsqueeze(-1) * f.to(dtype).unsqueeze(-2)


def _mix(comb: Tensor, x: Tensor) -> Tensor:
    """out[k, d] = sum_j comb[j, k] * x[j, d] (the first index of comb is contracted), in the dtype of computation."""
    dtype = _compute_dtype(comb, x)
    with _without_autocast(x):
        return torch.matmul(comb.to(dtype).transpose(-1, -2), x.to(dtype))


def pre_bmm(pre: Tensor, x: Tensor) -> Tensor:
    """Collapse: y[d] = sum_n pre[n] * x[n, d]. pre `[..., N]`, x `[..., N, D]`; returns y `[..., D]` in the dtype of x."""
    return _collapse(pre, x).to(x.dtype)


def post_bmm(post: Tensor, f: Tensor) -> Tensor:
    """Spread: out[k, d] = post[k] * f[d]. post `[..., N]`, f `[..., D]`; returns `[..., N, D]` in the dtype of f."""
    return _spread(post, f).to(f.dtype)


def res_bmm(comb: Tensor, x: Tensor) -> Tensor:
    """Residual mix: out[k, d] = sum_j comb[j, k] * x[j, d], the FIRST index of comb contracted.

    comb `[..., N, N]`, x `[..., N, D]`; returns `[..., N, D]` in the dtype of x.
    """
    return _mix(comb, x).to(x.dtype)


# ---- a sublayer's two sides -----------------------------------------------------------------------------------------------------


def hc_pre(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    iters: int = 20,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    convention: Convention = "v4",
    pre_mix: Tensor | None = None,
    return_pre: bool | None = None,
) -> tuple[Tensor, ...]:
    """Everything before the sublayer: its coefficients and its input.

    x `[..., N, D]`, fn `[M, N*D]`, scale `[3]`, base `[M]`; returns y `[..., D]` in the dtype of x, post `[..., N]`, comb `[..., N, N]`
    and, with return_pre, pre `[..., N]`.

    Single-pass form (DeepSeek-V4.1): pre_mix `[..., N]`, the pre of the PREVIOUS sublayer, collapses the streams in place of this
    site's own pre, which is returned for the next sublayer. return_pre is on by default exactly when pre_mix is given; the first
    sublayer of such a chain has no pre_mix, collapses with its own pre, and asks for it with return_pre=True.
    """
    mixes, _ = hc_project(x, fn, norm_eps=norm_eps)
    pre, post, comb = hc_gates(mixes, scale, base, hc_mult=x.shape[-2], iters=iters, hc_eps=hc_eps, convention=convention)
    y = pre_bmm(pre if pre_mix is None else pre_mix, x)
    if return_pre is None:
        return_pre = pre_mix is not None
    return (y, post, comb, pre) if return_pre else (y, post, comb)


def hc_post(f: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """After the sublayer: out[k, d] = post[k] * f[d] + sum_j comb[j, k] * x[j, d], summed before the one cast to x.dtype.

    f `[..., D]`, x `[..., N, D]` (the streams that hc_pre read), post `[..., N]`, comb `[..., N, N]`;
    returns the new streams `[..., N, D]`.
    """
    return (_spread(post, f) + _mix(comb, x)).to(x.dtype)


def hc_post_pre(
    f: Tensor,
    x: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    iters: int = 20,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    convention: Convention = "v4",
    pre_mix: Tensor | None = None,
    return_pre: bool | None = None,
) -> tuple[Tensor, ...]:
    """The boundary of two sublayers: hc_post of the one that ends (f, x, post, comb), hc_pre of the one that begins (the rest).

    The second half reads the new streams as they are stored, in x.dtype.
    Returns the new streams `[..., N, D]`, then what hc_pre returns: y, post, comb and, with return_pre, pre.
    """
    streams = hc_post(f, x, post, comb)
    begin = hc_pre(
        streams,
        fn,
        scale,
        base,
        iters=iters,
        hc_eps=hc_eps,
        norm_eps=norm_eps,
        convention=convention,
        pre_mix=pre_mix,
        return_pre=return_pre,
    )
    return (streams, *begin)


# ---- the two ends of the network ------------------------------------------------------------------------------------------------


def hc_expand(h: Tensor, hc_mult: int = 4) -> Tensor:
    """Entry: N copies of the embedding. h `[..., D]`; returns new contiguous streams `[..., N, D]`, N = hc_mult."""
    return torch.stack([h] * hc_mult, dim=-2)


def head_weights(mixes: Tensor, scale: Tensor, base: Tensor, *, hc_eps: float = 1e-6) -> Tensor:
    """The head's weight of every stream, sigmoid(mixes * scale + base) + hc_eps. mixes `[..., N]`, scale `[1]`, base `[N]`."""
    dtype = _compute_dtype(mixes, scale, base)
    return torch.sigmoid(mixes.to(dtype) * scale.to(dtype) + base.to(dtype)) + hc_eps


def hc_head(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Exit: the streams' sum weighted with head_weights. It knows no convention.

    x `[..., N, D]`, fn `[N, N*D]`, scale `[1]`, base `[N]`; returns h `[..., D]` in the dtype of x.
    """
    mixes, _ = hc_project(x, fn, norm_eps=norm_eps)
    return pre_bmm(head_weights(mixes, scale, base, hc_eps=hc_eps), x)
