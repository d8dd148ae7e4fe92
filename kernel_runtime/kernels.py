"""Device functions shared by the kernels of all ops. Imports Triton."""

import triton
import triton.language as tl

from kernel_runtime.impl import interpreting

INTERPRETING = tl.constexpr(interpreting())


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation. fp32 operands are multiplied in full, not rounded to tf32: fp32 is asked for where precision matters,
    and a rounded score would select other entries. The CPU interpreter computes 16-bit products wrongly, so there operands become fp32 first."""
    if INTERPRETING:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
