"""A model small enough for tests that still has every layer kind, both routers and the MTP block, and helpers around it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.dist_util import COLLECTIVE_LIMIT
from train_example.config import ModelConfig
from train_example.model import DeepSeekV4
from train_example.parallel import Parallel, init_parallel
from train_example.run_config import RunConfig
from train_example.train import build_model

SMALL = ModelConfig(
    hidden_size=32,
    num_layers=3,
    num_heads=2,
    head_dim=16,
    rope_head_dim=8,
    q_lora_rank=16,
    o_lora_rank=8,
    window=8,
    compress_ratios=(0, 4, 16),
    index_heads=2,
    index_head_dim=16,
    index_topk=4,
    hc_iters=4,
    num_experts=4,
    expert_dim=16,
    init_std=0.1,
)


def run_config(**changes: Any) -> RunConfig:
    """Settings of a small, quick run."""
    model = dataclasses.replace(SMALL, **changes.pop("model", {}))
    defaults = {"seq_len": 24, "batch": 2, "steps": 6, "warmup_steps": 2, "lr": 3e-3, "eval_every": 0, "save_every": 0, "device": "cpu"}
    return RunConfig(model=model, **{**defaults, **changes})


def tokens(batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """input_ids and labels [batch, length] int64; three labels do not count, so that means of means would show."""
    ids = torch.randint(0, 256, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    labels = ids[:, 1:].clone()
    labels[0, :3] = -100
    return ids[:, :-1].contiguous(), labels


def plain_model(config: RunConfig) -> DeepSeekV4:
    """The same weights as build_model gives, in one piece, with no process group."""
    torch.manual_seed(config.seed)
    return DeepSeekV4(config.model, impl=config.impl)


def sharded(config: RunConfig) -> tuple[nn.Module, Parallel]:
    parallel = init_parallel(torch.device("cpu"), config.ep, COLLECTIVE_LIMIT, config.ep_group == "own")
    return build_model(config, parallel), parallel


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors from shards. Collective."""
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name; a missing one is an error. Collective."""
    missing = [name for name, param in model.named_parameters() if param.grad is None]
    assert not missing, f"no gradient for {missing}"
    return gathered({name: param.grad for name, param in model.named_parameters()})


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return gathered(dict(model.named_parameters()))


def ratio(got: dict[str, Tensor], want: dict[str, Tensor], names: list[str]) -> float:
    """Least-squares factor c in got = c * want over the named tensors: 1 where they agree, ep where they are ep times too large."""
    dot = sum((got[n].double() * want[n].double()).sum() for n in names)
    return float(dot / sum(want[n].double().square().sum() for n in names))


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative difference over the tensors by name, in norms, and whose it is.

    The denominator is at least 1e-3 of the largest norm: the gradient of a single factor of mHC is a sum of large terms that cancel, and
    its own size says little about the rounding in it.
    """
    assert got.keys() == want.keys()
    floor = 1e-3 * max(float(tensor.norm()) for tensor in want.values())
    return max((float((got[n] - want[n]).norm()) / max(float(want[n].norm()), floor), n) for n in want)
