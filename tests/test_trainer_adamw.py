"""The AdamW kernel against torch's AdamW in fp64, and in SwapAdamW against ShardedAdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernel_runtime.plan import plan_for
from train_example.adamw import ShardedAdamW
from train_example.adamw_kernels import BLOCK, adamw_spec
from train_example.checkpoint import init_optimizer_state
from train_example.config import TINY
from train_example.swap_optimizer import ALIGN, SwapAdamW

SIZES = [(1,), (37, 11), (BLOCK,), (3, BLOCK + 1), (0,)]


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(device, dtype)) for size in SIZES]


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "weight_decay": 0.1}]


def gradients(number: int, device: str) -> list[torch.Tensor]:
    """Views one behind the other, so most of them at no multiple of 16 bytes."""
    counts = [torch.Size(size).numel() for size in SIZES]
    flat = torch.randn(sum(counts), generator=torch.Generator().manual_seed(number)).to(device)
    return [part.view(size) for part, size in zip(flat.split(counts), SIZES)]


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999)])
def test_against_fp64(kernel_device, betas):
    """Four steps, clipped and not, a gradient missing in one: as near to fp64 as torch in fp32, to a third; gradients stay as they are."""
    options: dict[str, Any] = {"lr": 1e-2, "betas": betas, "eps": 1e-8}
    exact, plain, ours = parameters(kernel_device, torch.float64), parameters(kernel_device), parameters(kernel_device)
    optimizers = [
        ShardedAdamW(groups(exact), fused=True, **options),
        ShardedAdamW(groups(plain), fused=True, **options),
        ShardedAdamW(groups(ours), fused=True, kernel=True, **options),
    ]
    for optimizer in optimizers:
        init_optimizer_state(optimizer)
    for number, divisor in enumerate((None, 3.7, 1.25, None)):
        given = gradients(number, kernel_device)
        for index, grad in enumerate(given):
            missing = (number, index) == (1, 3)
            for params in (exact, plain, ours):
                params[index].grad = None if missing else grad.to(params[index].dtype).clone() if params is not ours else grad
        for optimizer in optimizers:
            optimizer.param_groups[1]["lr"] = 1e-2 / (number + 1)
            optimizer.step(divisor=divisor)
        assert all(torch.equal(a, b) for a, b in zip(given, gradients(number, kernel_device)))
    for want, torchs, got in zip(exact, plain, ours):
        states = [optimizer.state[param] for optimizer, param in zip(optimizers, (want, torchs, got))]
        assert states[2]["step"].item() == states[0]["step"].item()
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            a, b, c = (want, torchs, got) if name == "weight" else (state[name] for state in states)
            error, budget = (c.double() - a).norm(), (b.double() - a).norm()
            assert error <= 1.33 * budget + 1e-7 * a.norm(), (name, tuple(want.shape), error, budget)


def test_swap_has_the_same_bits(kernel_device):
    """Parameters cut where a slot ends included."""
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True, "kernel": True}
    sizes = [(5, 3), (20 * ALIGN + 7,)]
    one = [torch.nn.Parameter(torch.randn(size, device=kernel_device)) for size in sizes]
    two = [torch.nn.Parameter(param.detach().clone()) for param in one]
    resident, swap = ShardedAdamW(one, **options), SwapAdamW(two, bucket_bytes=8 * ALIGN * 8, **options)
    init_optimizer_state(resident)
    for divisor in (None, 1.5, 1.5):
        for a, b in zip(one, two):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        resident.step(divisor=divisor)
        swap.step(divisor=divisor)
    swap.synchronize()
    for a, b in zip(one, two):
        assert torch.equal(a, b)
        assert all(torch.equal(resident.state[a][name].cpu(), swap.state[b][name].cpu()) for name in ("exp_avg", "exp_avg_sq", "step"))


@pytest.mark.interpret
def test_it_is_compiled_ahead():
    assert adamw_spec() in plan_for(TINY, "bf16")
