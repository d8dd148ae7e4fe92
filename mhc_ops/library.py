"""The registered ops of this package (torch.ops.mhc_ops.*) and the checks that its public functions share."""

import torch

from kernel_runtime import OpLibrary, check_choice

OPS = OpLibrary("mhc_ops")
CONVENTIONS = ("v4", "paper")
MIN_STREAMS, MAX_STREAMS = 2, 8


def check_streams(op: str, name: str, n: int | torch.SymInt) -> None:
    """ValueError unless the number of streams is one that the library is built for."""
    if not MIN_STREAMS <= n <= MAX_STREAMS:
        raise ValueError(f"{op}: {name} has N = {n} streams, wanted {MIN_STREAMS} to {MAX_STREAMS}")


def check_convention(op: str, convention: str) -> None:
    check_choice(op, "convention", convention, CONVENTIONS)
