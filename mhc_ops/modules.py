"""mHC as modules: the parameters of a site and of the head, and the ops that use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kernel_runtime import IMPLS, check_choice, check_int
from mhc_ops.boundary.api import hc_post_pre
from mhc_ops.head.api import hc_head
from mhc_ops.library import check_eps, check_iteration, check_streams, mix_columns
from mhc_ops.pre.api import hc_pre

# Start of training after arXiv 2512.24880: small factors and no bias, so that the mix is nearly the same for every token and every stream.
INIT_STD, INIT_SCALE = 0.02, 0.01


class _Site(nn.Module):
    """fn [K, N*D], base [K], scale [factors]: fp32, and never 0-dim, which FSDP2 refuses."""

    fn: nn.Parameter
    base: nn.Parameter
    scale: nn.Parameter

    def __init__(self, hidden_size: int, hc_mult: int, *, site: bool, device: torch.device | str | None) -> None:
        super().__init__()
        check_int(type(self).__name__, "hidden_size", hidden_size, minimum=1)
        check_int(type(self).__name__, "hc_mult", hc_mult, minimum=1)
        check_streams(type(self).__name__, "hc_mult", hc_mult)
        self.hidden_size, self.hc_mult = hidden_size, hc_mult
        columns, factors = (mix_columns(hc_mult), 3) if site else (hc_mult, 1)
        self.fn = nn.Parameter(torch.empty(columns, hc_mult * hidden_size, dtype=torch.float32, device=device))
        self.base = nn.Parameter(torch.empty(columns, dtype=torch.float32, device=device))
        self.scale = nn.Parameter(torch.empty(factors, dtype=torch.float32, device=device))
        self.reset_parameters()

    def reset_parameters(self, std: float = INIT_STD, scale: float = INIT_SCALE) -> None:
        """fn normal with `std`, base zero, every factor `scale` (transformers' DeepSeek-V4 starts at scale 1)."""
        nn.init.normal_(self.fn, std=std)
        nn.init.zeros_(self.base)
        nn.init.constant_(self.scale, scale)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, hc_mult={self.hc_mult}"


class HyperConnection(_Site):
    """mHC at one sublayer: fn [M, N*D], base [M], scale [3], fp32, M = N*N + 2N, N = hc_mult, D = hidden_size.

        hc_1, hc_2 = HyperConnection(D), HyperConnection(D)
        streams, y, post, comb = hc_1(streams)
        f = attention(norm(y))
        streams, y, post, comb = hc_2(streams, (f, post, comb))       # the fused boundary
        streams = hc_post(mlp(norm(y)), streams, post, comb)

    Options are those of hc_pre. Parameters stay fp32: keep the module out of a cast of the model to bf16.
    """

    def __init__(
        self,
        hidden_size: int,
        hc_mult: int = 4,
        *,
        iters: int = 20,
        hc_eps: float = 1e-6,
        norm_eps: float = 1e-6,
        convention: str = "v4",
        impl: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(hidden_size, hc_mult, site=True, device=device)
        check_iteration("HyperConnection", iters, hc_eps, convention)
        check_eps("HyperConnection", "norm_eps", norm_eps)
        check_choice("HyperConnection", "impl", impl, IMPLS)
        self.iters, self.hc_eps, self.norm_eps, self.convention, self.impl = iters, hc_eps, norm_eps, convention, impl

    def forward(
        self,
        x: torch.Tensor,
        before: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        *,
        pre_mix: torch.Tensor | None = None,
        return_pre: bool | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """x [..., N, D] -> streams [..., N, D], y [..., D], post [..., N], comb [..., N, N] and, with return_pre, pre [..., N].

        Without `before` the streams are x itself. `before` = (f, post, comb) is the sublayer that read x: its hc_post is then done here,
        in the same op (hc_post_pre), and gives the streams. pre_mix and return_pre are those of hc_pre.
        """
        options: dict[str, Any] = {
            "iters": self.iters, "hc_eps": self.hc_eps, "norm_eps": self.norm_eps, "convention": self.convention, "pre_mix": pre_mix,
            "return_pre": return_pre, "impl": self.impl,
        }  # fmt: skip
        if before is None:
            return x, *hc_pre(x, self.fn, self.scale, self.base, **options)
        if not isinstance(before, tuple | list) or len(before) != 3:
            got = f"{len(before)} values" if isinstance(before, tuple | list) else type(before).__name__
            raise TypeError(f"HyperConnection: before must be (f, post, comb) of the sublayer that ends, got {got}")
        f, post, comb = before
        return hc_post_pre(f, x, post, comb, self.fn, self.scale, self.base, **options)


class HyperHead(_Site):
    """Exit of the network: fn [N, N*D], base [N], scale [1], fp32, N = hc_mult, D = hidden_size. Options are those of hc_head."""

    def __init__(
        self,
        hidden_size: int,
        hc_mult: int = 4,
        *,
        hc_eps: float = 1e-6,
        norm_eps: float = 1e-6,
        impl: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(hidden_size, hc_mult, site=False, device=device)
        check_eps("HyperHead", "hc_eps", hc_eps)
        check_eps("HyperHead", "norm_eps", norm_eps)
        check_choice("HyperHead", "impl", impl, IMPLS)
        self.hc_eps, self.norm_eps, self.impl = hc_eps, norm_eps, impl

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., N, D] -> h [..., D]"""
        return hc_head(x, self.fn, self.scale, self.base, hc_eps=self.hc_eps, norm_eps=self.norm_eps, impl=self.impl)
