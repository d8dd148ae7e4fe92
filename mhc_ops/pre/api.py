"""hc_pre: the public function."""

from __future__ import annotations

import torch

from kernel_runtime import apply_function, run_eager, select_impl
from mhc_ops.library import check_site, check_site_options, known_site
from mhc_ops.pre.op import Pre, run_forward
from mhc_ops.recompute.active import recording
from reference import mhc as reference


def hc_pre(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    iters: int = 20,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    convention: str = "v4",
    pre_mix: torch.Tensor | None = None,
    return_pre: bool | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Everything before a sublayer, its coefficients and its input; differentiable in every tensor.

    x           [..., N, D] streams, N in 2..8, bf16, fp16 or fp32 (fp64: eager form alone), any strides.
    fn          [M, N*D] fp32, M = N*N + 2N columns pre | post | comb (row-major); scale [3] fp32; base [M] fp32.
    iters       Sinkhorn iterations, at least 1.
    hc_eps      "v4": added to pre, to the softmax and to every sum; "paper" ignores it.
    norm_eps    added to the mean square of the streams.
    convention  "v4" (DeepSeek-V4) or "paper" (arXiv 2512.24880).
    pre_mix     [..., N] fp32: the pre of the PREVIOUS sublayer, which then collapses the streams (single-pass form, DeepSeek-V4.1).
    return_pre  whether to return this site's own pre for the next sublayer; None: exactly when pre_mix is given. The first sublayer of
                a single-pass chain has no pre_mix and asks with True.
    impl        "auto", "triton" or "eager", see kernel_runtime.impl.

    Returns y [..., D] in the dtype of x, post [..., N], comb [..., N, N] and, with return_pre, pre [..., N], all fp32
    (fp64 for fp64 streams). Formulas: reference/mhc.py. Saved for backward: the arguments, the mixes [..., M] and rstd [...].
    Double backward is refused.
    TypeError for a wrong type or dtype, ValueError for a wrong shape, device, N, iters, eps, convention or impl.
    """
    op = "hc_pre"
    tensors = (x, fn, scale, base, pre_mix)
    options = known_site(run_forward, op, tensors, iters, hc_eps, norm_eps, convention, return_pre, impl)
    if options is None:
        check_site(op, *tensors)
        check_site_options(op, iters, hc_eps, norm_eps, convention, return_pre)
        how = select_impl(op, impl, x)
        if impl == "eager":
            return run_eager(
                reference.hc_pre, x, fn, scale, base, iters=iters, hc_eps=hc_eps, norm_eps=norm_eps, convention=convention,
                pre_mix=pre_mix, return_pre=return_pre,
            )  # fmt: skip
        options = (iters, float(hc_eps), float(norm_eps), convention, how)
    y, pre, post, comb = apply_function(Pre, *tensors, *options)
    if (recorder := recording()) is not None:
        recorder.pre(y, pre if pre_mix is None else pre_mix, x, options[4])
    if return_pre is None:
        return_pre = pre_mix is not None
    return (y, post, comb, pre) if return_pre else (y, post, comb)
