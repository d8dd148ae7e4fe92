"""hc_gates: the public function."""

from __future__ import annotations

import torch

from kernel_runtime import apply_function, check_dtype, check_int, run_eager, select_impl
from kernel_runtime.checks import COEFFICIENTS
from mhc_ops.gates.op import Gates
from mhc_ops.library import check_coefficient, check_iteration, check_streams, mix_columns
from reference import mhc as reference


def hc_gates(
    mixes: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    hc_mult: int = 4,
    iters: int = 20,
    hc_eps: float = 1e-6,
    convention: str = "v4",
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three coefficients of a site from its mixes, differentiable in all three tensors.

    mixes       [..., M] fp32, M = N*N + 2N columns pre | post | comb (row-major), already times the rms factor; any strides.
    scale       [3] fp32, one factor each for pre, post and comb; base [M] fp32.
    hc_mult     N, the number of streams, 2..8.
    iters       Sinkhorn iterations, at least 1.
    hc_eps      "v4": added to pre, to the softmax and to every sum; "paper" ignores it.
    convention  "v4" (DeepSeek-V4) or "paper" (arXiv 2512.24880).
    impl        "auto", "triton" or "eager", see kernel_runtime.impl.

    Returns pre [..., N] in (0, 1) + hc_eps, post [..., N] in (0, 2) and comb [..., N, N], fp32 (all fp64 for fp64 arguments).
    Formulas: reference/mhc.py. Double backward is refused.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device, hc_mult, iters, eps, convention or impl.
    """
    op = "hc_gates"
    check_dtype(op, "mixes", mixes, COEFFICIENTS)
    check_int(op, "hc_mult", hc_mult, minimum=1)
    check_streams(op, "hc_mult", hc_mult)
    columns = mix_columns(hc_mult)
    if mixes.dim() < 1 or mixes.shape[-1] != columns:
        raise ValueError(f"{op}: mixes has shape {list(mixes.shape)}, wanted [..., {columns}] for hc_mult = {hc_mult}")
    check_coefficient(op, "scale", scale, [3], "mixes", mixes)
    check_coefficient(op, "base", base, [columns], "mixes", mixes)
    check_iteration(op, iters, hc_eps, convention)
    how = select_impl(op, impl, mixes)
    if impl == "eager":
        return run_eager(reference.hc_gates, mixes, scale, base, hc_mult=hc_mult, iters=iters, hc_eps=hc_eps, convention=convention)
    return apply_function(Gates, mixes, scale, base, hc_mult, iters, float(hc_eps), convention, how)
