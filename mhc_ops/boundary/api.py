"""hc_post_pre: the public function."""

from __future__ import annotations

import torch

from kernel_runtime import apply_function, run_eager, select_impl
from mhc_ops.boundary.op import PostPre, run_forward
from mhc_ops.library import check_boundary, check_site_options, known_site
from mhc_ops.recompute.active import recording
from reference import mhc as reference


def hc_post_pre(
    f: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
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
    """The boundary of two sublayers: hc_post of the one that ends, hc_pre of the one that begins; differentiable in every tensor.

    f, x, post, comb              of the sublayer that ends, as in hc_post.
    fn, scale, base, and options  of the one that begins, as in hc_pre.

    The second half reads the new streams as they are stored, in the dtype of x.
    Returns the new streams [..., N, D] and y [..., D] in the dtype of x, then post [..., N], comb [..., N, N] and, with return_pre,
    pre [..., N] of the sublayer that begins, fp32 (fp64 for fp64 streams). Formulas: reference/mhc.py.
    Saved for backward: the arguments, the new streams, the mixes [..., M] and rstd [...]. Double backward is refused.
    Errors are those of hc_post and hc_pre.
    """
    op = "hc_post_pre"
    tensors = (f, x, post, comb, fn, scale, base, pre_mix)
    options = known_site(run_forward, op, tensors, iters, hc_eps, norm_eps, convention, return_pre, impl)
    if options is None:
        check_boundary(op, *tensors)
        check_site_options(op, iters, hc_eps, norm_eps, convention, return_pre)
        how = select_impl(op, impl, x)
        if impl == "eager":
            return run_eager(
                reference.hc_post_pre, f, x, post, comb, fn, scale, base, iters=iters, hc_eps=hc_eps, norm_eps=norm_eps,
                convention=convention, pre_mix=pre_mix, return_pre=return_pre,
            )  # fmt: skip
        options = (iters, float(hc_eps), float(norm_eps), convention, how)
    if (recorder := recording()) is None:
        streams, y, pre, post_out, comb_out = apply_function(PostPre, *tensors, *options)
    else:
        with recorder.deferred():  # the op saves its own streams
            streams, y, pre, post_out, comb_out = apply_function(PostPre, *tensors, *options)
            recorder.post(streams, f, x, post, comb, options[4])
            recorder.pre(y, pre if pre_mix is None else pre_mix, streams, options[4])
    if return_pre is None:
        return_pre = pre_mix is not None
    return (streams, y, post_out, comb_out, pre) if return_pre else (streams, y, post_out, comb_out)
