"""AdamW with one parameter group per mesh, and the learning-rate schedule."""

import math
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from train_example.adamw import ShardedAdamW
from train_example.checkpoint import init_optimizer_state
from train_example.model import fp32_islands
from train_example.run_config import RunConfig
from train_example.swap_optimizer import SwapAdamW


def make_optimizer(model: nn.Module, config: RunConfig) -> ShardedAdamW | SwapAdamW:
    """AdamW over the local shards; weight decay on matrices outside the fp32 islands (norms, sinks, routers and mHC have none).

    Dense and expert parameters live on different meshes and are in groups of their own: the fused update takes one mesh at a time.
    """
    island_params = {param for island in fp32_islands(model) for param in island.parameters()}
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for param in model.parameters():
        mesh_dims = param.device_mesh.ndim if isinstance(param, DTensor) else 0
        decay = param.dim() >= 2 and param not in island_params
        groups.setdefault((mesh_dims, decay), []).append(param)
    device = next(model.parameters()).device.type
    with_decay = [{"params": params, "weight_decay": config.weight_decay if decay else 0.0} for (_, decay), params in groups.items()]
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.adam_eps}
    options |= {"fused": device in ("cpu", "cuda") or None, "kernel": device == "cuda" and config.impl != "eager"}
    if config.swap_optimizer:
        return SwapAdamW(with_decay, **options)
    optimizer = ShardedAdamW(with_decay, **options)
    init_optimizer_state(optimizer)
    return optimizer


def learning_rate(config: RunConfig, step: int) -> float:
    """Of the step that makes `step` steps done (1-based): linear warmup, then a cosine down to min_lr x lr at the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.lr * (config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
