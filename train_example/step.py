"""One training step and one evaluation.

Shape letters: B sequences a process takes at once, S sequence length, E experts, W processes.

Sums, not means, until the one division: every process and micro batch divides its loss sums by the same global number of valid tokens, so
losses and gradients of all of them simply add up.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from train_example.adamw import ShardedAdamW
from train_example.data import END_OF_FILE, IGNORE
from train_example.optim import learning_rate
from train_example.parallel import gradient_sumsq, moe_modules
from train_example.run_config import RunConfig
from train_example.swap_optimizer import SwapAdamW

LOSSES = ("loss", "lm_loss", "kl_loss", "mtp_loss")


def train_step(
    model: nn.Module, optimizer: ShardedAdamW | SwapAdamW, config: RunConfig, micro_batches: list[tuple[Tensor, Tensor]], step: int
) -> dict[str, Any]:
    """Forward and backward of all micro batches, then one optimizer step; returns the step's metrics.

    micro_batches: accumulate x (input_ids [B, S], labels [B, S]) int64. Collective; all ranks return the same numbers.

    But for experts' counts that cross processes the host waits for the device once, between the backward pass and the optimizer: whatever
    it wants to know it reads there. The optimizer may still be at work when this function returns, and the next step's launches are then
    made behind it.
    """
    device = next(model.parameters()).device
    valid = torch.stack([(labels != IGNORE).sum() for _, labels in micro_batches]).sum()
    valid = _to(valid, device)
    dist.all_reduce(valid)
    divisor = valid.clamp(min=1)

    losses, counts = torch.zeros(4, device=device), None
    for number, (input_ids, labels) in enumerate(micro_batches, 1):
        model.set_requires_gradient_sync(number == len(micro_batches))  # gradients of earlier micro batches add up locally
        out = model(_to(input_ids, device), _to(labels, device), num_valid_tokens=divisor)
        out.loss.backward()
        losses += torch.stack([out.loss, out.lm_loss, out.kl_loss, out.mtp_loss]).detach()
        counts = out.expert_counts if counts is None else counts + out.expert_counts

    row = torch.cat([losses, torch.stack(gradient_sumsq(model.parameters()))])  # first: the rest is launched while the device is at it
    dist.all_reduce(counts)
    load = (counts.max(1).values / counts.float().mean(1)).max()
    by_rank = _gather_rows(row)
    valid_tokens, expert_load = int(divisor), float(load)
    check_finite(by_rank, step)
    total = by_rank.sum(0).tolist()
    norm = math.sqrt(total[4] + total[5])
    lr = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step(divisor=norm / config.clip if config.clip != -1 and norm > config.clip else None)
    optimizer.zero_grad()
    balance_routers(model, counts, config.balance)
    norms = {"grad_norm": norm, "grad_norm_dense": math.sqrt(total[4]), "grad_norm_experts": math.sqrt(total[5])}
    return {**dict(zip(LOSSES, total)), **norms, "lr": lr, "expert_load": expert_load, "valid_tokens": valid_tokens}


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """On `device`; a copy from ordinary memory to a GPU would wait for all that the GPU has to do before it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _gather_rows(row: Tensor) -> Tensor:
    """[n] of each rank -> [W, n] in fp64 on the host, the same bits on every rank."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows).cpu().double()


def check_finite(by_rank: Tensor, step: int) -> None:
    """Raise on every rank, before the optimizer step, if a loss or a gradient shard of any rank is not finite.

    by_rank: [W, 6]: loss, lm, kl, mtp, squared norm of the rank's dense gradient shards, of its expert gradient shards.
    """
    names = (*LOSSES, "squared gradient norm (dense shard)", "squared gradient norm (expert shard)")
    values = [(rank, name, value) for rank, row in enumerate(by_rank.tolist()) for name, value in zip(names, row)]
    bad = [f"{name} of rank {rank} is {value}" for rank, name, value in values if not math.isfinite(value)]
    if bad:
        raise FloatingPointError(f"step {step}: {'; '.join(bad)}; the optimizer step was not taken")


@torch.no_grad()
def balance_routers(model: nn.Module, counts: Tensor, speed: float) -> None:
    """Move each top-k router's selection bias by `speed` towards experts with less than the mean load (arXiv 2412.19437, 2.1.2).

    counts: [MoE sites, E] rows of all ranks in this step. The bias only selects; it enters no weight and gets no gradient.
    """
    for moe, count in zip(moe_modules(model), counts):
        bias = getattr(moe.router, "e_score_correction_bias", None)
        if bias is not None:
            bias += speed * torch.sign(count.float().mean() - count)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Bits per byte: nats of all ranks added up, then divided once by the bytes of all ranks (token-weighted). Collective.

    batches: of this rank, (input_ids [B, S], labels [B, S]) int64; the same number on every rank. The end-of-file tokens are predicted
    too: their nats count, but they are no bytes.
    """
    device = next(model.parameters()).device
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for input_ids, labels in batches:
        input_ids, labels = input_ids.to(device), labels.to(device)
        totals[0] += model(input_ids, labels, num_valid_tokens=1).lm_loss.double()
        totals[1] += ((labels != IGNORE) & (labels != END_OF_FILE)).sum()
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # whoever looks at the parameters next is to find the master weights
    dist.all_reduce(totals)
    nats, count = totals.tolist()
    return nats / count / math.log(2) if count else math.nan
