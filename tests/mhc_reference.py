"""What the tests of the mHC specification share."""

import torch
from torch import Tensor

from reference import mhc
from reference.cases.mhc import MhcShape

F64 = torch.float64
SMALL = MhcShape(1, 3, 3, 5)
PER_SITE = ("fn", "scale", "base")


def call(op: str, inputs: dict[str, Tensor], shape: MhcShape, **options: object) -> tuple[Tensor, ...]:
    if op in ("hc_gates", "hc_expand"):
        options["hc_mult"] = shape.N
    out = getattr(mhc, op)(**inputs, **options)
    return (out,) if isinstance(out, Tensor) else out


def assert_close(got: Tensor, want: Tensor, rel: float) -> None:
    """Largest error, relative to the largest value."""
    assert got.shape == want.shape
    error = (got.double() - want.double()).abs().max().item()
    assert error <= rel * want.double().abs().max().item(), f"error {error:.3e}, largest value {want.abs().max().item():.3e}"


def deviation(comb: Tensor, dim: int) -> float:
    return (comb.sum(dim) - 1).abs().max().item()
