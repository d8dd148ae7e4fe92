"""Shapes, input makers and error measures shared by tests and benches."""

from __future__ import annotations

import torch


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in fp64; NaN stays NaN (so it never passes a `<=`), and 0 where both are empty or zero."""
    difference = (got.detach().double() - want.detach().double()).norm()
    norm = want.detach().double().norm()
    return (difference / norm if norm > 0 else difference).item()
