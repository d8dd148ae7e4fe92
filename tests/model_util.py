"""What the tests of the trainer's model share."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from train_example.config import TINY, ModelConfig
from train_example.model import DeepSeekV4

IGNORE = -100


def change(config: ModelConfig = TINY, **changes) -> ModelConfig:
    return dataclasses.replace(config, **changes)


def tokens(batch: int = 2, length: int = 48, seed: int = 0, vocabulary: int = TINY.vocab_size) -> tuple[Tensor, Tensor]:
    """input_ids and labels [batch, length] of a random text."""
    ids = torch.randint(0, vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make(config: ModelConfig = TINY, seed: int = 0, spread: float = 0.0, **kwargs) -> DeepSeekV4:
    """`spread` adds noise to every parameter, so that nothing stays at the zero or one it is initialised with."""
    torch.manual_seed(seed)
    model = DeepSeekV4(config, **kwargs)
    if spread:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(spread * torch.randn_like(parameter))
    return model
