"""Where kernels in Triton's Gluon dialect can run: on sm_90, with the Triton that they were written for."""

from __future__ import annotations

from functools import cache

import torch

TRITON_VERSIONS = ("3.6",)  # Gluon is experimental: it has changed between releases


def has_gluon() -> bool:
    """Whether the installed Triton is one of TRITON_VERSIONS."""
    import triton

    return triton.__version__.startswith(tuple(f"{v}." for v in TRITON_VERSIONS))


@cache
def on_device(device: torch.device) -> bool:
    """Whether kernels for sm_90 alone can run there."""
    if device.type != "cuda" or torch.version.hip is not None or not has_gluon():
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)
