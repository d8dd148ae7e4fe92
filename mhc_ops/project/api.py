"""hc_project: the public function."""

from __future__ import annotations

import torch

from kernel_runtime import apply_function, run_eager, select_impl
from mhc_ops.library import check_coefficient, check_eps, check_stream_tensor, mix_columns
from mhc_ops.project.op import Project
from reference import mhc as reference


def hc_project(x: torch.Tensor, fn: torch.Tensor, *, norm_eps: float = 1e-6, impl: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """The mixes of every token: a linear map of all its streams, divided by their root mean square (no weight).

    x         [..., N, D] streams, N in 2..8, bf16, fp16 or fp32 (fp64: eager form alone), any strides.
    fn        [K, N*D] fp32; K = N*N + 2N at a site, N at the head.
    norm_eps  added to the mean square.
    impl      "auto", "triton" or "eager", see kernel_runtime.impl.

    Returns mixes [..., K] = (x_flat @ fn^T) * rstd and rstd [...] = 1 / sqrt(mean(x^2) + norm_eps), fp32 (fp64 for fp64 arguments).
    mixes is differentiable in x (through rstd too) and fn; rstd carries no gradient. Formulas: reference/mhc.py.
    Double backward is refused. TypeError for a wrong type or dtype, ValueError for a wrong shape, device, N, norm_eps or impl.
    """
    op = "hc_project"
    check_stream_tensor(op, "x", x)
    n, d = x.shape[-2:]
    check_coefficient(op, "fn", fn, ["K", n * d], "x", x)
    if fn.shape[0] not in (mix_columns(n), n):
        raise ValueError(f"{op}: fn has {fn.shape[0]} rows, wanted {mix_columns(n)} (a site) or {n} (the head) for N = {n}")
    check_eps(op, "norm_eps", norm_eps)
    how = select_impl(op, impl, x)
    if impl == "eager":
        return run_eager(reference.hc_project, x, fn, norm_eps=norm_eps)
    return apply_function(Project, x, fn, float(norm_eps), how)
