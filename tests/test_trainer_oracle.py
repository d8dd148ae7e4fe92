"""The first 20 steps of the trainer against transformers' DeepseekV4: same weights, same tokens, AdamW on both sides, the loss of each step.

transformers runs in fp32 on plain tensors; ours is the sharded model with the trainer's own step, in one process. The indexer's loss, MTP
and the balancing of routers are off, for transformers has none of them.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from train_example.hf_map import port
from train_example.optim import make_optimizer
from train_example.parallel import broadcast_parameters, init_parallel
from train_example.run_config import RunConfig
from train_example.step import train_step
from train_example.train import build_model

pytest.importorskip("transformers", reason="transformers is the oracle, a dependency of the tests alone")
from tests.test_hf_parity import hf_config, hf_model

STEPS, BATCH, LENGTH, LR = 20, 4, 75, 5e-4
# Relative, of the loss of any step. fp32: rounding, and the few choices of experts and entries that it turns over in 20 updates.
# bf16 against fp32: the rounding of every matrix product.
TOLERANCE = {"fp32": 1e-3, "bf16": 1e-2}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Counting up in steps that differ from sequence to sequence: soon learned, so that a wrong update shows."""
    generator = torch.Generator().manual_seed(5)
    out = []
    for _ in range(STEPS):
        start, stride = (torch.randint(low, high, (BATCH, 1), generator=generator) for low, high in ((0, 97), (1, 4)))
        ids = (start + stride * torch.arange(LENGTH + 1)) % 97
        out.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    return out


def their_losses(model: torch.nn.Module, device: str) -> list[float]:
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for ids, labels in batches():
        loss = F.cross_entropy(model(ids.to(device)).logits.flatten(0, 1), labels.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def our_losses(theirs: torch.nn.Module, device: str, impl: str, dtype: str) -> list[float]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="kl_coefficient is 0")
        plain = port(theirs, impl="eager", kl_coefficient=0.0, mtp_layers=0)
        config = RunConfig(model=plain.config, impl=impl, dtype=dtype, device=device, lr=LR, warmup_steps=0, min_lr=1.0, weight_decay=0.0, clip=-1,
                           balance=0.0, steps=STEPS, seq_len=LENGTH, batch=BATCH)  # fmt: skip
        parallel = init_parallel(torch.device(device), 1, 60.0)
        try:
            model = build_model(config, parallel, fill=False)
            broadcast_parameters(model, plain.state_dict(), parallel)
            for mine, ported in zip(model.buffers(), plain.buffers(), strict=True):  # the routing tables are theirs
                mine.copy_(ported)
            optimizer = make_optimizer(model, config)
            return [train_step(model, optimizer, config, [batch], step)["loss"] for step, batch in enumerate(batches(), 1)]
        finally:
            dist.destroy_process_group()


def check(device: str, impl: str, dtype: str) -> None:
    theirs = hf_model(hf_config(["window", "csa", "hca"], 1, index_head_dim=32, vocab_size=264), seed=0)
    wanted, got = their_losses(theirs, device), our_losses(theirs, device, impl, dtype)
    differences = [abs(a - b) / a for a, b in zip(wanted, got)]
    print(f"{device} {impl} {dtype}: largest relative difference of the loss in {STEPS} steps {max(differences):.2e}, loss {wanted[0]:.3f} to "
          f"{wanted[-1]:.3f}")  # fmt: skip
    assert wanted[-1] < 0.9 * wanted[0], "the task is not learned: the comparison would say little"
    assert max(differences) < TOLERANCE[dtype], differences


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_eager_on_the_cpu(dtype):
    check("cpu", "eager", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("impl", "dtype"), [("eager", "bf16"), ("triton", "fp32"), ("triton", "bf16")])
def test_on_a_gpu(impl, dtype):
    check("cuda", impl, dtype)
