"""pre_bmm, post_bmm, res_bmm: the public functions.

Letters: N streams (2..8), D hidden size; `...` any leading dims, the same for both arguments. Streams are bf16, fp16 or fp32 and
coefficients fp32 whatever the streams are (both fp64: eager form alone). Products and sums are fp32, the result is rounded once to the
dtype of the streams. Any strides. `impl` is "auto", "triton" or "eager", see kernel_runtime.impl. Formulas: reference/mhc.py.
Double backward is refused. TypeError for a wrong type or dtype, ValueError for a wrong shape, device, N or impl.
"""

from __future__ import annotations

import torch

from kernel_runtime import apply_function, check_dtype, run_eager, select_impl
from kernel_runtime.checks import FLOATS
from mhc_ops.bmm.op import Bmm
from mhc_ops.library import check_coefficient, check_stream_tensor, check_streams
from reference import mhc as reference


def pre_bmm(pre: torch.Tensor, x: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """Collapse: y[d] = sum_n pre[n] * x[n, d]. pre [..., N] fp32, x [..., N, D]; returns y [..., D] in the dtype of x.

    Types, errors and `impl`: head of mhc_ops/bmm/api.py.
    """
    op = "pre_bmm"
    check_stream_tensor(op, "x", x)
    check_coefficient(op, "pre", pre, x.shape[:-1], "x", x)
    how = select_impl(op, impl, x)
    if impl == "eager":
        return run_eager(reference.pre_bmm, pre, x)
    return apply_function(Bmm, pre, x, "pre", how)


def post_bmm(post: torch.Tensor, f: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """Spread: out[k, d] = post[k] * f[d]. post [..., N] fp32, f [..., D]; returns [..., N, D] in the dtype of f.

    Types, errors and `impl`: head of mhc_ops/bmm/api.py.
    """
    op = "post_bmm"
    check_dtype(op, "f", f, FLOATS)
    if f.dim() < 1 or f.shape[-1] < 1:
        raise ValueError(f"{op}: f has shape {list(f.shape)}, wanted [..., D] with D at least 1")
    check_coefficient(op, "post", post, [*f.shape[:-1], "N"], "f", f)
    check_streams(op, "post", post.shape[-1])
    how = select_impl(op, impl, f)
    if impl == "eager":
        return run_eager(reference.post_bmm, post, f)
    return apply_function(Bmm, post, f, "post", how)


def res_bmm(comb: torch.Tensor, x: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """Residual mix: out[k, d] = sum_j comb[j, k] * x[j, d], the FIRST index of comb contracted.

    comb [..., N, N] fp32, x [..., N, D]; returns [..., N, D] in the dtype of x. Types, errors and `impl`: head of mhc_ops/bmm/api.py.
    """
    op = "res_bmm"
    check_stream_tensor(op, "x", x)
    check_coefficient(op, "comb", comb, [*x.shape[:-1], x.shape[-2]], "x", x)
    how = select_impl(op, impl, x)
    if impl == "eager":
        return run_eager(reference.res_bmm, comb, x)
    return apply_function(Bmm, comb, x, "res", how)
