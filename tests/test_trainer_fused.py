"""The trainer's own kernels against fp64: SwiGLU, the experts' weighted sum and copies, RMS norm with RoPE; forward and all gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from train_example import fused, fused_kernels
from train_example.attention import GroupedLinear

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def check(fn: Callable[..., Tensor], inputs: list[Tensor], device: str, dtype: torch.dtype, exact: int = 0) -> None:
    """fn(*inputs, impl) against fp64. The last `exact` inputs stay fp32; error at most twice that of eager in the same dtype."""
    casts = [dtype] * (len(inputs) - exact) + [torch.float32] * exact
    given = [t.to(cast).to(device) for t, cast in zip(inputs, casts)]
    results, cotangent = {}, None
    for name, impl, to in (("fp64", "eager", torch.float64), ("eager", "eager", None), ("kernel", "triton", None)):
        leaves = [(t if to is None else t.to(to)).clone().requires_grad_() for t in given]
        out = fn(*leaves, impl)
        if cotangent is None:
            cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(dtype).to(device)
        out.backward(cotangent.to(out.dtype))
        results[name] = [out.detach(), *(leaf.grad for leaf in leaves)]
        if to is None:
            assert [t.dtype for t in results[name]] == [out.dtype, *casts] and out.dtype == dtype
    for exact_value, eager, kernel in zip(*results.values()):
        scale = exact_value.norm() + 1e-30
        rounding = torch.finfo(dtype).eps / 2
        assert (kernel.double() - exact_value).norm() / scale <= max(2 * (eager.double() - exact_value).norm() / scale, 2 * rounding)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
@pytest.mark.parametrize("width", [24, 1100])
def test_swiglu(kernel_device, dtype, width):
    check(lambda x, impl: fused.swiglu(x, 0.75, impl), [normal(5, 2 * width)], kernel_device, dtype)


def test_swiglu_keeps_nan(kernel_device):
    """The same elements as in eager, of the result and of the gradient. (A minimum drops NaN on a GPU unless told; the interpreter never does.)"""
    x = normal(3, 16)
    x[0, 2] = x[1, 11] = torch.nan
    found = []
    for impl in ("eager", "triton"):
        leaf = x.to(kernel_device).requires_grad_()
        out = fused.swiglu(leaf, 0.75, impl)
        found.append((out.isnan(), torch.autograd.grad(out, leaf, torch.ones_like(out))[0].isnan()))
    assert found[0][0].sum() == 2 and all(map(torch.equal, *found))


@DTYPES
@pytest.mark.parametrize(("k", "width"), [(2, 24), (3, 1100), (6, 64)])
def test_copies_and_weighted_sums(kernel_device, dtype, k, width):
    tokens = 7
    order = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(1)).to(kernel_device)
    place = order.argsort()
    weights = normal(tokens, k, seed=3).abs()
    combine = lambda rows, w, impl: fused.combine(rows, order, place, w, impl)  # noqa: E731  (a name for the argument of two calls)
    check(combine, [normal(tokens * k, width), weights], kernel_device, dtype, exact=1)
    check(lambda x, impl: fused.copy_rows(x, order, place, k, impl), [normal(tokens, width)], kernel_device, dtype)


@DTYPES
@pytest.mark.parametrize(("heads", "channels", "rotated"), [(3, 20, 8), (5, 64, 64), (0, 512, 64)])
@pytest.mark.parametrize("form", ["norm", "rope", "inverse"])
def test_norm_rope(kernel_device, dtype, heads, channels, rotated, form):
    B, S = 2, 3
    angle = normal(S, rotated // 2, seed=4)
    cos, sin = angle.cos().to(kernel_device), angle.sin().to(kernel_device)
    x = normal(B, S, heads, channels) if heads else normal(B, S, channels)

    def run(x: Tensor, impl: str) -> Tensor:
        tables = [t.to(torch.promote_types(x.dtype, torch.float32)) for t in (cos, sin)]
        if form == "norm":
            return fused.norm_rope(x, *tables, eps=1e-6, impl=impl)
        return fused.rope(x, *tables, inverse=form == "inverse", impl=impl)

    check(run, [x], kernel_device, dtype)


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(7, 20), (40, 600), (11, 1100)])
def test_rms_norm(kernel_device, monkeypatch, dtype, tokens, size):
    """Fewer tokens than a program takes, more blocks of them than there are programs, and sizes that are no power of two."""
    monkeypatch.setattr(fused_kernels, "PROGRAMS", 3)
    weight = 1 + 0.3 * normal(size, seed=3)
    check(lambda x, w, impl: fused.rms_norm(x, w, 1e-6, impl), [normal(2, tokens, size), weight], kernel_device, dtype, exact=1)


def test_nothing_to_do(kernel_device):
    empty = torch.empty(0, 8, device=kernel_device, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64, device=kernel_device)
    out = fused.swiglu(empty, 1.0, "triton")
    assert out.shape == (0, 4)
    out.sum().backward()
    assert fused.combine(empty, none, none, empty.new_empty(0, 2), "triton").shape == (0, 8)
    weight = torch.ones(8, device=kernel_device, requires_grad=True)
    fused.rms_norm(empty, weight, 1e-6, "triton").sum().backward()
    assert not weight.grad.any()
    assert fused.copy_rows(empty, none, none, 2, "triton").shape == (0, 8)


def test_grouped_linear_equals_an_einsum():
    layer = GroupedLinear(12, 10, 2).double()
    x = normal(3, 5, 12).double().requires_grad_()
    cotangent = normal(3, 5, 10, seed=2).double()
    out = layer(x)
    want = torch.einsum("btgi,goi->btgo", x.unflatten(-1, (2, 6)), layer.weight.unflatten(0, (2, 5))).flatten(-2)
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out, (x, layer.weight), cotangent)
    torch.testing.assert_close(got, torch.autograd.grad(want, (x, layer.weight), cotangent))


def test_shape_mistakes_are_named():
    with pytest.raises(ValueError, match=r"S = 4 as cos has, got shape \(2, 3, 8\)"):
        fused.rope(normal(2, 3, 8), normal(4, 2), normal(4, 2))
