"""Device functions shared by the kernels of all ops. Imports Triton."""

import triton
import triton.language as tl

from kernel_runtime.impl import interpreting

INTERPRETING = tl.constexpr(interpreting())


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation. The CPU interpreter computes bf16 products wrongly, so there the operands become fp32 first."""
    if INTERPRETING:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
