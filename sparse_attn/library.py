"""The registered ops of this package (torch.ops.sparse_attn.*) and the checks that its public functions share."""

from __future__ import annotations

import torch

from kernel_runtime import OpLibrary, check_dtype, check_same

OPS = OpLibrary("sparse_attn")
MAX_HEADS = 128


def check_flag(op: str, name: str, value: object) -> None:
    """TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be True or False, got {type(value).__name__}")


def check_cu_seqlens(op: str, name: str, value: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    """[documents + 1] int32 on the device of `like`; `value` is never read."""
    check_dtype(op, name, value, (torch.int32,))
    check_same(op, name, value, like_name, like, dtype=False)
    if value.dim() != 1 or value.shape[0] < 1:
        raise ValueError(f"{op}: {name} has shape {list(value.shape)}, wanted [documents + 1]")


def check_coefficients(op: str, name: str, value: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    """fp32 on the device of `like`; fp64 beside fp64 tensors, for checks."""
    check_dtype(op, name, value, (torch.float64,) if like.dtype == torch.float64 else (torch.float32,))
    check_same(op, name, value, like_name, like, dtype=False)
