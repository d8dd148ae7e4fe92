"""sinkhorn: the public function."""

import torch

from kernel_runtime import apply_function, check_dtype, run_eager, select_impl
from kernel_runtime.checks import FLOATS
from mhc_ops.library import check_iteration, check_streams
from mhc_ops.sinkhorn.op import Sinkhorn
from reference import mhc as reference


def sinkhorn(logits: torch.Tensor, *, iters: int = 20, eps: float = 1e-6, convention: str = "v4", impl: str = "auto") -> torch.Tensor:
    """Nearly doubly stochastic matrices from logits by `iters` Sinkhorn-Knopp iterations, differentiable in logits.

    logits      [..., N, N], N in 2..8, bf16, fp16 or fp32 (fp64: eager form alone), any strides.
    iters       number of iterations, at least 1; part of the result, as 20 iterations do not converge.
    eps         "v4": added to the softmax and to every sum; "paper" ignores it.
    convention  "v4" (DeepSeek-V4: softmax start, ends on a column norm) or "paper" (arXiv 2512.24880: exp start, ends on a row norm).
    impl        "auto", "triton" or "eager", see kernel_runtime.impl.

    Returns comb [..., N, N] in fp32 (fp64 for fp64 logits). Formulas: reference/mhc.py. Double backward is refused.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, N, iters, eps, convention or impl.
    """
    op = "sinkhorn"
    check_dtype(op, "logits", logits, FLOATS)
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"{op}: logits has shape {list(logits.shape)}, wanted [..., N, N]")
    check_streams(op, "logits", logits.shape[-1])
    check_iteration(op, iters, eps, convention, eps_name="eps")
    how = select_impl(op, impl, logits)
    if impl == "eager":
        return run_eager(reference.sinkhorn, logits, iters=iters, eps=eps, convention=convention)
    return apply_function(Sinkhorn, logits, iters, float(eps), convention, how)
