"""What the tests of recompute share: stacks of layers, their gradients, and what is replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.recompute import Stack
from mhc_ops.recompute import record

BF16, FP32 = torch.bfloat16, torch.float32
LAYERS, TOKENS, HIDDEN, N = 5, 6, 40, 4


def make_stack(mode: str, dtype: torch.dtype = FP32, layers: int = LAYERS) -> Stack:
    return Stack(mode, layers, HIDDEN, N, dtype, TOKENS)


def gradients(module: torch.nn.Module, run: Callable[[Tensor], Tensor] | None = None, dtype: torch.dtype = FP32, again: int = 0) -> list[Tensor]:
    """Of the input and every parameter, for random input and cotangent. again: how often backward runs on the same graph before that."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(2, 3, HIDDEN, generator=generator).to(dtype).requires_grad_()
    out = (module if run is None else run)(h)
    cotangent = torch.randn(out.shape, generator=generator).to(dtype)
    for _ in range(again):
        out.backward(cotangent, retain_graph=True)
        h.grad = None
        module.zero_grad()
    out.backward(cotangent)
    found = [h.grad, *(p.grad for p in module.parameters())]
    assert all(g is not None and torch.isfinite(g).all() and g.abs().sum() > 0 for g in found)
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def replays(monkeypatch) -> list[str]:
    """The names of what is replayed from now on, in order."""
    seen: list[str] = []
    for name in ("replay_streams", "replay_collapse"):
        make = getattr(record, name)
        monkeypatch.setattr(record, name, lambda *args, make=make, name=name: (seen.append(name), make(*args))[1])
    return seen
