"""hc_post: the public function."""

from __future__ import annotations

import torch

from kernel_runtime import apply_function, run_eager, select_impl
from mhc_ops.library import check_expansion, known_call
from mhc_ops.post.op import Post, run_forward
from mhc_ops.recompute.active import recording
from reference import mhc as reference


def hc_post(f: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """After a sublayer: out[k, d] = post[k] * f[d] + sum_j comb[j, k] * x[j, d], the FIRST index of comb contracted.

    f     [..., D] output of the sublayer, in the dtype of x.
    x     [..., N, D] the streams that hc_pre read, N in 2..8, bf16, fp16 or fp32 (fp64: eager form alone).
    post  [..., N] and comb [..., N, N], fp32 (fp64 beside fp64 streams). Any strides.
    impl  "auto", "triton" or "eager", see kernel_runtime.impl.

    Returns the new streams [..., N, D], summed in fp32 and rounded once to the dtype of x. Differentiable in all four tensors.
    Formulas: reference/mhc.py. Double backward is refused.
    TypeError for a wrong type or dtype (f and x must agree), ValueError for a wrong shape, device, N or impl.
    """
    op = "hc_post"
    options = known_call(run_forward, (f, x, post, comb), impl)
    if options is None:
        check_expansion(op, f, x, post, comb)
        how = select_impl(op, impl, x)
        if impl == "eager":
            return run_eager(reference.hc_post, f, x, post, comb)
        options = (how,)
    streams = apply_function(Post, f, x, post, comb, *options)
    if (recorder := recording()) is not None:
        recorder.post(streams, f, x, post, comb, options[0])
    return streams
