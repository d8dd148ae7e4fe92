"""Second stage of the gates' backward pass for sm_90: put into the stream before the first stage has ended, it waits for it there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernel_runtime.launch import Spec
from mhc_ops.gates.bwd import reduce_partial_kernel, reduce_spec


@triton.jit(do_not_specialize=["G"])
def waiting_reduce_kernel(partial, dscale, dbase, G, M: tl.constexpr, C: tl.constexpr, BG: tl.constexpr):
    gdc_wait()
    reduce_partial_kernel(partial, dscale, dbase, G, M, C, BG)


@cache
def waiting_reduce_spec(n: int) -> Spec:
    return replace(reduce_spec(n), kernel=waiting_reduce_kernel, targets=("cuda",), options={"launch_pdl": True}, arch=90)
