"""hc_expand: the public function."""

from __future__ import annotations

import torch

from kernel_runtime import apply_function, check_dtype, check_int
from kernel_runtime.checks import FLOATS
from mhc_ops.expand.op import Expand
from mhc_ops.library import check_streams


def hc_expand(h: torch.Tensor, hc_mult: int = 4) -> torch.Tensor:
    """Entry of the network: N copies of the embedding, differentiable in it (the sum of the copies' gradients, added in fp32).

    h        [..., D], bf16, fp16, fp32 or fp64, any strides.
    hc_mult  N, the number of streams, 2..8.

    Returns new contiguous streams [..., N, D] in the dtype of h. Double backward is refused.
    TypeError for a wrong type or dtype, ValueError for a wrong shape or hc_mult.
    """
    op = "hc_expand"
    check_dtype(op, "h", h, FLOATS)
    if h.dim() < 1 or h.shape[-1] < 1:
        raise ValueError(f"{op}: h has shape {list(h.shape)}, wanted [..., D] with D at least 1")
    check_int(op, "hc_mult", hc_mult, minimum=1)
    check_streams(op, "hc_mult", hc_mult)
    return apply_function(Expand, h, hc_mult)
