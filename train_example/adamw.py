"""AdamW on the local shards of parameters, with the division that clips the gradients in the same pass where the kernel can do it.

torch.optim.AdamW hands DTensors to its kernel, whose dispatch takes the host longer than the launches do; and to clip before it reads and
writes every gradient once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def update(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    divisor: Tensor | None,
    kernel: bool,
) -> None:
    """One AdamW step with the options of a parameter group, on gradients divided by `divisor`, a scalar on their device.

    kernel: by adamw_kernels.py, where the fused option is on and all tensors are fp32; else by torch, which divides the gradients in place.
    """
    if kernel and group["fused"]:
        from train_example import adamw_kernels

        return adamw_kernels.adamw(group, params, grads, exp_avgs, exp_avg_sqs, steps, divisor)
    if divisor is not None and not group["fused"]:
        torch._foreach_div_(grads, divisor)
        divisor = None
    adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        fused=group["fused"],
        grad_scale=divisor,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def scalar(value: float | None, device: torch.device) -> Tensor | None:
    return None if value is None else torch.full((), value, device=device)


class ShardedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW with state as it has it, for parameters of one device that are plain tensors or DTensors.

    kernel: the arithmetic is that of adamw_kernels.py (a GPU, fp32), not torch's.
    """

    def __init__(self, params: Any, *, kernel: bool = False, **options: Any) -> None:
        super().__init__(params, **options)
        self.kernel = kernel

    @torch.no_grad()
    def step(self, closure: None = None, divisor: float | None = None) -> None:  # type: ignore[override]  # no closure: gradients are there
        """One step on every parameter that has a gradient. divisor: what all gradients are divided by first, see clipping in step.py."""
        if closure is not None:
            raise ValueError("ShardedAdamW.step takes no closure")
        scale = None
        for group in self.param_groups:
            with_grad = [param for param in group["params"] if param.grad is not None]
            if not with_grad:
                continue
            scale = scalar(divisor, with_grad[0].device) if scale is None else scale
            states = [self.state[param] for param in with_grad]
            moments = ([local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
            steps = [state["step"] for state in states]
            update(group, [local(param) for param in with_grad], [local(param.grad) for param in with_grad], *moments, steps, scale, self.kernel)
