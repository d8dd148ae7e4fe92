"""Kernels for sm_90 alone. The boundary of two sublayers in Triton's Gluon dialect, which moves fewer bytes than the portable kernels do: what it
covers says `covers`. The second stage of the gates' backward pass, launched before the first has ended."""

from __future__ import annotations

import torch

from kernel_runtime.gluon import has_gluon, on_device

__all__ = ["covers", "has_gluon", "on_device", "takes"]

STREAMS = 4  # N
ALIGNED, FORWARD_ALIGNED = 64, 256  # what D must be a multiple of: columns of a program


def covers(dtype: torch.dtype, n: int, d: int, aligned: int = ALIGNED) -> bool:
    """Whether there are kernels for such streams: those of the backward pass, with FORWARD_ALIGNED those of the forward pass"""
    return dtype == torch.bfloat16 and n == STREAMS and d % aligned == 0


def takes(x: torch.Tensor, *others: torch.Tensor, aligned: int = ALIGNED) -> bool:
    """Whether the kernels here run for streams x: the one place where they and the portable ones part. Device, dtype, N and D decide, and that
    every tensor lies at a multiple of 16 bytes, as copies of 16 bytes want it."""
    if not (x.is_cuda and covers(x.dtype, *x.shape[-2:], aligned) and on_device(x.device)):
        return False
    return not any(t.data_ptr() % 16 for t in (x, *others))
