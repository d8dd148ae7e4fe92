"""Kernels for sm_90 alone, in Triton's Gluon dialect: the scores of whole rows of keys. What they cover says `covers`, whether a call takes them
`takes`."""

from __future__ import annotations

import torch

from kernel_runtime.gluon import has_gluon, on_device

__all__ = ["covers", "has_gluon", "on_device", "takes"]

HEADS = (32, 64, 128)
DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)


def covers(dtype: torch.dtype, heads: int, dim: int) -> bool:
    """Whether there is a kernel for such an indexer."""
    return dtype in DTYPES and heads in HEADS and dim in DIMS


def takes(q: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the kernel here makes the scores of q [.., H, Di]: the one place where it and the portable one part. Device, dtype, H and Di decide,
    and that every tensor lies at a multiple of 16 bytes, as copies of 16 bytes want it."""
    if not (q.is_cuda and covers(q.dtype, *q.shape[-2:]) and on_device(q.device)):
        return False
    return not any(t.data_ptr() % 16 for t in (q, *others))
