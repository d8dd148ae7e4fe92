"""hc_head: the public function."""

from __future__ import annotations

import torch

from kernel_runtime import apply_function, run_eager, select_impl
from mhc_ops.head.op import Head
from mhc_ops.library import check_coefficient, check_eps, check_stream_tensor
from reference import mhc as reference


def hc_head(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    impl: str = "auto",
) -> torch.Tensor:
    """Exit of the network: the sum of the streams weighted with sigmoid(mixes * scale + base) + hc_eps; differentiable in every tensor.

    x         [..., N, D] streams, N in 2..8, bf16, fp16 or fp32 (fp64: eager form alone), any strides.
    fn        [N, N*D] fp32; scale [1] fp32; base [N] fp32. The mixes are those of hc_project(x, fn, norm_eps).
    hc_eps    added to the weights; there is no convention here, pass 0 for none.
    norm_eps  added to the mean square of the streams.
    impl      "auto", "triton" or "eager", see kernel_runtime.impl.

    Returns h [..., D] in the dtype of x. Formulas: reference/mhc.py. Saved for backward: the arguments, the mixes [..., N], rstd [...].
    Double backward is refused. TypeError for a wrong type or dtype, ValueError for a wrong shape, device, N, eps or impl.
    """
    op = "hc_head"
    check_stream_tensor(op, "x", x)
    n, d = x.shape[-2:]
    check_coefficient(op, "fn", fn, [n, n * d], "x", x)
    check_coefficient(op, "scale", scale, [1], "x", x)
    check_coefficient(op, "base", base, [n], "x", x)
    check_eps(op, "hc_eps", hc_eps)
    check_eps(op, "norm_eps", norm_eps)
    how = select_impl(op, impl, x)
    if impl == "eager":
        return run_eager(reference.hc_head, x, fn, scale, base, hc_eps=hc_eps, norm_eps=norm_eps)
    return apply_function(Head, x, fn, scale, base, float(hc_eps), float(norm_eps), how)
