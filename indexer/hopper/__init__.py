"""Kernels for sm_90 alone, in Triton's Gluon dialect: the scores of whole rows of keys. What they cover says `covers`, whether a call takes them
`takes`."""

from __future__ import annotations

from functools import cache

import torch

TRITON_VERSIONS = ("3.6",)  # Gluon is experimental: it has changed between releases
HEADS = (32, 64, 128)
DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)


def covers(dtype: torch.dtype, heads: int, dim: int) -> bool:
    """Whether there is a kernel for such an indexer."""
    return dtype in DTYPES and heads in HEADS and dim in DIMS


def has_gluon() -> bool:
    import triton

    return triton.__version__.startswith(tuple(f"{v}." for v in TRITON_VERSIONS))


@cache
def on_device(device: torch.device) -> bool:
    """Whether kernels for sm_90 alone can run there."""
    if device.type != "cuda" or torch.version.hip is not None or not has_gluon():
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def takes(q: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the kernel here makes the scores of q [.., H, Di]: the one place where it and the portable one part. Device, dtype, H and Di decide,
    and that every tensor lies at a multiple of 16 bytes, as copies of 16 bytes want it."""
    if not (q.is_cuda and covers(q.dtype, *q.shape[-2:]) and on_device(q.device)):
        return False
    return not any(t.data_ptr() % 16 for t in (q, *others))
