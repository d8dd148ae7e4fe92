"""The attention for sm_90, warp-specialised in Triton's Gluon dialect. What it covers: `hopper_supports`."""

from __future__ import annotations

from functools import cache

import torch

from kernel_runtime.gluon import TRITON_VERSIONS, has_gluon
from kernel_runtime.impl import triton_installed

HEAD_DIMS = (128, 256, 512)
DTYPES = (torch.bfloat16, torch.float16)


@cache
def _device_reason(index: int) -> str | None:
    if not triton_installed():
        return "triton is not installed"
    import triton

    if not has_gluon():
        return f"triton is {triton.__version__}, the Gluon kernels were written for {', '.join(TRITON_VERSIONS)}"
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        return f"the device is sm_{capability[0]}{capability[1]}, not sm_90"
    return None


def hopper_supports(q: torch.Tensor) -> str | None:
    """Why the Gluon kernels cannot take this call, None if they can: the one place where the two implementations part.

    Modes, layouts, head counts, windows, ratios and lists are all covered; device, dtype and D decide.
    """
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"the tensors are on {q.device}"
    if q.dtype not in DTYPES:
        return f"the dtype is {str(q.dtype).removeprefix('torch.')}, wanted bfloat16 or float16"
    if q.shape[-1] not in HEAD_DIMS:
        return f"D = {q.shape[-1]}, wanted one of {', '.join(map(str, HEAD_DIMS))}"
    return _device_reason(q.device.index if q.device.index is not None else torch.cuda.current_device())
