"""Shapes and inputs of the mHC ops, shared by tests and benches. Letters as in `reference.mhc`.

Every maker draws on the CPU in fp32 (fp64 for fp64 streams) from its own seed and only then casts and moves, so that a case has the
same values on every device, and the bf16 case is the rounded fp32 case.

    inputs = make_inputs("hc_post_pre", MhcShape(1, 33, 4, 1280), dtype=torch.bfloat16, logit_std=3.0)
    outputs = reference.mhc.hc_post_pre(**inputs)
    cotangents = make_cotangents(outputs)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HIDDEN_SIZES = (100, 1280, 2560, 4096, 5120, 7168)  # 100, 5120 and 7168 leave a tail in blocks that divide 4096
STREAM_COUNTS = (2, 3, 4, 5, 6, 7, 8)
LOGIT_STDS = (1.0, 3.0, 6.0, 10.0)
CONVENTIONS = ("v4", "paper")


@dataclass(frozen=True)
class MhcShape:
    """B batch, S sequence, N streams, D hidden size."""

    B: int
    S: int
    N: int
    D: int

    @property
    def T(self) -> int:
        return self.B * self.S

    @property
    def M(self) -> int:
        return self.N * self.N + 2 * self.N

    def __str__(self) -> str:
        return f"B{self.B}_S{self.S}_N{self.N}_D{self.D}"


# The first two are the shapes of the published mHC-Triton report.
BENCH_SHAPES = (
    MhcShape(1, 1024, 4, 5120),
    MhcShape(1, 2048, 4, 2560),
    MhcShape(1, 4096, 4, 4096),
    MhcShape(1, 8192, 4, 4096),
    MhcShape(1, 4096, 4, 7168),
)

OPS = ("sinkhorn", "hc_gates", "hc_project", "pre_bmm", "post_bmm", "res_bmm", "hc_pre", "hc_post", "hc_post_pre", "hc_head", "hc_expand")


class _Draw:
    """Normal draws of one case; results are cast to their dtype and moved last."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32  # of coefficients and parameters

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, dtype=self.wide)

    def as_stream(self, t: Tensor) -> Tensor:
        return t.to(self.dtype).to(self.device)

    def as_coefficient(self, t: Tensor) -> Tensor:
        return t.to(self.device)

    def streams(self, s: MhcShape) -> Tensor:
        """Unlike in level and mean from stream to stream and from token to token: a swapped stream, a wrong norm are visible."""
        level = torch.linspace(0.5, 2.0, s.N, dtype=self.wide)[:, None]
        mean = torch.linspace(-0.5, 0.3, s.N, dtype=self.wide)[:, None]
        token = torch.exp(0.5 * self.normal(s.B, s.S, 1, 1))
        return self.as_stream((self.normal(s.B, s.S, s.N, s.D) * level + mean) * token)

    def hidden(self, s: MhcShape) -> Tensor:
        return self.as_stream(self.normal(s.B, s.S, s.D))

    def gate(self, s: MhcShape, factor: float) -> Tensor:
        return self.as_coefficient(factor * torch.sigmoid(self.normal(s.B, s.S, s.N)))

    def comb(self, s: MhcShape) -> Tensor:
        """Row-stochastic, leaning to the upper triangle: asymmetric for every N, and not doubly stochastic.

        A doubly stochastic matrix would be symmetric at N = 2, and would hide a kernel that counts on its sums.
        """
        ones = torch.ones(s.N, s.N, dtype=self.wide)
        lean = 2.0 * (ones.triu(1) - ones.tril(-1))
        return self.as_coefficient(torch.softmax(0.5 * self.normal(s.B, s.S, s.N, s.N) + lean, dim=-1))

    def site(self, s: MhcShape, logit_std: float, columns: int | None = None) -> dict[str, Tensor]:
        """fn, scale, base of a site (head: columns = N). Mixes have std 1, comb logits std logit_std."""
        columns = s.M if columns is None else columns
        scale = [0.7, 1.3, logit_std] if columns == s.M else [0.7]
        return {
            "fn": self.as_coefficient(self.normal(columns, s.N * s.D) / math.sqrt(s.N * s.D)),
            "scale": self.as_coefficient(torch.tensor(scale, dtype=self.wide)),
            "base": self.as_coefficient(0.3 * self.normal(columns)),
        }


def make_inputs(
    op: str,
    shape: MhcShape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    logit_std: float = 1.0,
    with_pre_mix: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """The tensor arguments of the public function `op`, keyed by their names, in the order of its signature.

    dtype is that of the streams (x, f, h); parameters and coefficients are fp32, fp64 for fp64 streams. logit_std is the standard
    deviation of the comb logits (of `sinkhorn`, or reached through scale[2]). with_pre_mix adds pre_mix `[B, S, N]` to hc_pre and
    hc_post_pre. Ops with an `hc_mult` argument want it from shape.N. ValueError for an unknown op.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {OPS}, got {op!r}")
    if with_pre_mix and op not in ("hc_pre", "hc_post_pre"):
        raise ValueError(f"op {op!r} takes no pre_mix")
    s, draw = shape, _Draw(seed, dtype, device)
    inputs: dict[str, Tensor] = {}
    if op == "sinkhorn":
        inputs = {"logits": draw.as_coefficient(logit_std * draw.normal(s.B, s.S, s.N, s.N))}
    elif op == "hc_gates":
        site = draw.site(s, logit_std)
        inputs = {"mixes": draw.as_coefficient(draw.normal(s.B, s.S, s.M)), "scale": site["scale"], "base": site["base"]}
    elif op == "hc_project":
        inputs = {"x": draw.streams(s), "fn": draw.site(s, logit_std)["fn"]}
    elif op == "pre_bmm":
        inputs = {"pre": draw.gate(s, 1.0), "x": draw.streams(s)}
    elif op == "post_bmm":
        inputs = {"post": draw.gate(s, 2.0), "f": draw.hidden(s)}
    elif op == "res_bmm":
        inputs = {"comb": draw.comb(s), "x": draw.streams(s)}
    elif op == "hc_expand":
        inputs = {"h": draw.hidden(s)}
    elif op == "hc_head":
        inputs = {"x": draw.streams(s), **draw.site(s, logit_std, columns=s.N)}
    elif op == "hc_pre":
        inputs = {"x": draw.streams(s), **draw.site(s, logit_std)}
    else:  # hc_post, hc_post_pre
        inputs = {"f": draw.hidden(s), "x": draw.streams(s), "post": draw.gate(s, 2.0), "comb": draw.comb(s)}
        if op == "hc_post_pre":
            inputs |= draw.site(s, logit_std)
    if with_pre_mix:
        inputs["pre_mix"] = draw.gate(s, 1.0)
    return inputs


def make_cotangents(outputs: Tensor | Sequence[Tensor], *, seed: int = 1) -> tuple[Tensor, ...]:
    """One random cotangent per output, of its shape, dtype and device. A plain sum has almost no gradient through comb."""
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for o in outputs:
        wide = torch.float64 if o.dtype == torch.float64 else torch.float32
        drawn.append(torch.randn(o.shape, generator=generator, dtype=wide).to(o.dtype).to(o.device))
    return tuple(drawn)


def leaves(inputs: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Detached copies that require a gradient, optionally all in one dtype (fp64 for the reference of an error budget)."""
    return {name: t.detach().to(dtype or t.dtype).clone().requires_grad_(True) for name, t in inputs.items()}
